"""The number of rows that a step verifies: the host chooses it between calls, for tokens a second.

Each of a few numbers of rows has an executable over the same state. Their times are measured once
on this device and kept beside the compiled programs, and an engine's rounds tell what they come to
there; a running survey of the drafts predicts the tokens that a number of rows would commit. With
one row a sequence nothing is drafted; from time to time a drafted step probes whether that is still
best. This file knows neither requests nor texts.
"""

import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jflash.budget.rounds import Round, Rounds, Step
from jflash.budget.row_times import kept_times, step_times
from jflash.compiled.programs import Programs, compile_programs, compile_several
from jflash.compiled.shape import Shape
from jflash.pair import Models, Params
from jflash.records.kernels import AUTO
from jflash.rows import BINS, Survey

# Rows a sequence, and the whole block: each is a program to compile. Not 2: at Qwen3-8B's sizes and
# batch 32 a step of 1, 2, 4, 8 and 16 took 6.5, 10.2, 10.9, 13.1 and 17.8 ms on a shared H200.
WIDTHS = (1, 4, 8)
# Below it a row costs next to nothing, and AUTO means all; but each row reads other experts.
SMALLEST_BATCH = 8
FIRST, STEPS = 2, 16  # steps of the first call, and of each later one
KEPT = 0.8  # weight of earlier counts, after each call that drafted
UNSEEN = 0.995  # of those of drafts like which none was verified since
PRIOR = 4  # drafts of a bin that count as if each had come true with the drafter's confidence
REMEMBERED = 40  # blocks that tell what a place's drafts come to
FAIR = 0.7  # of drafts after a right one come true, before any are seen
FEW = 2  # drafts, as which that counts, and so does a place's rate by the place before it
MIDDLE = (np.arange(BINS) + 0.5) / BINS  # of each bin
PROBE = 100  # milliseconds without drafts before one of a probe
STAYS = 1.02  # another number of rows must promise more than so many times the tokens a second


def with_rows(models: Models, rows: int | str | None, batch: int) -> Models:
    """The models at `rows` rows a step; None: all; AUTO: the best number, if there is a choice.

    ValueError for fewer rows than sequences.
    """
    if rows is None:
        return models
    if rows == AUTO:
        free = models.drafter is not None and models.one_arithmetic
        return replace(models, rows=AUTO) if free and _pays(models, batch) else models
    if int(rows) < batch:
        raise ValueError(
            f"{rows} rows to verify for {batch} sequences: each needs one, at least {batch} in all"
        )
    return replace(models, rows=int(rows))


def default_rows(models: Models, batch: int) -> str | None:
    """AUTO on GPUs, from SMALLEST_BATCH sequences on, and of targets with experts from one on;
    elsewhere all rows. A CPU takes longer to compile and to time several programs than most
    commands run."""
    on_gpus = models.kernels.attention == "canonical"
    return AUTO if on_gpus and _pays(models, batch) else None


def _pays(models: Models, batch: int) -> bool:
    """Whether a step of fewer rows may be worth its programs."""
    return batch >= SMALLEST_BATCH or bool(models.target.config.experts)


def row_counts(batch: int, width: int) -> tuple[int, ...]:
    """The numbers of rows that are compiled, ascending."""
    return (*(batch * w for w in WIDTHS if w < width), batch * width)


