"""Greedy decoding that leaves evidence: one executable, many modes, compared bit for bit.

The executable is the step's draft, verify and commit under a `lax.while_loop`, with recording
between them. A mode chooses weights and run-time values: the drafts, and how many are accepted.
100,000 rows of logits do not fit, so two checksums and the largest logit of each committed row are
kept. This file knows neither the pairs that are checked nor the reports.

Axes: B batch, W block width, S capacity, V vocabulary, L layers. Index p of a sequence is its p-th
token, prompt included; its logits are those of the row at p - 1, which chose it.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jflash.compiled.programs import lower_prefill
from jflash.compiled.shape import Shape, make_request, new_state
from jflash.compiled.tiles import settled
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding
from jflash.speculative import Verdict, block_positions, commit, draft, verify
from jflash.state import Sequences, State

CORRUPTION = 0.15  # share of a replayed text's tokens that are wrong


class Inputs(NamedTuple):
    """Run-time values of a mode."""

    replay: Bool[Array, ""]  # propose `text` instead of the drafter's tokens
    text: Int[Array, "B S"]
    probe: Int[Array, " B"]  # the index whose logits are kept whole; -1 for none


class Evidence(NamedTuple):
    """What is kept of each committed row's logits, at the index of the token that they chose."""

    checksums: UInt32[Array, "B S 2"]
    top: Float[Array, "B S"]  # the largest logit; -inf where none was committed
    not_top: Int[Array, " B"]  # committed tokens whose logit is not the largest
    probed: Float[Array, "B V"]  # -inf until the probe's row is committed


class Executable(NamedTuple):
    """Compiled once for (models, shape); every mode runs it.

    prefill(params, state, slot, request) -> state; run(params, state, inputs) -> (state, evidence)
    """

    models: Models
    shape: Shape
    prefill: Any
    run: Any


class Task(NamedTuple):
    """Prompts to decode, one for each sequence of the batch.

    `start` holds them prefilled, for modes with the drafter that prefilled them.
    """

    prompts: Sequence[Sequence[int]]
    decoding: Decoding
    start: State | None = None

    @property
    def prompt_lengths(self) -> np.ndarray:
        return np.asarray([len(prompt) for prompt in self.prompts])


class Mode(NamedTuple):
    """How a task is decoded."""

    name: str
    params: Params
    accept: bool = True  # False: the oracle, whose every step commits one token
    text: Int[Array, "B S"] | None = None  # replayed instead of drafting
    own_drafter: bool = True  # its context must be the oracle's, bit for bit


class Run(NamedTuple):
    """A task decoded to its end."""

    state: State
    evidence: Evidence

    @property
    def sequences(self) -> Sequences:
        return self.state.sequences


def checksums(logits: Float[Array, "B W V"]) -> UInt32[Array, "B W 2"]:
    """Two independent sums of each row's bits, modulo 2^32, whatever the order of summation.

    Each logit's weight is odd and depends on its position: one changed logit always shows.
    """
    bits = lax.bitcast_convert_type(logits.astype(jnp.float32), jnp.uint32)
    place = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    sums = []
    for salt in (0x9E3779B9, 0xC2B2AE35):
        x = (place + 1) * jnp.uint32(salt)
        x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA6B)
        sums.append(jnp.sum(bits * ((x ^ (x >> 13)) | 1), axis=-1, dtype=jnp.uint32))
    return jnp.stack(sums, axis=-1)


def record(
    evidence: Evidence,
    verdict: Verdict,
    indices: Int[Array, "B W"],
    count: Int[Array, " B"],
    probe: Int[Array, " B"],
) -> Evidence:
    """The evidence with the first count[b] rows of each block, which chose tokens `indices`."""
    logits = verdict.logits
    row = jnp.arange(logits.shape[1])
    kept = row < count[:, None]
    sequence = jnp.arange(logits.shape[0])[:, None]
    # Rows that are not committed go past the capacity, each to another place.
    place = (sequence, jnp.where(kept, indices, evidence.top.shape[1] + row))
    wanted = kept & (indices == probe[:, None])
    probed = jnp.take_along_axis(logits, jnp.argmax(wanted, axis=1)[:, None, None], axis=1)[:, 0]
    top = jnp.max(logits, axis=-1)
    # The choices may come from a kernel that never writes its logits and rounds differently.
    chosen = jnp.take_along_axis(logits, verdict.choices[:, :, None], axis=2)[:, :, 0]
    return Evidence(
        evidence.checksums.at[place].set(checksums(logits), mode="drop", unique_indices=True),
        evidence.top.at[place].set(top, mode="drop", unique_indices=True),
        evidence.not_top + jnp.sum(kept & (chosen != top), axis=1, dtype=jnp.int32),
        jnp.where(jnp.any(wanted, axis=1)[:, None], probed, evidence.probed),
    )


