"""How many rows an engine's steps verify, where its host bounds a round, and where its device does.

An engine is simulated: its clock, its host and its device in literal milliseconds, and drafts that
come true as often as the drafter believes, or more often. What chooses and what measures is the
engine's own.
"""

from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest

from jflash.budget.rounds import Round, Rounds, Step
from jflash.budget.row_choice import ChosenRows
from jflash.rows import BINS, SURVEYED, Survey
from jflash.serving.thread import device_time
from jflash.serving.thread.device_time import PROMPTS, DeviceTime, Dispatched, UnderWay

WIDTH, LENGTH = 16, 200  # rows of a block; tokens of a text
EASY, HARD = 0.8, 0.15  # the share of drafts that are nearly certain


class Costs(NamedTuple):
    """An engine: the milliseconds of a step by its rows, of a round and of prompts."""

    batch: int
    steps: dict[int, Step]
    calls: int  # steps of a call
    plan: float  # the engine's thread, a round
    dispatch: float  # the host's, of up to four prompts
    prompt: float  # the device's, each
    doubt: float = 1.0  # a draft's confidence is its probability to so high a power


# As they are on an H200: SmolLM2-135M's step is about as long as its dispatch, Qwen3-8B's is not.
SMALL = Costs(
    32, {32: Step(0.9, 0.75), 128: Step(1.3, 1.05), 256: Step(1.45, 1.05), 512: Step(1.42, 1.0)},
    calls=2, plan=0.5, dispatch=2.5, prompt=0.5,
)  # fmt: skip
LARGE = Costs(
    32, {32: Step(5.8, 1.0), 128: Step(9.2, 1.4), 256: Step(11.9, 1.4), 512: Step(16.9, 1.3)},
    calls=1, plan=0.5, dispatch=2.5, prompt=13.0,
)  # fmt: skip
# SmolLM2's drafter is so modest: where it gives a draft 0.24, three of four come true.
MODEST = Costs(
    64, {64: Step(6.6, 1.0), 256: Step(14.0, 1.4), 512: Step(20.0, 1.4), 1024: Step(31.0, 1.3)},
    calls=1, plan=0.5, dispatch=2.5, prompt=13.0, doubt=4.0,
)  # fmt: skip


class Program(Future[Any]):
    """A program that the host dispatches, and what it fills: waiting for either moves the clock."""

    def __init__(self, clock: list[float], began: float, ended: float, done: float) -> None:
        super().__init__()
        self.clock, self.filled, self.ended = clock, done, ended
        self.dispatched = Dispatched(self, began, ended)

    def result(self, timeout: float | None = None) -> Any:
        self.clock[0] = max(self.clock[0], self.ended)
        return self

    def is_ready(self) -> bool:
        return self.clock[0] >= self.filled

    def block_until_ready(self) -> None:
        self.clock[0] = max(self.clock[0], self.filled)


