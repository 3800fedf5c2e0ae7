"""Drivers over the step: whole generations without a host sync, and streams of bounded calls.

Both run one executable, `programs.run`: a `lax.while_loop` over `speculative_step` whose bound is a
run-time value. The host reads its Report while the next call is already under way. Works on token
ids; text belongs to jflash.io.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.decoding import GREEDY, Sampling
from jflash.programs import (
    STOP_SLOTS,
    Programs,
    Report,
    Shape,
    capacity_for,
    compile_programs,
    make_request,
    new_state,
)
from jflash.speculative import Models, Params, State

STEPS_PER_CALL = 4  # steps between two looks of the host when somebody watches the tokens
PREFILL_CHUNK = 128

StopWhen = Callable[[list[int]], int | None]


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Wall-clock seconds of a call, shared by all its sequences."""

    compile: float
    prefill: float
    decode: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished sequence, as plain values.

    token_ids are the new tokens, a stop token that ended them included. acceptance_lengths holds
    the tokens committed by each step (1 … W); the prefill's token belongs to no step, so
    len(token_ids) = 1 + sum(acceptance_lengths).
    """

    prompt_tokens: int
    token_ids: list[int]
    acceptance_lengths: list[int]
    finish_reason: str  # 'stop' or 'length'
    seconds: Seconds

    @property
    def steps(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ, tokens a step; None when the prefill's token was the last."""
        return sum(self.acceptance_lengths) / self.steps if self.steps else None


class Chunk(NamedTuple):
    """What a stream yields: the tokens of the prefill (one) or of one step.

    `generation` is None until the last chunk, which carries the whole result.
    """

    token_ids: list[int]
    generation: Generation | None


@dataclass(frozen=True)
class Pair:
    """A target with its drafter (or none), ready to decode."""

    models: Models
    params: Params


def check_request(
    models: Models, prompt: Sequence[int], max_new_tokens: int, stop_token_ids: Sequence[int] = ()
) -> None:
    """ValueError, before anything runs, for a request that the models cannot serve."""
    positions = min(c.max_position_embeddings for c in models.configs)
    vocabulary = models.target.config.vocab_size
    if not len(prompt):
        raise ValueError("the prompt is empty: give at least one token")
    outside = [int(t) for t in (*prompt, *stop_token_ids) if not 0 <= t < vocabulary]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocabulary} tokens")
    if not isinstance(max_new_tokens, Integral):
        raise ValueError(f"max_new_tokens must be a whole number, got {max_new_tokens}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if len(prompt) + max_new_tokens > positions:
        fits = positions - len(prompt)
        advice = f"max_new_tokens {fits} fits" if fits > 0 else "the prompt alone is too long"
        raise ValueError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new tokens pass the model's "
            f"{positions} positions: {advice}"
        )


def check_keys(seed: int, indices: Iterable[int], prefill_chunk: int) -> None:
    """ValueError for a seed or an index that a key cannot hold, and for chunks of no token."""
    for name, value in (("seed", seed), *(("index", index) for index in indices)):
        if not (isinstance(value, Integral) and 0 <= value < 2**32):
            raise ValueError(f"{name} {value} must be a whole number within 0 … {2**32 - 1}")
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")


def models_for(models: Models, samplings: Sequence[Sampling]) -> Models:
    """The models compiled so that they can serve these requests: greedy ones alone draw nothing."""
    return replace(models, sampled=models.sampled or any(s.temperature > 0 for s in samplings))


