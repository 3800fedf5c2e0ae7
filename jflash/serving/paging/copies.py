"""Copies of the slots' recurrent states, on the device: made at a border of pages, and put back.

A delta net that begins at a multiple of CHUNK needs the state before it and the last rows of its
convolution; the rows that its memory keeps for a rollback come after the border. This file knows
slots and places, and no text.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.devices.mesh import EVERYWHERE, local, shared, specs, spread
from jflash.layers.cache import DeltaCache
from jflash.pair import Models
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.slots import CACHES, empty_state
from jflash.state import State
from pallas_kernels.gated_delta import CHUNK, Memory

Nets = tuple[DeltaCache, ...]


class Copy(NamedTuple):
    """One delta net's copies at N places: states, and the taps - 1 rows before each border."""

    state: Float[Array, "N Hv dk dv"]
    raw: Float[Array, "N _ D"]


def delta_nets(state: State) -> Nets:
    """The recurrent states of all layers that have one."""
    layers = (*state.target_cache, *state.drafter_cache)
    return tuple(layer for layer in layers if isinstance(layer, DeltaCache))


def with_delta_nets(state: State, nets: Nets) -> State:
    """The state with others in their places."""
    left = iter(nets)

    def one(layer: Any) -> Any:
        return next(left) if isinstance(layer, DeltaCache) else layer

    return state._replace(**{name: tuple(map(one, getattr(state, name))) for name in CACHES})


def empty_copies(models: Models, layout: Layout) -> tuple[Copy, ...]:
    """Room for the layout's copies in one device's part of the models."""
    nets = jax.eval_shape(lambda: delta_nets(empty_state(models, layout)))

    def one(net: DeltaCache) -> Copy:
        state, (_, places, width) = net.memory.state, net.raw.shape
        return Copy(
            jnp.zeros((layout.states, *state.shape[1:]), state.dtype),
            jnp.zeros((layout.states, places - CHUNK, width), net.raw.dtype),
        )

    return tuple(map(one, nets))


def keep(nets: Nets, copies: tuple[Copy, ...], control: Int[Array, "3"]) -> tuple[Copy, ...]:
    """Copies a slot's states to a place. `control` is slot, place, and the memory's border."""
    slot, place, border = control

    def one(net: DeltaCache, copy: Copy) -> Copy:
        state = copy.state.at[place].set(net.memory.state[slot])
        return Copy(state, copy.raw.at[place].set(net.raw[slot, _before(border, net, copy)]))

    return tuple(map(one, nets, copies))


def put(
    begun: tuple[Int[Array, " B"], Nets], copies: tuple[Copy, ...], control: Int[Array, "3"]
) -> tuple[Int[Array, " B"], Nets]:
    """Begins a slot's text at a border with the states of a place. `control` as in `keep`.

    The slot idles at that length: steps of other slots work on this one too, and a state's base
    must not pass their start.
    """
    (lengths, nets), (slot, place, border) = begun, control

    def one(net: DeltaCache, copy: Copy) -> DeltaCache:
        state, base, rows = net.memory
        state = state.at[slot].set(copy.state[place])
        raw = net.raw.at[slot, _before(border, net, copy)].set(copy.raw[place])
        return DeltaCache(Memory(state, base.at[slot].set(border), rows), raw)

    return lengths.at[slot].set(border + 1), tuple(map(one, nets, copies))


def _before(border: Int[Array, ""], net: DeltaCache, copy: Copy) -> Int[Array, " _"]:
    """The places in the ring of the rows before the border that a convolution needs."""
    return (border - 1 - jnp.arange(copy.raw.shape[1])) % net.raw.shape[1]


@functools.lru_cache(maxsize=64)
def _compile(models: Models, layout: Layout) -> tuple[Any, Any, Any]:
    """The executables of keep and put, which donate what they change, and of one that makes the
    copies' arrays."""
    of_nets = lambda models: delta_nets(empty_state(models, layout))  # noqa: E731
    of_copies = functools.partial(empty_copies, layout=layout)
    in_nets, in_copies = specs(models, of_nets), specs(models, of_copies)
    make = shared(models.mesh, functools.partial(of_copies, local(models)), (), in_copies)
    nets, copies = jax.eval_shape(functools.partial(of_nets, models)), jax.eval_shape(make)
    ints = lambda count: jax.ShapeDtypeStruct((count,), jnp.int32)  # noqa: E731
    begun, in_begun = (ints(layout.slots), nets), (EVERYWHERE, in_nets)

    def compiled(function: Any, first: Any, takes: Any, gives: Any, donates: int) -> Any:
        takes = (takes, in_copies, EVERYWHERE)
        program = spread(models.mesh, function, takes, gives, (donates,))
        return program.lower(first, copies, ints(3)).compile()

    return (
        compiled(keep, nets, in_nets, in_copies, 1),
        compiled(put, begun, in_begun, in_begun, 0),
        jax.jit(make).lower().compile(),
    )


class Copies:
    """The copies of one layout; nothing is there if it keeps none."""

    def __init__(self, models: Models, layout: Layout) -> None:
        self.arrays: tuple[Copy, ...] = ()
        self._programs = _compile(models, layout) if layout.states else None
        self.clear()

    def clear(self) -> None:
        """Allocates the copies' memory, empty."""
        if self._programs is not None:
            self.arrays = self._programs[2]()

    def keep(self, state: State, slot: int, place: int, border: int) -> None:
        """Copies the slot's states, whose last pass ended at the border."""
        assert self._programs is not None, "the layout has places"
        control = np.array([slot, place, border], np.int32)
        self.arrays = self._programs[0](delta_nets(state), self.arrays, control)

    def put(self, state: State, slot: int, place: int, border: int) -> State:
        """The state whose slot begins at the border with the copy; donates what it changes."""
        assert self._programs is not None, "the layout has places"
        control = np.array([slot, place, border], np.int32)
        begun = state.sequences.length, delta_nets(state)
        length, nets = self._programs[1](begun, self.arrays, control)
        return with_delta_nets(state.with_sequences(length=length), nets)
