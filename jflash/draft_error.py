"""How far a rounded drafter's logits lie from the exact ones, after parts of one text.

τ on prompts of one's own says more; this takes seconds, and tells a wrong rounding from a right
one. Noise of a few per cent turns logits after random features into others, so the features are the
target's, of real tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash.devices.mesh import EVERYWHERE, local, param_specs, spread
from jflash.layers.passes import Block, Chunk
from jflash.pair import Models, Params
from jflash.speculative import apply

TEXT = """Question: A baker fills 7 trays with 12 rolls each and sells 59 rolls. How many rolls are
left? Answer: The baker makes 7 times 12 rolls, which is 84 rolls. After selling 59 of them,
84 - 59 = 25 rolls are left. Question: Why is the sky blue? Answer: Sunlight holds all colours. The
air scatters short waves far more than long ones, so blue light reaches us from every side of the
sky, while red light passes on almost straight. In the evening the light has a longer way through
the air, most of the blue is lost, and the sky near the sun turns red."""
BLOCKS, MOST, CAPACITY = 8, 128, 256


class DraftError(NamedTuple):
    """Of the logits of blocks after parts of a text."""

    relative: float  # root mean square of the differences, over that of the exact logits
    same_best: float  # share of places with the same best token
    places: int

    def __str__(self) -> str:
        return (
            f"logits differ from the exact ones by {self.relative:.1%} (root mean square), the "
            f"best token is the same at {self.same_best:.0%} of {self.places} places of one text"
        )


def draft_error(
    exact: Models, params: Params, other: Models, rounded: Params, text: Sequence[int]
) -> DraftError:
    """Compares two forms of one drafter after parts of `text`; the target's are the same."""
    tokens = jnp.asarray([text[:MOST]], jnp.int32)
    assert tokens.shape[1] > BLOCKS, "a text has room for a block's context"
    features = _over_devices(_features, exact, params, tokens)
    one = _over_devices(_logits, exact, params, tokens, features)
    two = _over_devices(_logits, other, rounded, tokens, features)
    size = jnp.sqrt(jnp.mean(jnp.square(one)))
    relative = jnp.sqrt(jnp.mean(jnp.square(one - two))) / size
    same = jnp.argmax(one, axis=-1) == jnp.argmax(two, axis=-1)
    return DraftError(float(relative), float(same.mean()), same.size)


def _over_devices(function: Callable, models: Models, params: Params, *rows: Array) -> Array:
    """`function` of models, parameters and rows, by all devices that share the models."""
    part, takes = local(models), (param_specs(models, params), *[EVERYWHERE] * len(rows))
    program = functools.partial(function, part)
    return spread(models.mesh, program, takes, EVERYWHERE)(params, *rows)


def _features(models: Models, params: Params, tokens: Int[Array, "1 T"]) -> Float[Array, "1 T PD"]:
    """The target's tapped layers, as a prompt's chunk gives them."""
    count = tokens.shape[1]
    caches = models.target.empty_states(1, CAPACITY, count, models.dtype)
    over = Chunk(jnp.int32(0), jnp.int32(0), jnp.int32(count), models.kernels.chunk)
    return apply(
        models.target, params.target, tokens, jnp.arange(count)[None], caches, over, models.taps
    )[1]


def _logits(
    models: Models, params: Params, tokens: Int[Array, "1 T"], features: Float[Array, "1 T PD"]
) -> Float[Array, "B D _"]:
    """Of the masked rows of blocks that begin at even distances in the text."""
    assert models.drafter is not None
    c, kernels, W = models.drafter.config, models.kernels, models.block_size
    target, drafter = (models.target, params.target), (models.drafter, params.drafter)
    count = tokens.shape[1]
    places = jnp.broadcast_to(jnp.arange(count), (BLOCKS, count))
    features = jnp.broadcast_to(features, (BLOCKS, *features.shape[1:]))
    starts = jnp.arange(1, BLOCKS + 1) * count // (BLOCKS + 1)
    context = apply(*drafter, features, places, kernels, method="context")
    caches = models.drafter.empty_states(BLOCKS, CAPACITY, W, models.dtype)
    caches = tuple(
        projected.write(cache, cache.slots(places, places < starts[:, None]), kernels.heads)[1]
        for projected, cache in zip(context, caches, strict=True)
    )
    masks = jnp.full((BLOCKS, W - 1), c.mask_token_id, tokens.dtype)
    block = jnp.concatenate([tokens[0, starts][:, None], masks], axis=1)
    embeddings = apply(*(drafter if c.own_embedding else target), block, method="embed")
    positions = starts[:, None] + jnp.arange(W)
    over = Block(starts, jnp.full(BLOCKS, W), kernels)
    hidden, _ = apply(*drafter, embeddings, positions, caches, over)
    head = drafter if c.has_head else target
    return apply(*head, hidden[:, 1:], kernels.matmul, method="raw_logits")