def generate(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 256,
    stop_token_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    seed: int = 0,
    first_index: int = 0,
    oracle: bool = False,
    stop_when: StopWhen | None = None,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[Generation]:
    """Decodes a batch of prompts (token ids) to the end, in one device loop without a host sync.

    `oracle` accepts no draft: the same executable then commits the target's own tokens one by one.
    `sampling` is one for all prompts or one for each. Sequence i draws from a key made of `seed`
    and `first_index` + i: later batches of one seed start where the last one ended.
    `stop_when(new_ids)` may end a sequence after as many tokens as it returns, at least one of
    those that it is given; the host then looks every few steps. `capacity` overrides the cache
    slots a sequence (see capacity_for).
    Raises ValueError for a request that does not fit.
    """
    session = _start(
        pair, prompts, max_new_tokens, stop_token_ids, sampling, seed, oracle, capacity,
        prefill_chunk, first_index,
    )  # fmt: skip
    bound = STEPS_PER_CALL if stop_when else np.iinfo(np.int32).max
    cut: dict[int, int] = {}
    cancel = np.zeros(len(prompts), bool)
    state = session.state
    while True:
        state, report = session.programs.run(
            pair.params, state, jnp.int32(bound), jnp.asarray(cancel)
        )
        report = jax.device_get(report)
        if stop_when:
            for b in range(len(prompts)):
                ids = _new_ids(report, b, len(prompts[b]))
                keep = None if b in cut else _kept(stop_when, ids)
                if keep is not None:
                    cut[b], cancel[b] = keep, True
        if (report.done | cancel).all():
            break
    seconds = session.seconds(time.perf_counter())
    return [
        generation_of(report, b, len(prompt), stop_token_ids, cut.get(b), seconds)
        for b, prompt in enumerate(prompts)
    ]


def stream(
    pair: Pair,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 256,
    stop_token_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    seed: int = 0,
    oracle: bool = False,
    stop_when: StopWhen | None = None,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[Chunk]:
    """Decodes one prompt and yields its tokens as steps finish; arguments as for `generate`.

    The same tokens as `generate` gives. The next call is dispatched before the last one's tokens
    are read, so the device never waits for the reader.
    """
    session = _start(
        pair, [prompt], max_new_tokens, stop_token_ids, sampling, seed, oracle, capacity,
        prefill_chunk,
    )  # fmt: skip
    running = np.zeros(1, bool)

    def call(state: State, steps: int) -> tuple[State, Report]:
        return session.programs.run(pair.params, state, jnp.int32(steps), jnp.asarray(running))

    sent, keep, decided = 0, None, 0
    state, report = call(session.state, 0)
    while True:
        state, upcoming = call(state, STEPS_PER_CALL)
        report = jax.device_get(report)
        if stop_when and keep is None:
            keep = _kept(stop_when, _new_ids(report, 0, len(prompt)))
        result = generation_of(
            report, 0, len(prompt), stop_token_ids, keep, session.seconds(time.perf_counter())
        )
        ended = keep is not None or bool(report.done[0])
        counts = [1, *result.acceptance_lengths][decided:]
        for i, count in enumerate(counts):
            last = ended and i == len(counts) - 1
            yield Chunk(result.token_ids[sent : sent + count], result if last else None)
            sent += count
        decided += len(counts)
        if ended:
            if not counts:  # a text stop can fall on tokens that were already given out
                yield Chunk([], result)
            return
        report = upcoming


class _Session(NamedTuple):
    """A prefilled state and when its parts were done."""

    programs: Programs
    state: State
    compile_seconds: float
    prefill_seconds: float
    decode_start: float

    def seconds(self, now: float) -> Seconds:
        return Seconds(
            compile=self.compile_seconds,
            prefill=self.prefill_seconds,
            decode=now - self.decode_start,
        )


def _start(
    pair: Pair, prompts, max_new_tokens, stops, sampling, seed, oracle, capacity, chunk,
    first_index=0,
) -> _Session:  # fmt: skip
    if not prompts:
        raise ValueError("no prompts given")
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(samplings) != len(prompts):
        raise ValueError(f"{len(samplings)} samplings for {len(prompts)} prompts: give one or each")
    check_keys(seed, (first_index, first_index + len(prompts) - 1), chunk)
    for prompt in prompts:
        check_request(pair.models, prompt, max_new_tokens, stops)
    models = models_for(pair.models, samplings)
    width = models.block_size
    need = capacity_for(max(map(len, prompts)), max_new_tokens, width, chunk)
    if capacity is not None and capacity < need:
        raise ValueError(f"capacity {capacity} is below the {need} slots that the request needs")
    shape = Shape(
        batch=len(prompts),
        capacity=capacity or need,
        chunk=chunk,
        stop_slots=max(1, -(-len(stops) // STOP_SLOTS)) * STOP_SLOTS,
        dtype=str(pair.params.target["embedding"].dtype),
    )
    begin = time.perf_counter()
    programs = compile_programs(models, pair.params, shape)
    # Empty state and keys compile at their first call too, so they come before the clock's mark.
    state = new_state(models, shape)
    accept = 0 if oracle or models.drafter is None else width - 1
    keys = [jax.random.fold_in(jax.random.key(seed), first_index + b) for b in range(len(prompts))]
    requests = [
        make_request(shape, prompt, max_new_tokens, stops, accept, key, own)
        for prompt, key, own in zip(prompts, keys, samplings, strict=True)
    ]
    compiled = time.perf_counter()
    for b, request in enumerate(requests):
        state = programs.prefill(pair.params, state, jnp.int32(b), request)
    jax.block_until_ready(state.length)
    ready = time.perf_counter()
    return _Session(programs, state, compiled - begin, ready - compiled, ready)


def _kept(stop_when: StopWhen, ids: list[int]) -> int | None:
    """What `stop_when` keeps of the new tokens; ValueError unless that is some of them."""
    keep = stop_when(ids)
    if keep is not None and not 1 <= keep <= len(ids):
        raise ValueError(f"stop_when returned {keep}: None, or a number within 1 … {len(ids)}")
    return keep


def _new_ids(report: Report, b: int, prompt_tokens: int) -> list[int]:
    return report.tokens[b, prompt_tokens : report.length[b]].tolist()


def generation_of(
    report: Report, b: int, prompt_tokens: int, stops, keep: int | None, seconds: Seconds
) -> Generation:
    """The result of sequence b, cut to its first `keep` tokens if given."""
    ids = _new_ids(report, b, prompt_tokens)
    lengths = report.acceptance_lengths[b, : report.steps[b]].tolist()
    if keep is not None:
        ids = ids[:keep]
        while sum(lengths) > keep - 1:
            excess = sum(lengths) - (keep - 1)
            lengths[-1] -= excess
            if lengths[-1] <= 0:
                lengths.pop()
    stopped = keep is not None or ids[-1] in set(stops)
    return Generation(
        prompt_tokens=prompt_tokens,
        token_ids=ids,
        acceptance_lengths=lengths,
        finish_reason="stop" if stopped else "length",
        seconds=seconds,
    )
