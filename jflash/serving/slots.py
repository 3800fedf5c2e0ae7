"""What the engine keeps on its device: slots, and pools of pages of which every call brings tables.

Nothing here computes a token.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jflash.cache import LayerCache, PagedCache, RingCache, WindowCache
from jflash.logprobs import unasked
from jflash.mesh import EVERYWHERE, local, shared, specs
from jflash.models.params import decoding_params
from jflash.pair import Models
from jflash.places import landing_places, place_specs
from jflash.programs import LARGE_CHUNK, Shape, chunk_sizes, empty_sequences
from jflash.rows import empty_survey
from jflash.serving.request import MOST
from jflash.shaping import unshaped
from jflash.state import State
from pallas_kernels.block_attention import PAGE

Kind = Literal["greedy", "drawn"]
KINDS: tuple[Kind, ...] = ("greedy", "drawn")
CACHES = ("target_cache", "drafter_cache")  # of a State
PROMPTS, MOST_WEIGHTS = 4, 10**9  # of `several_prompts`; more are no small model
# More leave ended slots idle for longer, and fewer let the device wait where a step is short: with
# SmolLM2 at batch 32 a round's dispatches take 4.0 ms with two steps a call, and 4.9 with four.
STEPS_PER_CALL, STEPS_OF_SMALL = 2, 4
BIASED = 320  # tokens with a bias in a request at most; OpenAI's limit is 300


class Layout(NamedTuple):
    """The static sizes; `shape.capacity` is PAGE times the columns of a table."""

    shape: Shape
    pages: int
    steps: int  # of a call
    kinds: tuple[Kind, ...] = KINDS  # of requests that it serves
    states: int = 0  # copies of a slot's recurrent states that prefixes keep
    prompts: int | None = None  # that a pass computes at most; None: as many as pay
    counts: tuple[int, ...] | None = None  # of slots that a call may serve; None: those that pay

    @property
    def columns(self) -> int:
        return self.shape.capacity // PAGE


def empty_state(models: Models, layout: Layout) -> State:
    """A state with empty slots and pages of zeros; it is there on all devices that share the
    models, so that none writes where nothing is yet."""
    return jax.block_until_ready(_made_state(models, layout))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _made_state(models: Models, layout: Layout) -> State:
    make = functools.partial(_empty_state, local(models), layout)
    return shared(models.mesh, make, (), state_specs(models, layout))()


def state_specs(models: Models, layout: Layout) -> Any:
    """Where a state's arrays lie: devices share the pools, and all have the sequences."""
    if models.mesh is None:
        return EVERYWHERE
    bare = lambda models: _empty_state(models, layout)._replace(places=None)  # noqa: E731
    return specs(models, bare)._replace(places=place_specs(models))


def _empty_state(models: Models, layout: Layout) -> State:
    shape = layout.shape

    def paged(layer):
        if not isinstance(layer, LayerCache | RingCache):
            return layer
        kind = PagedCache
        count = layout.pages
        if isinstance(layer, RingCache):
            assert window is not None, "a ring is of a window"
            kind, count = WindowCache, window.pages
        k, v = (jnp.zeros((count, PAGE, *x.shape[2:]), x.dtype) for x in (layer.k, layer.v))
        return kind(k, v, None)

    window = sliding(models, layout)
    rows = max(models.block_size, chunk_sizes(models, shape)[-1])
    sizes = (shape.batch, PAGE, rows, models.dtype)
    both = (models.target, models.drafter)
    target, drafter = (
        () if model is None else tuple(map(paged, model.empty_states(*sizes))) for model in both
    )
    survey = None if models.rows is None else empty_survey()
    sequences = empty_sequences(shape)._replace(
        shaping=unshaped(shape.batch, BIASED),
        logprobs=unasked(shape.batch, places_of(models, layout), most_of(models)),
        best_drafts=jnp.zeros(shape.batch, bool),
    )
    return State(sequences, target, drafter, survey, landing_places(models))


def pass_sizes(models: Models, shape: Shape) -> tuple[int, ...]:
    """Tokens of a prompt that one pass may compute, ascending: `chunk_sizes`, and a page where no
    size changes a bit. A prompt that came before has its full pages, so no more is left of it.
    """
    sizes = chunk_sizes(models, shape)
    free = models.one_arithmetic and models.kernels.attention == "canonical"
    return (PAGE, *sizes) if free and sizes[0] > PAGE else sizes


