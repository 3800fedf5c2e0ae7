"""Drivers over the step: whole generations without a host sync, and streams of bounded calls.

Both run one executable, `programs.run`: a `lax.while_loop` over `speculative_step` whose bound is a
run-time value. The host reads its Report while the next call is already under way. Works on token
ids; text belongs to jflash.io.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.budget.row_choice import ChosenRows, programs_for
from jflash.checks import check_chunk, check_keys, check_request, check_state
from jflash.compiled.programs import Programs, Report
from jflash.compiled.shape import PREFILL_CHUNK, Shape, capacity_for, make_request, new_state
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding, StopWhen, whole
from jflash.records.kernels import AUTO
from jflash.state import State

STEPS_PER_CALL = 4  # steps between two looks of the host when a caller watches the tokens
DEFAULTS = Decoding()


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

    def plain(self) -> "Pair":
        """The target without a drafter at width 1, the baseline of speculative decoding."""
        return Pair(self.models.plain(), Params(self.params.target))


def check_pair(pair: Any) -> None:
    """ValueError for what is no pair, such as the name of a checkpoint, and for parameters of
    another dtype than the models': an engine would compute with them in either."""
    if not isinstance(pair, Pair):
        raise ValueError(f"pair {pair!r:.80} must be a Pair: jflash.load_pair(target, drafter)")
    models, params = pair.models, pair.params
    if not (isinstance(models, Models) and isinstance(params, Params)):
        raise ValueError("a pair must have Models and Params: take dataclasses.replace of another")
    for name in Params._fields:
        leaves = jax.tree.leaves(getattr(params, name))
        stored = {str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves}
        if getattr(models, name) is not None and models.dtype not in stored:
            found = ", ".join(sorted(stored)) or "missing"
            raise ValueError(f"the {name}'s parameters are {found}, its model is {models.dtype}")


def models_for(models: Models, decodings: Iterable[Decoding]) -> Models:
    """The models for these requests: with only greedy ones the programs draw nothing.

    Where drafts are drawn no rows are chosen. The choice hangs on times, and a seed would not
    repeat its text.
    """
    draws = any(decoding.sampling.temperature > 0 for decoding in decodings)
    models = replace(models, sampled=models.sampled or draws)
    return replace(models, rows=None) if models.draws_drafts and models.rows == AUTO else models


def generate(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding | Sequence[Decoding] = DEFAULTS,
    *,
    first_index: int = 0,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    **options: Any,
) -> list[Generation]:
    """Decodes a batch of prompts (token ids) to the end, in one device loop without a host sync.

    `decoding` is one for all prompts or one for each; `options` replace its fields
    (max_new_tokens=64, stop_token_ids=[2], sampling=Sampling(temperature=0.8), seed=1, …).
    Sequence i draws from a key made of its seed and `first_index` + i: later batches of one seed
    start where the last one ended. `capacity` overrides the cache slots a sequence (see
    capacity_for). Raises ValueError for a request that does not fit.
    """
    decodings = _one_each(decoding, prompts, options)
    session = _start(pair, prompts, decodings, first_index, capacity, prefill_chunk)
    watched = any(d.stop_when for d in decodings)
    bound = STEPS_PER_CALL if watched else np.iinfo(np.int32).max
    cut, over = dict[int, int](), set[int]()  # over: no text of theirs comes any more
    cancel = np.zeros(len(prompts), bool)
    state = session.state
    while True:
        state, report = session.programs.run(
            pair.params, state, jnp.int32(bound), jnp.asarray(cancel)
        )
        if watched:
            report = jax.device_get(report)
        for b, stop_when in enumerate(d.stop_when for d in decodings):
            if stop_when and b not in over:
                keep = _kept(stop_when, _new_ids(report, b, len(prompts[b])))
                if keep is not None:
                    cut[b], cancel[b] = keep, True
                if keep is not None or report.done[b]:
                    over.add(b)
        if (np.asarray(report.done) | cancel).all():
            break
    report = jax.device_get(report)
    seconds = session.seconds(time.perf_counter())
    return [
        generation_of(report, b, len(prompt), decoding, cut.get(b), seconds)
        for b, (prompt, decoding) in enumerate(zip(prompts, decodings, strict=True))
    ]