class Simulated:
    """An engine whose slots are always full; `fixed` rows a step, or those that are chosen."""

    def __init__(self, costs: Costs, clock: list[float], fixed: int | None = None) -> None:
        self.costs, self.clock, self.fixed, self.time = costs, clock, fixed, DeviceTime()
        self.chosen = ChosenRows(None, costs.steps, costs.steps, 0.0, costs.calls)
        self.random, self.counts = np.random.default_rng(0), np.zeros(SURVEYED, np.int64)
        self.left = self.random.integers(1, LENGTH, costs.batch)  # tokens to come of each text
        self.host = self.device = clock[0]  # when each is idle
        self.before: tuple[Any, int, Survey, int] | None = None

    def dispatch(self, part: str, rows: int, host: float, device: float, steps: int = 1) -> Any:
        began = max(self.clock[0], self.host)
        self.host = began + host / 1000
        self.device = max(max(self.device, began) + device / 1000, self.host)
        self.time.dispatching += host / 1000
        program = Program(self.clock, began, self.host, self.device)
        self.time.follows(UnderWay(part, rows, program, steps))
        return program

    def rounds(self, count: int, slow: float, sure: float) -> float:
        """Tokens a second of so many rounds of a host that takes `slow` times as long."""
        began, made, c = self.clock[0], 0, self.costs
        for _ in range(count):
            self.clock[0] += slow * c.plan / 1000
            self.time.begin()
            ended = np.flatnonzero(self.left <= 0)
            self.left[ended] += LENGTH
            parts = [ended[i : i + 4] for i in range(0, len(ended), 4)]
            prompts = [
                self.dispatch(PROMPTS, 128, slow * c.dispatch, c.prompt * len(part))
                for part in parts
            ]
            rows = self.fixed or self.chosen.pick(c.batch)[0]
            step, tokens = c.steps[rows], 0
            call = self.dispatch(
                "decode_seconds", rows, slow * step.dispatch * c.calls, step.ms * c.calls, c.calls
            )
            for _ in range(c.calls):
                tokens += self.step(rows, sure)
            if self.before is not None:
                given, of, survey, gained = self.before
                self.time.wait_for(given)
                now = self.chosen.estimate.newest(survey)
                self.chosen.seen(of, now, self.time.round())
                made += gained
            for prompt in prompts:
                self.time.wait_for(prompt)
            self.before = call, rows, Survey(self.counts.copy()), tokens
        return made / (self.clock[0] - began)

    def step(self, rows: int, sure: float) -> int:
        """Drafts, verifies the best rows and counts; the new tokens."""
        batch = len(self.left)
        drafts = batch, WIDTH - 1 if rows > batch else 0
        certain = self.random.random(drafts) < sure
        confidence = np.where(certain, 0.97, 0.85 * self.random.random(drafts))
        survival = np.cumprod(confidence**self.costs.doubt, axis=1)
        least = np.sort(survival, axis=None)[batch - rows :][0] if drafts[1] else 1.0
        verified = survival >= least
        true = np.cumprod(self.random.random(drafts) < confidence, axis=1)
        places = np.minimum((survival * BINS).astype(int), BINS - 1)
        for i, which in enumerate((verified | True, verified, verified & (true > 0))):
            self.counts[i * BINS : (i + 1) * BINS] += np.bincount(places[which], minlength=BINS)
        new = 1 + (verified & (true > 0)).sum(axis=1)
        self.counts[-2:] += batch, 1
        self.left -= new
        return int(new.sum())


@pytest.mark.parametrize(
    ("costs", "phases"),
    [
        # The host bounds, then the device does, then the texts become hard.
        (SMALL, [(250, 1.0, EASY), (250, 0.1, EASY), (250, 0.1, HARD)]),
        (SMALL, [(250, 4.0, HARD), (250, 4.0, EASY)]),
        # The device bounds; then a host that takes twenty times as long.
        (LARGE, [(250, 1.0, EASY), (250, 1.0, HARD), (250, 20.0, HARD)]),
        # Rows that seem not to pay are not verified, so what is known of them must not fade.
        (MODEST, [(400, 1.0, 0.5)]),
    ],
    ids=["small", "small, slow host", "large", "modest drafter"],
)
def test_rows_reach_the_best_fixed_number(costs, phases, monkeypatch):
    """However the load changes, and by more than 0.97: the time until a change is seen counts."""

    def speeds(fixed: int | None) -> list[float]:
        clock = [10.0]
        monkeypatch.setattr(device_time.time, "perf_counter", lambda: clock[0])
        engine = Simulated(costs, clock, fixed)
        return [engine.rounds(*phase) for phase in phases]

    found, fixed = speeds(None), {rows: speeds(rows) for rows in costs.steps}
    for i, own in enumerate(found):
        all = {rows: of[i] / 1000 for rows, of in fixed.items()}
        assert own / 1000 > 0.97 * max(all.values()), (phases[i], own, all)


def test_a_step_costs_what_its_round_does():
    """Milliseconds of steps with 8 and 64 rows, where rounds had 64."""
    times = {8: Step(2.0, 1.0), 64: Step(4.0, 1.5)}
    tokens = np.array([8.0, 24.0])
    alone = Rounds(times)
    assert alone.ms(tokens).tolist() == [2.0, 4.0]

    slow_host = Rounds(times)
    slow_host.add(64, Round(wall=40.0, host=40.0), steps=2, tokens=48.0)
    assert slow_host.ms(tokens) == pytest.approx([19.5, 20.0], rel=1e-3)

    # The device took 5 ms a step, and 9 for the prompts of 24 tokens.
    slow_device = Rounds(times)
    slow_device.add(64, Round(28.0, 3.0, prompts=18.0, steps=10.0), steps=2, tokens=48.0)
    assert slow_device.ms(tokens) == pytest.approx([2.5 + 3.0, 5.0 + 9.0], rel=1e-3)

    nobody_knows = Rounds(times)
    nobody_knows.add(64, Round(28.0, 2.0, steps=8.0), steps=2, tokens=48.0)
    assert nobody_knows.ms(tokens) == pytest.approx([12.0, 14.0], rel=1e-2)
