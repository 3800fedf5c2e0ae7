"""The static sizes of a program, and the arrays of these sizes: a state without texts, a request.

Prompt lengths, limits, stop sets and seeds are run-time values within a shape.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.devices.mesh import EVERYWHERE, local, shared, specs
from jflash.devices.places import landing_places, place_specs
from jflash.pair import Models
from jflash.records.decoding import GREEDY, Decoding
from jflash.rows import empty_survey
from jflash.state import Sequences, State
from jflash.tokens.sampling import filters_of

PREFILL_CHUNK = 128  # tokens of a prompt that one pass computes
LARGE_CHUNK = 512  # the same of an engine, where no chunk changes a bit
STOP_SLOTS = 16  # stop ids are padded to a multiple of this


class Shape(NamedTuple):
    """The static sizes of a program; two requests with equal shapes share their executables."""

    batch: int
    capacity: int
    chunk: int
    stop_slots: int

    @classmethod
    def of(cls, batch: int, capacity: int, stops: int = 0, chunk: int = PREFILL_CHUNK) -> "Shape":
        """The shape that serves requests of at most `stops` stop ids each."""
        return cls(batch, capacity, chunk, max(1, -(-stops // STOP_SLOTS)) * STOP_SLOTS)


def capacity_for(prompt_tokens: int, max_new_tokens: int, block_size: int, chunk: int) -> int:
    """Cache slots for a request, rounded up to a bucket (two to an octave, at least 256).

    Holds the prompt padded to whole chunks, and every row that a padded block may write.
    """
    padded = -(-prompt_tokens // chunk) * chunk
    need = max(padded, prompt_tokens + max_new_tokens + block_size)
    bucket = max(256, 1 << (need.bit_length() - 2))
    return -(-need // bucket) * bucket


def chunk_sizes(models: Models, shape: Shape) -> tuple[int, ...]:
    """Tokens of a prompt that one pass may compute, ascending: the shape's, and fewer for the rest
    of a prompt where no chunk changes a bit. A CPU gains nothing by a second size.
    """
    if not (models.one_arithmetic and models.kernels.attention == "canonical"):
        return (shape.chunk,)
    fewer = (n for n in (PREFILL_CHUNK, LARGE_CHUNK) if n < shape.chunk and shape.chunk % n == 0)
    return (*fewer, shape.chunk)


def new_state(models: Models, shape: Shape) -> State:
    """A state of empty slots, all done: they idle until a prompt is admitted.

    It is there on all devices that share the models, so that none writes where nothing is yet.
    """
    return jax.block_until_ready(_made_state(models, shape))


@functools.cache
def state_bytes(models: Models, shape: Shape) -> int:
    """The bytes that a state takes of each device."""
    state = jax.eval_shape(functools.partial(_new_state, local(models), shape))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _made_state(models: Models, shape: Shape) -> State:
    make = functools.partial(_new_state, local(models), shape)
    return shared(models.mesh, make, (), state_specs(models))()


def state_specs(models: Models) -> Any:
    """Where the arrays of a state lie: devices share the caches, and all have the sequences."""
    if models.mesh is None:
        return EVERYWHERE
    target, drafter = specs(models, functools.partial(_caches, shape=Shape.of(1, PREFILL_CHUNK)))
    return State(EVERYWHERE, target, drafter, EVERYWHERE, place_specs(models))


def _new_state(models: Models, shape: Shape) -> State:
    survey = None if models.rows is None else empty_survey()
    caches = _caches(models, shape)
    return State(empty_sequences(shape), *caches, survey, landing_places(models))


def _caches(models: Models, shape: Shape) -> tuple[tuple, tuple]:
    """The target's and the drafter's."""
    sizes, width = (shape.batch, shape.capacity), models.block_size
    target_cache = models.target.empty_states(*sizes, target_rows(models, shape), models.dtype)
    drafter_cache = ()
    if models.drafter is not None:
        drafter_cache = models.drafter.empty_states(*sizes, width, models.dtype)
    return target_cache, drafter_cache


def target_rows(models: Models, shape: Shape) -> int:
    """Tokens at once that a ring of the target has places for.

    A prompt's chunk attends only in the target; of a drafter it only writes the context. The
    canonical attention cuts its pieces by slots: its rings are long enough never to wrap.
    """
    if models.kernels.attention == "canonical":
        return shape.capacity
    return max(models.block_size, shape.chunk)


def empty_sequences(shape: Shape) -> Sequences:
    """Sequences that hold nothing and are done."""
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    return Sequences(
        tokens=ints((shape.batch, shape.capacity)),
        length=jnp.ones(shape.batch, jnp.int32),
        limit=jnp.ones(shape.batch, jnp.int32),
        stops=jnp.full((shape.batch, shape.stop_slots), -1, jnp.int32),
        done=jnp.ones(shape.batch, bool),
        max_accept=ints(shape.batch),
        key=jax.random.split(jax.random.key(0), shape.batch),
        filters=jax.tree.map(lambda x: jnp.full(shape.batch, x), filters_of(GREEDY)),
        steps=ints(shape.batch),
        acceptance_lengths=ints((shape.batch, shape.capacity)),
    )


def make_request(
    shape: Shape, prompt: Sequence[int], decoding: Decoding, max_accept: int, key: Array
) -> Sequences:
    """One sequence's row, padded on the host: no length of anything reaches the compiler.

    An oracle accepts no draft, others at most `max_accept` in a step.
    """
    tokens = np.zeros(shape.capacity, np.int32)
    tokens[: len(prompt)] = prompt
    stops = np.full(shape.stop_slots, -1, np.int32)
    stops[: len(decoding.stop_token_ids)] = decoding.stop_token_ids
    return Sequences(
        tokens=jnp.asarray(tokens),
        length=jnp.int32(len(prompt)),
        limit=jnp.int32(len(prompt) + decoding.max_new_tokens),
        stops=jnp.asarray(stops),
        done=jnp.asarray(False),
        max_accept=jnp.int32(0 if decoding.oracle else max_accept),
        key=key,
        filters=filters_of(decoding.sampling),
        steps=jnp.int32(0),
        acceptance_lengths=jnp.zeros(shape.capacity, jnp.int32),
    )