def stream(
    pair: Pair,
    prompt: Sequence[int],
    decoding: Decoding = DEFAULTS,
    *,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    **options: Any,
) -> Iterator[Chunk]:
    """Decodes one prompt and yields its tokens as steps finish; arguments as for `generate`.

    The same tokens as `generate` gives. The next call is dispatched before the last one's tokens
    are read, so the device never waits for the reader.
    """
    [decoding] = _one_each(decoding, [prompt], options)
    session = _start(pair, [prompt], [decoding], 0, capacity, prefill_chunk)
    running = np.zeros(1, bool)

    def call(state: State, steps: int) -> tuple[State, Report]:
        return session.programs.run(pair.params, state, jnp.int32(steps), jnp.asarray(running))

    sent, keep, decided = 0, None, 0
    state, report = call(session.state, 0)
    while True:
        state, upcoming = call(state, STEPS_PER_CALL)
        report = jax.device_get(report)
        if decoding.stop_when and keep is None:
            keep = _kept(decoding.stop_when, _new_ids(report, 0, len(prompt)))
        result = generation_of(
            report, 0, len(prompt), decoding, keep, session.seconds(time.perf_counter())
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
    """A prefilled state, and the times of compilation and prefill."""

    programs: Programs | ChosenRows
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


def _one_each(
    decoding: Decoding | Sequence[Decoding], prompts: Sequence, options: dict[str, Any]
) -> list[Decoding]:
    """A decoding for each prompt, with `options` in place of its fields of these names."""
    for name, given in (("prompts", prompts), ("decoding", decoding)):
        if not isinstance(given, Decoding) and not hasattr(given, "__len__"):
            raise ValueError(f"{name} {given!r:.80} must be a list with one for each text")
    count = len(prompts)
    if not count:
        raise ValueError("no prompts given")
    all = [decoding] * count if isinstance(decoding, Decoding) else list(decoding)
    for each in all:
        if not isinstance(each, Decoding):
            raise ValueError(f"decoding {each!r:.80} must be of the type Decoding")
    if len(all) != count:
        raise ValueError(f"{len(all)} decodings for {count} prompts: give one or each")
    return [replace(each, **options) for each in all]


def _start(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    decodings: Sequence[Decoding],
    first_index: int,
    capacity: int | None,
    chunk: int,
) -> _Session:
    check_pair(pair)
    first_index = whole("first_index", first_index)
    for prompt, decoding in zip(prompts, decodings, strict=True):
        check_keys(decoding.seed, (first_index, first_index + len(prompts) - 1), chunk)
        check_request(pair.models, prompt, decoding)
    check_chunk(pair.models, chunk)
    models = models_for(pair.models, decodings)
    # As Python's own: numbers of NumPy have no bit_length.
    chunk, new = int(chunk), max(int(d.max_new_tokens) for d in decodings)
    longest = max(map(len, prompts))
    need = capacity_for(longest, new, models.block_size, chunk)
    capacity = need if capacity is None else whole("capacity", capacity)
    if capacity < need:
        raise ValueError(f"capacity {capacity} is below the {need} slots that the request needs")
    stops = max(len(d.stop_token_ids) for d in decodings)
    shape = Shape.of(len(prompts), capacity, stops, chunk)
    check_state(models, shape)
    begin = time.perf_counter()
    programs = programs_for(models, pair.params, shape)
    # Empty state and keys compile at their first call too, so they come before the clock's mark.
    state = new_state(models, shape)
    requests = []
    for i, (prompt, decoding) in enumerate(zip(prompts, decodings, strict=True), first_index):
        key = jax.random.fold_in(jax.random.key(decoding.seed), i)
        requests.append(make_request(shape, prompt, decoding, models.max_accept, key))
    compiled = time.perf_counter()
    for b, request in enumerate(requests):
        state = programs.prefill(pair.params, state, jnp.int32(b), request)
    jax.block_until_ready(state.sequences.length)
    ready = time.perf_counter()
    return _Session(programs, state, compiled - begin, ready - compiled, ready)


def _kept(stop_when: StopWhen, ids: list[int]) -> int | None:
    """The number of new tokens that `stop_when` keeps; ValueError unless it is within them."""
    keep = stop_when(ids)
    whole_number = isinstance(keep, Integral) and not isinstance(keep, bool)  # True is no 1
    if keep is not None and not (whole_number and 1 <= keep <= len(ids)):
        raise ValueError(f"stop_when returned {keep}: None, or a number within 1 … {len(ids)}")
    return keep


def _new_ids(report: Report, b: int, prompt_tokens: int) -> list[int]:
    return report.tokens[b, prompt_tokens : report.length[b]].tolist()


def generation_of(
    report: Report,
    b: int,
    prompt_tokens: int,
    decoding: Decoding,
    keep: int | None,
    seconds: Seconds,
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
    stopped = keep is not None or ids[-1] in decoding.stop_token_ids
    return Generation(
        prompt_tokens=prompt_tokens,
        token_ids=ids,
        acceptance_lengths=lengths,
        finish_reason="stop" if stopped else "length",
        seconds=seconds,
    )
