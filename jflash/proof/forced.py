"""A given text through the program that decodes: prompts in chunks, then block after block.

The passes are prefill's and verify's, with their kernels and caches; only the next token is given
instead of chosen. Besides logits it keeps the experts of each token. Devices that share the target
gather by XLA here: their places for pushes are of a state, and there is none.
Axes: B batch, T tokens, W block width, R rows of the blocks, V vocabulary, X layers with experts,
k experts a token.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jflash.devices.distribute import placed
from jflash.devices.mesh import EVERYWHERE, local, param_specs, shared, specs
from jflash.layers.experts import ROUTING
from jflash.layers.passes import Block, Chunk, Pass
from jflash.models.decoder import Caches
from jflash.pair import Models, Params
from jflash.records.kernels import XLA
from jflash.speculative import apply

PROMPT, CHUNK, CAPACITY = 100, 64, 256  # the second chunk is padded, and blocks begin off its grid


class Seen(NamedTuple):
    """A program's results for a text's rows after the prompt."""

    logits: Float[Array, "B R V"]
    choices: Int[Array, "B R"]  # the kernel's for the largest logit
    experts: Int[Array, "X B T k"]  # of the prompt as well


def forced(models: Models, params: Any, text: Int[Array, "B T"]) -> Seen:
    """The text through `models` without a drafter; blocks follow the first PROMPT tokens.

    The target lies whole on the first device, and so do the results; devices that share it get
    their parts of it for this text alone.
    """
    assert (text.shape[1] - PROMPT) % models.block_size == 0 and text.shape[1] <= CAPACITY
    params = placed(models.mesh, models.target.config, params)
    # A prompt's chunks do not know the width: both widths take the same executable.
    caches, prompt = _prompt(replace(models, block_size=1), params, text)
    logits, choices, rows = _blocks(models, params, text, caches)
    seen = Seen(logits, choices, jnp.concatenate([prompt, rows], axis=2))
    return seen if models.mesh is None else jax.device_put(seen, models.mesh.devices.flat[0])


@functools.partial(jax.jit, static_argnums=0)
def _prompt(models: Models, params: Any, text: Array) -> tuple[Caches, Array]:
    """The caches of all prompts, and the experts of their tokens [X, B, PROMPT, k]."""
    where = param_specs(models, Params(params)), EVERYWHERE
    gives = _cache_specs(models), EVERYWHERE
    over_own = functools.partial(_prompt_of, local(models))
    return shared(models.mesh, over_own, where, gives)(Params(params), text)


@functools.partial(jax.jit, static_argnums=0)
def _blocks(models: Models, params: Any, text: Array, caches: Caches) -> tuple[Array, Array, Array]:
    """Logits, choices and experts of all rows after the prompt."""
    where = param_specs(models, Params(params)), EVERYWHERE, _cache_specs(models)
    over_own = functools.partial(_blocks_of, local(models))
    return shared(models.mesh, over_own, where, (EVERYWHERE,) * 3)(Params(params), text, caches)


def _cache_specs(models: Models) -> Any:
    """Where the caches lie, of however many texts."""
    return specs(models, functools.partial(_empty, batch=1))


def _empty(models: Models, batch: int) -> Caches:
    return models.target.empty_states(batch, CAPACITY, CHUNK, models.dtype)


def _prompt_of(models: Models, both: Params, text: Array) -> tuple[Caches, Array]:
    params = both.target
    batch, chunks = len(text), -(-PROMPT // CHUNK)
    room = jnp.zeros((batch, chunks * CHUNK), text.dtype).at[:, :PROMPT].set(text[:, :PROMPT])
    empty = _empty(models, batch)

    def chunk(caches: Caches, place: tuple[Array, Array]) -> tuple[Caches, Array]:
        slot, offset = place
        tokens = lax.dynamic_slice(room, (slot, offset), (1, CHUNK))
        positions = (offset + jnp.arange(CHUNK))[None]
        kernels = XLA._replace(experts=models.kernels.experts)  # as prefill has them
        over = Chunk(slot, offset, jnp.int32(PROMPT), kernels)
        return _pass(models, params, tokens, positions, caches, over)[1:]

    slots = jnp.repeat(jnp.arange(batch), chunks)
    caches, experts = lax.scan(chunk, empty, (slots, jnp.arange(batch * chunks) % chunks * CHUNK))
    layers, k = experts.shape[1], experts.shape[-1]
    experts = experts[:, :, 0].reshape(batch, chunks, layers, CHUNK, k)
    experts = jnp.einsum("BCXTk->XBCTk", experts)
    return caches, experts.reshape(layers, batch, chunks * CHUNK, k)[:, :, :PROMPT]


def _blocks_of(
    models: Models, both: Params, text: Array, caches: Caches
) -> tuple[Array, Array, Array]:
    params, batch, width = both.target, len(text), models.block_size

    def block(caches: Caches, begin: Array) -> tuple[Caches, tuple[Array, Array, Array]]:
        tokens = lax.dynamic_slice_in_dim(text, begin, width, axis=1)
        positions = jnp.broadcast_to(begin + jnp.arange(width), (batch, width))
        widths = jnp.full(batch, width)
        over = Block(positions[:, 0], widths, models.kernels)
        hidden, caches, experts = _pass(models, params, tokens, positions, caches, over)
        logits = apply(models.target, params, hidden, method="logits")
        best = apply(models.target, params, hidden, models.kernels.matmul, method="best")
        return caches, (logits, best, experts)

    begins = jnp.arange(PROMPT, text.shape[1], width)
    _, (logits, choices, experts) = lax.scan(block, caches, begins)
    rows, layers, k = len(begins) * width, experts.shape[1], experts.shape[-1]
    logits = jnp.einsum("ABWV->BAWV", logits).reshape(batch, rows, logits.shape[-1])
    choices = jnp.einsum("ABW->BAW", choices).reshape(batch, rows)
    return logits, choices, jnp.einsum("AXBWk->XBAWk", experts).reshape(layers, batch, rows, k)


def _pass(
    models: Models, params: Any, tokens: Array, positions: Array, caches: Caches, over: Pass
) -> tuple[Array, Caches, Array]:
    """The target's pass, and the experts of its tokens [X, B, T, k]."""
    (hidden, _, caches), kept = models.target.apply(
        {"params": params}, tokens, positions, caches, over, (), mutable=[ROUTING]
    )
    config = models.target.config
    if not config.experts:
        return hidden, caches, jnp.zeros((0, *tokens.shape, 1), jnp.int32)
    routing: Any = kept[ROUTING]
    names = [(i, config.layers[i].experts_name) for i in config.sparse_layers]
    ids = [routing[f"layers_{i}"][name]["ids"][0] for i, name in names]
    k = config.experts[0].experts_per_token
    return hidden, caches, jnp.stack(ids).reshape(len(ids), *tokens.shape, k)