class Several(NamedTuple):
    """A pass over the last chunks of several prompts, which runs where `least` of them wait."""

    prompts: int
    tokens: int  # of each, at most
    least: int = 2

    def takes(self, size: int) -> bool:
        """Whether it computes a prompt's pass of so many tokens, and not half of it for nothing."""
        return size <= self.tokens <= 2 * size


def steps_of_call(models: Models, steps: int | None = None) -> int:
    """The steps of a call: those given, or as many as keep the device at work."""
    if steps is not None:
        return steps
    dispatched = models.kernels.attention == "canonical"  # a CPU computes them at once
    return STEPS_OF_SMALL if dispatched and small(models) else STEPS_PER_CALL


def small(models: Models) -> bool:
    """Whether a device's part of the target has so few weights that the host is the slower one."""
    weights = jax.tree.leaves(decoding_params(local(models).target.config))
    return sum(math.prod(leaf.stored) for leaf in weights) <= MOST_WEIGHTS


def several_prompts(models: Models, layout: Layout) -> tuple[Several, ...]:
    """The passes over several prompts.

    A pass has a fixed number, so where fewer wait it computes rows for nothing: 128 of a model of N
    weights take 256 N operations, 0.5 ms of an H200 at 10⁹. What it saves is a program's dispatch
    for each prompt but one, 1.5 ms or more of the host, and as many turns of reading the weights.
    With fewer weights it pays for two prompts; with more where most of its rows are theirs, and two
    large chunks fill the turns of a GPU better than one. A CPU waits for no dispatch.
    """
    smallest, *larger = chunk_sizes(models, layout.shape)
    if layout.prompts is not None:
        return (Several(layout.prompts, smallest),) if layout.prompts > 1 else ()
    if refusal_of_prompts(models) or models.kernels.attention != "canonical":
        return ()
    if small(models):
        return (Several(PROMPTS, smallest),)
    pairs = [Several(2, size) for size in larger if size <= LARGE_CHUNK]
    return Several(PROMPTS, smallest, PROMPTS - 1), *pairs


def refusal_of_prompts(models: Models) -> str | None:
    """Why a pass computes one prompt alone, if it must."""
    if not models.one_arithmetic:
        return "a prompt's bits may depend on the others"
    if any(config.deltas for config in models.configs):
        return "recurrent layers take one prompt at a time"
    return None


def places_of(models: Models, layout: Layout) -> int:
    """The tokens that a slot may get in a call."""
    return models.block_size * layout.steps


def most_of(models: Models) -> int:
    """The most probable tokens that a request may ask for."""
    return min(MOST, models.target.config.vocab_size)


class Window(NamedTuple):
    """The pools of the layers with windows: the largest window, and their pages in all."""

    size: int
    pages: int


def sliding(models: Models, layout: Layout) -> Window | None:
    """Room for what the slots see of the past, compute and may commit ahead, and as much again for
    prefixes; None without windows. The slots' need is always met."""
    windows = [m.window for c in models.configs for m in c.mixers if m.window is not None]
    if not windows:
        return None
    shape, ahead = layout.shape, 3 * layout.steps * models.block_size
    most = chunk_sizes(models, shape)[-1]
    one = -(-(max(windows) + max(most, ahead)) // PAGE) + 2
    return Window(max(windows), shape.batch * min(2 * one, layout.columns))


def table_columns(models: Models, layout: Layout) -> int:
    """The columns of a call's table; the second half is of the layers with windows."""
    return layout.columns * (1 if sliding(models, layout) is None else 2)


def with_table(state: State, table: Int[Array, "B _"] | None) -> State:
    """The state with its table of pages in every layer that has pages."""
    layers = (*state.target_cache, *state.drafter_cache)
    full = window = table
    if table is not None and any(isinstance(layer, WindowCache) for layer in layers):
        full, window = jnp.split(table, 2, axis=1)

    def one(layer):
        if isinstance(layer, WindowCache):
            return layer._replace(table=window)
        return layer._replace(table=full) if isinstance(layer, PagedCache) else layer

    caches = {name: tuple(map(one, getattr(state, name))) for name in CACHES}
    return state._replace(**caches)