@dataclass
class Estimate:
    """Recent counts of drafts, by the survival that the drafter predicted."""

    offered: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    verified: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    drafted: float = 0.0  # sequences, summed over the steps that drafted
    live: float = 0.0  # sequences, by the last call
    before: Survey | None = None  # of all calls so far

    def newest(self, now: Survey) -> Survey:
        """What one call adds to the counts of all calls before it; calls come in order."""
        before, self.before = self.before, now
        if before is None or before.steps > now.steps:  # another state has begun
            return now
        return jax.tree.map(np.subtract, now, before)

    def add(self, seen: Survey) -> None:
        """Adds one call's counts; a call without drafts only updates `live`."""
        if not seen.steps:
            return
        self.live = float(seen.live / seen.steps)
        if not seen.offered.sum():
            return
        offers, kept = self._kept(seen)
        self.offered = offers * self.offered + seen.offered
        self.verified = kept * self.verified + seen.verified
        self.accepted = kept * self.accepted + seen.accepted
        self.drafted = offers * self.drafted + float(seen.live)

    def _kept(self, seen: Survey) -> tuple[float, Any]:
        """The weights of the counts before these: of what was offered, and of what came of it.

        What was seen of drafts that are no longer verified stays: the drafter's word would take its
        place, and a modest drafter's keeps its drafts from ever being tried again.
        """
        return KEPT, UNSEEN - (UNSEEN - KEPT) * seen.verified / np.maximum(seen.offered, 1)

    def _rates(self) -> Float[np.ndarray, " N"]:
        """The part of each bin's drafts that are reached and right."""
        return (self.accepted + PRIOR * MIDDLE) / (self.verified + PRIOR)

    def tokens(self, rows: Sequence[int]) -> Float[np.ndarray, " N"]:
        """The expected tokens of steps that verify so many rows of today's sequences, the best.

        They offer as many drafts each as those did that drafted: at a burst's beginning these are
        few. The fewest rows are those without drafts, whoever is done.
        """
        offered = self.offered[::-1] / max(self.drafted, 1e-9) * self.live
        spare = self._drafts(np.array(rows, float))
        spare[np.argmin(rows)] = 0
        upto = np.minimum(np.cumsum(offered), spare[:, None])
        return self.live + np.diff(upto, prepend=0.0) @ self._rates()[::-1]

    def _drafts(self, rows: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """The drafts that so many rows verify: who is done leaves its rows to the others."""
        return rows - self.live


class EstimateByPlace(Estimate):
    """Of steps that verify as many rows of each block: counts by a draft's place in its block.

    A place that was not verified of late has the rate of the one before it, times the part of
    drafts after a right one that came true.
    """

    def _kept(self, seen: Survey) -> tuple[float, Any]:
        kept = max(KEPT, 1 - float(seen.live) / REMEMBERED)
        return kept, kept

    def _rates(self) -> Float[np.ndarray, " N"]:
        right, tried = self.accepted[::-1], self.verified[::-1]  # the first place first
        reached = np.minimum(np.append(tried[0], right[:-1]), tried)
        after = (right.sum() + FEW * FAIR) / (reached.sum() + FEW)
        rate, rates = 1.0, list[float]()
        for came_true, of in zip(right, tried, strict=True):
            rate = (came_true + FEW * rate * after) / (of + FEW)
            rates.append(rate)
        return np.array(rates[::-1])

    def _drafts(self, rows: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        return (rows // min(rows) - 1) * self.live


def estimate_for(models: Models) -> Estimate:
    """An estimate of what these models' surveys count."""
    return Estimate() if models.ranks_rows else EstimateByPlace()


class ChosenRows:
    """Takes the place of `Programs`; its `run` uses the best number of rows at that time."""

    def __init__(
        self,
        prefill: Any,
        runs: Mapping[int, Any],
        times: Mapping[int, Step],
        seconds: float,
        fewest: int = 1,  # steps of a call, and so of a probe
        estimate: Estimate | None = None,  # that several share
    ) -> None:
        self.prefill, self.seconds, self.times, self.fewest = prefill, seconds, dict(times), fewest
        self.estimate, self.rounds = estimate or Estimate(), Rounds(times)
        self.steps = dict.fromkeys(runs, 0)
        self._runs, self._plain, self._now = dict(runs), min(runs), max(runs)
        self._pending = deque[tuple[int, Survey]]()
        self._undrafted = 0.0  # milliseconds since the last drafted step

    def run(
        self, params: Any, state: Any, max_steps: Int[Array, ""], cancel: Bool[Array, " B"]
    ) -> tuple[Any, Any]:
        """At most `max_steps` steps, fewer if a new choice is due."""
        rows, steps = self.pick()
        bound = jnp.minimum(max_steps, steps)
        state, report = self._runs[rows](params, state, bound, cancel)
        assert report.survey is not None, "models with rows keep a survey"
        jax.copy_to_host_async(report.survey)
        self._pending.append((rows, report.survey))
        return state, report

    def pick(self, live: int | None = None) -> tuple[int, int]:
        """`choice`, after the surveys of all finished calls are read; `live` sequences will step,
        as many as in the newest of these unless given."""
        self._look()
        if live is not None:
            self.estimate.live = live
        rows, steps = self.choice()
        if rows != self._plain:
            self._undrafted = 0.0
        return rows, steps

    def choice(self) -> tuple[int, int]:
        """The rows and the steps of the next call."""
        if not self.estimate.drafted:
            return max(self._runs), FIRST
        tokens = self.estimate.tokens([*self.times])
        speed = dict(zip(self.times, tokens / self.rounds.ms(tokens), strict=True))
        speed[self._now] *= STAYS
        best = max((rows for rows in self._runs if rows != self._plain), key=speed.__getitem__)
        self._now = best if speed[best] >= speed[self._plain] else self._plain
        if self._now == best:
            return best, STEPS
        if self._undrafted >= PROBE * self.fewest * self.times[best].ms:
            return best, self.fewest
        return self._plain, STEPS

    def _look(self) -> None:
        """Reads finished surveys; waits for a call only if a later one is queued on the device."""
        while self._pending:
            rows, survey = self._pending[0]
            if len(self._pending) < 2 and not survey.counts.is_ready():
                return
            self._pending.popleft()
            self.seen(rows, self.estimate.newest(jax.device_get(survey)))

    def seen(self, rows: int, now: Survey, during: Round | None = None) -> None:
        """Takes in what a call added to the survey, and the round that ended with it."""
        steps = int(now.steps)
        self.steps[rows] += steps
        if rows == self._plain:
            self._undrafted += steps * self.times[rows].ms
        self.estimate.add(now)
        if during is not None and steps:
            self.rounds.add(rows, during, steps, float(now.live + now.accepted.sum()))


def programs_for(models: Models, params: Params, shape: Shape) -> Programs | ChosenRows:
    """The programs of a shape: one for a fixed number of rows, several that are chosen from.

    ValueError for fewer rows than sequences.
    """
    rows = models.rows
    if rows is None or models.drafter is None:
        return compile_programs(models, params, shape)
    assert not (rows == AUTO and models.draws_drafts), "no seed's text would repeat"
    if rows != AUTO:
        return compile_programs(with_rows(models, rows, shape.batch), params, shape)
    begin = time.perf_counter()
    counts = row_counts(shape.batch, models.block_size)
    each = [replace(models, rows=count) for count in counts]
    compiled = compile_several(each, params, shape)
    runs = {count: programs.run for count, programs in zip(counts, compiled, strict=True)}
    folder = jax.config.jax_compilation_cache_dir
    measure = functools.partial(step_times, each[-1], params, shape, runs)
    times = kept_times(models, shape, counts, measure, Path(folder) if folder else None)
    seconds, estimate = time.perf_counter() - begin, estimate_for(models)
    return ChosenRows(compiled[-1].prefill, runs, times, seconds, estimate=estimate)
