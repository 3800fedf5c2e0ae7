"""Requests whose prompts are computed before a place in a call is free."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jflash.compiled.shape import Shape
from jflash.layers.gather import AXIS
from jflash.memory import tree_bytes
from jflash.proof.under_load import DRAWN
from jflash.records.kernels import AUTO, XLA, Kernels
from jflash.serving.calls import layout as layouts
from jflash.serving.calls.layout import Layout, settled
from jflash.serving.calls.packing import all_taken
from jflash.serving.calls.slots import empty_state
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle, result_of
from jflash.serving.paging.room import needed
from jflash.serving.request import Event, Full, Request, Result
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import hybrid_pair, one_arithmetic, prompts, random_pair

PLACES, AHEAD, STEPS, CHUNK = 2, 3, 2, 32
GREEDY: dict[str, Any] = dict(kinds=("greedy",), prompts=2)
cpu_law = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")


@pytest.fixture(scope="module")
def pair():
    return one_arithmetic(random_pair())


class Watched:
    """A loop, and for each call of steps who might step, and whose slots did."""

    def __init__(self, pair, requests: Iterable[Request], **more: Any) -> None:
        how: dict[str, Any] = dict(kinds=("greedy", "drawn"), counts=(), ahead=AHEAD) | more
        layout = Layout(Shape.of(PLACES, 192, 16, CHUNK), 40, STEPS, **how)
        self.loop = loop = Loop(pair.models, pair.params, layout, b"")
        self.calls = list[tuple[list[int], list[int]]]()
        self.together = list[int]()  # the prompts of each pass that chose first tokens
        self.events = list[list[Event]]()
        device: Any = loop.device
        passes: Any = loop.prompts.passes
        learn, whole = device.learn, passes.whole

        def learned(read: Any, report: Any) -> None:
            stepped = all_taken(report, pair.models.block_size, read.steps, False)
            might = dict(zip(read.slots, read.jobs, strict=True))
            able = [might[slot].order[1] for slot in stepped if slot in might]
            self.calls.append(([job.order[1] for job in read.jobs], able))
            learn(read, report)

        device.learn = learned
        passes.whole = lambda some, *rest: (self.together.append(len(some)), whole(some, *rest))[1]
        self.add(requests)

    def add(self, requests: Iterable[Request]) -> None:
        for one in requests:
            handle, number = Handle(one, lambda _: None), len(self.events)
            self.events.append([])
            order, tokens = (one.priority, number), list(one.prompt_ids)
            job = Job(handle=handle, order=order, seed=one.seed or 0, deadline=None, tokens=tokens)
            self.loop.waiting.append(job)

    def round(self) -> None:
        self.loop.round(lambda job, some: self.events[job.order[1]].extend(some))

    def end(self) -> None:
        while not self.loop.idle:
            self.round()
        self.loop.close()


def asked(count: int, new: int = 12, **more: Any) -> list[Request]:
    """Greedy texts of several lengths."""
    ids = prompts(count, seed=5, low=5, high=30)
    return [
        Request(prompt_ids=p, max_tokens=new + 5 * (i % 4), seed=i, cache_salt=str(i), **more)
        for i, p in enumerate(ids)
    ]


def answer(result: Result) -> tuple:
    return result.token_ids, result.acceptance_lengths, result.logprobs, result.finish_reason


@cpu_law
@pytest.mark.parametrize(
    "kind", ["recurrent", *(pytest.param(x, marks=pytest.mark.long) for x in ("usual", "windows"))]
)
def test_who_waits_steps_in_the_call_in_which_another_has_ended(kind):
    """The host knows of a stop token one call later, and the device before: the call serves the
    next one in its place. The texts are those of requests that are alone."""
    made = random_pair(sights=({"window": 24}, {})) if kind == "windows" else random_pair()
    pair = hybrid_pair() if kind == "recurrent" else one_arithmetic(made)
    drawn: dict[str, Any] = dict(sampling=DRAWN, logprobs=True, presence_penalty=0.5)
    requests = [replace(one, **drawn if i % 3 == 2 else {}) for i, one in enumerate(asked(9, 30))]
    with Engine(pair, max_batch=1, max_context=192, prefill_chunk=CHUNK) as engine:
        for i, one in enumerate(requests):
            [whole] = engine.generate([one])
            requests[i] = replace(one, stop_ids=(whole.token_ids[8 + i],))
        want = [engine.generate([one])[0] for one in requests]
    pair = replace(pair, models=replace(pair.models, rows=None if kind == "windows" else AUTO))
    watched, without = (Watched(pair, requests, ahead=n) for n in (AHEAD, 0))
    for each in (watched, without):
        each.end()
        for one, events, alone in zip(requests, each.events, want, strict=True):
            assert answer(result_of(one, events)) == answer(alone)
    assert all(set(stepped) <= set(might) for might, stepped in watched.calls)
    took_over = sum(bool(set(stepped) & set(might[PLACES:])) for might, stepped in watched.calls)
    assert took_over >= 4 and len(watched.calls) < len(without.calls)


@cpu_law
def test_prompts_come_together_while_others_step(pair):
    """With none ahead a prompt comes alone as each text ends; nobody waits for it, so two can come
    at once, until the last of them."""
    requests = asked(9)
    watched, without = (Watched(pair, requests, ahead=n, **GREEDY) for n in (AHEAD, 0))
    for each in (watched, without):
        each.end()
    assert watched.together == [2, 2, 1, 2, 2]  # five slots are free at first
    assert without.together.count(1) > 2
    for one, mine, other in zip(requests, watched.events, without.events, strict=True):
        assert answer(result_of(one, mine)) == answer(result_of(one, other))


@cpu_law
def test_who_has_begun_goes_on_and_the_first_of_the_others_follows(pair):
    """A request of a higher priority waits for a place, and comes before those that wait longer."""
    watched = Watched(pair, asked(4, new=40), **GREEDY)
    for _ in range(3):
        watched.round()
    watched.add(asked(1, new=9, priority=-1))
    watched.end()
    begun = [order for might, _ in watched.calls for order in might[:PLACES]]
    assert begun.index(4) < begun.index(2) < begun.index(3)
    for number in range(5):
        steps = [number in stepped for _, stepped in watched.calls]
        first, last = steps.index(True), len(steps) - steps[::-1].index(True)
        assert all(steps[first:last]), "it stood still"


def test_how_many_are_ahead(pair, monkeypatch):
    """A quarter of those that step, where calls of some slots pay; memory counts their slots."""
    layout = Layout(Shape.of(32, 256), 64, 2)
    assert settled(pair.models, layout).ahead == 0  # a CPU
    assert settled(pair.models, layout._replace(ahead=3)).slots == 35
    kernels = Kernels(*["canonical"] * len(XLA))._replace(heads="triton")
    gpu = replace(pair.models, kernels=kernels)
    assert settled(gpu, layout).ahead == 0  # a small model
    monkeypatch.setattr(layouts, "MOST_WEIGHTS", 0)
    found = {n: settled(gpu, layout._replace(shape=Shape.of(n, 256))).ahead for n in (1, 4, 8, 64)}
    assert found == {1: 0, 4: 1, 8: 2, 64: 8}
    shared = replace(gpu, mesh=Mesh(np.array(jax.local_devices()[:1]), (AXIS,)))
    assert settled(shared, layout).ahead == 8 and layouts.takes_some(shared)
    shape = Shape.of(4, 256)
    usual = needed(pair.models, shape, 2).others
    monkeypatch.setattr(layouts, "takes_some", lambda models: True)
    states = [
        jax.eval_shape(lambda n=n: empty_state(pair.models, Layout(shape, 1, 2, ahead=n)))
        for n in (0, 1)
    ]
    none, one = map(tree_bytes, states)
    assert needed(pair.models, shape, 2).others - usual >= one - none > 0


@pytest.mark.parametrize(
    ("ahead", "why"),
    [(-1, "prompts_ahead must be at least 0, got -1"), (0.5, "prompts_ahead 0.5 must be a whole")],
)
def test_numbers_that_are_none_are_refused(pair, ahead, why):
    with pytest.raises(ValueError, match=why):
        Engine(pair, max_context=192, prompts_ahead=ahead)


def test_texts_that_depend_on_their_neighbours_do_not_change_places():
    with pytest.raises(ValueError, match="prompts_ahead 1: a prompt's bits may depend on the othe"):
        Engine(random_pair(), max_context=192, prompts_ahead=1)


def test_who_has_no_place_yet_counts_as_waiting(pair):
    """Also with its prompt computed, for who asks and for the queue's limit: an engine tells of no
    more that run than step at once, and takes as many more as it says."""
    sizes: dict[str, Any] = {"max_batch": PLACES, "max_context": 192, "max_queue": 9}
    seen, more = [], list[tuple[int, int]]()
    request = Request(prompt_ids=[1, 2, 3], max_tokens=20)
    with Engine(pair, prompts_ahead=AHEAD, **sizes) as engine:

        def look() -> None:
            stats, held = engine.stats(), len(engine._loop.running)
            seen.append((stats, held))
            if held > PLACES and not more:
                taken = 0
                with pytest.raises(Full):
                    while True:
                        engine.submit(request)
                        taken += 1
                more.append((stats.waiting, taken))

        engine.before_waiting(look)
        engine.generate([replace(request, prompt_ids=ids) for ids in prompts(7, seed=2, high=30)])
    assert max(held for _, held in seen) > PLACES
    assert all(stats.running == min(held, PLACES) for stats, held in seen)
    assert all(stats.waiting >= held - PLACES for stats, held in seen)
    [(waiting, taken)] = more
    assert waiting + taken == sizes["max_queue"]