def recorded_run(
    models: Models, params: Params, state: State, inputs: Inputs
) -> tuple[State, Evidence]:
    """Steps until every sequence is done."""
    batch, capacity = state.sequences.tokens.shape
    nothing = Evidence(
        jnp.zeros((batch, capacity, 2), jnp.uint32),
        jnp.full((batch, capacity), -jnp.inf),
        jnp.zeros(batch, jnp.int32),
        jnp.full((batch, models.target.config.vocab_size), -jnp.inf),
    )

    def body(carry):
        before, evidence = carry
        indices = block_positions(models, before)[0] + 1
        proposal, state = draft(models, params, before)
        # A draft past the capacity is past every limit, so any token will do.
        places = jnp.minimum(indices[:, :-1], capacity - 1)
        replayed = jnp.take_along_axis(inputs.text, places, axis=1)
        drafts = jnp.where(inputs.replay, replayed, proposal.tokens)
        verdict, state = verify(models, params, state, proposal._replace(tokens=drafts))
        state = commit(models, params, state, verdict)
        count = state.sequences.length - before.sequences.length
        return state, record(evidence, verdict, indices, count, inputs.probe)

    return lax.while_loop(lambda carry: ~jnp.all(carry[0].sequences.done), body, (state, nothing))


def lower_recorded(models: Models, params: Params, state: Any, shape: Shape) -> jax.stages.Lowered:
    """`recorded_run` for these models; `state` is donated."""
    jitted = jax.jit(functools.partial(recorded_run, models), donate_argnums=1)
    inputs = jax.eval_shape(lambda: inputs_of(shape))
    return jitted.lower(params, state, inputs)


def compile_recorded(models: Models, params: Params, state: Any, shape: Shape) -> Any:
    return lower_recorded(models, params, state, shape).compile()


def compile_executable(models: Models, params: Params, shape: Shape) -> Executable:
    """The two programs of a shape; ValueError for an attention backend that cannot run."""
    return compile_executables([(models, params, shape)])[0]


def compile_executables(asked: Sequence[tuple[Models, Params, Shape]]) -> list[Executable]:
    """`compile_executable` of each, at the same time."""
    done = compile_all(lower for one in asked for lower in _lowerings(*one))
    return [
        Executable(models, shape, *done[2 * i : 2 * i + 2])
        for i, (models, _, shape) in enumerate(asked)
    ]


def _lowerings(models: Models, params: Params, shape: Shape) -> Iterator[jax.stages.Lowered]:
    yield settled(lambda: lower_prefill(models, params, shape))
    state = jax.eval_shape(lambda: new_state(models, shape))
    yield settled(lambda: lower_recorded(models, params, state, shape))


def compile_all(lowered: Iterable[jax.stages.Lowered]) -> list[Any]:
    """Compiled programs, by as many threads as the machine has cores to spare.

    Tracing is Python, one program after the other: a program compiles while the next is traced.
    """
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        return [done.result() for done in [pool.submit(one.compile) for one in lowered]]


def prefilled(executable: Executable, mode: Mode, task: Task) -> State:
    """The task's prompts, each in its slot."""
    models, shape = executable.models, executable.shape
    accept = models.max_accept if mode.accept else 0
    if task.start is not None and mode.own_drafter:
        limits = jnp.full(shape.batch, accept, jnp.int32)
        return copied(task.start).with_sequences(max_accept=limits)
    state, key = new_state(models, shape), jax.random.key(0)
    for slot, prompt in enumerate(task.prompts):
        request = make_request(shape, prompt, task.decoding, accept, key)
        state = executable.prefill(mode.params, state, jnp.int32(slot), request)
    return state


@jax.jit
def copied(state: State) -> State:
    return jax.tree.map(jnp.copy, state)


def inputs_of(shape: Shape, text: Array | None = None, probe: np.ndarray | None = None) -> Inputs:
    """Replays `text` if there is one, and keeps the logits of index probe[b] of each sequence."""
    sizes = (shape.batch, shape.capacity)
    return Inputs(
        jnp.asarray(text is not None),
        jnp.zeros(sizes, jnp.int32) if text is None else text,
        jnp.full(shape.batch, -1, jnp.int32) if probe is None else jnp.asarray(probe, jnp.int32),
    )


def decode(executable: Executable, mode: Mode, task: Task, probe: np.ndarray | None = None) -> Run:
    """The task by this mode, through the one executable."""
    state = prefilled(executable, mode, task)
    return Run(*executable.run(mode.params, state, inputs_of(executable.shape, mode.text, probe)))


@functools.partial(jax.jit, static_argnums=2)
def corrupted(text: Int[Array, "B S"], key: Key[Array, ""], vocab_size: int) -> Int[Array, "B S"]:
    """The text with each token replaced, with probability CORRUPTION, by a different one.

    Only the key and a token's position decide, so the wrong drafts do not depend on the steps.
    """
    hit_key, shift_key = jax.random.split(key)
    wrong = jax.random.bernoulli(hit_key, CORRUPTION, text.shape)
    shift = jax.random.randint(shift_key, text.shape, 1, vocab_size)
    return jnp.where(wrong, (text + shift) % vocab_size, text)
