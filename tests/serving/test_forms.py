"""Beside a text that has a grammar the others keep their steps, and the device has work."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jflash.compiled.shape import Shape
from jflash.generate import Pair, generate
from jflash.serving.calls.layout import Layout
from jflash.serving.grammar import Grammar, Grammars, Matcher
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Request
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from tests.support.attention_checks import ON_GPU
from tests.support.letters import DIGITS, END, letters_tokenizer
from tests.support.pairs import hybrid_pair, one_arithmetic, prompts, random_pair

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
BATCH, CHUNK, STEPS = 3, 32, 2


@pytest.fixture(scope="module")
def pair() -> Pair:
    return one_arithmetic(random_pair())


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return Grammars(letters_tokenizer(), 67, [END]).compile("regex", "[0-9]{20}")


def loop_of(
    pair: Pair, burst: int = 4, steps: int = STEPS, ahead: int = 0
) -> tuple[Loop, list[tuple[str, Any]]]:
    """A loop, and what its device is given of steps from now on: the method, and whose they are."""
    layout = Layout(Shape.of(BATCH, 512, 16, CHUNK), 24, steps, ahead=ahead)
    loop, calls = Loop(pair.models, pair.params, layout, b"", burst), []
    loop.device.prepare_grammars()

    def named(name: str, method: Any) -> Any:
        return lambda jobs, *rest: (calls.append((name, list(jobs))), method(jobs, *rest))[1]

    device: Any = loop.device
    device.call = named("call", device.call)
    device.step_with_forms = named("step", device.step_with_forms)
    return loop, calls


def job_of(loop: Loop, request: Request, order: int, priority: int = 0) -> Job:
    job = Job(
        handle=Handle(request, lambda _: None), order=(priority, order), seed=0, deadline=None,
        tokens=list(request.prompt_ids), matcher=request.grammar and Matcher(request.grammar),
    )  # fmt: skip
    loop.waiting.append(job)
    return job


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.long), STEPS])
def test_neighbours_take_more_steps_than_the_text_in_a_form(pair, grammar, steps):
    """A round is a step of all and a call of the others, which the device still has to compute
    when the next round begins; texts alone take the call and no more."""
    loop, calls = loop_of(pair, steps=steps)
    ids, ends = prompts(BATCH, seed=4), (90, 90, 80)
    forms = [dict(grammar=grammar, stop_ids=[END]), {}, {}]
    requests = [
        Request(prompt_ids=p, max_tokens=n, **form)
        for p, n, form in zip(ids, ends, forms, strict=True)
    ]
    jobs = [job_of(loop, request, i) for i, request in enumerate(requests)]
    took, work, waits = list[list[int]](), list[list[str]](), list[int]()
    while not loop.idle:
        events = [0] * BATCH
        calls.clear()

        def give(job: Job, some: list[Event], events: list[int] = events) -> None:
            events[job.order[1]] += len(some)

        loop.round(give)
        took.append(events)
        work.append([name for name, _ in calls])
        waits.append(loop.device.time.under_way)
    # The first round has the first tokens, and drafts for the form; the next one has its step.
    assert took[0][0] == 1 and work[0] == ["step", "call"]
    until = next(i for i, events in enumerate(took) if i and not events[0])
    for i in range(2, until - 1):
        assert work[i] == ["step", "call"] and waits[i] == 1
        assert took[i] == [1, 1 + steps, 1 + steps]
    assert until > 10 and work[until] == ["call"]
    want = generate(pair, ids[1:], max_new_tokens=90)
    assert jobs[1].tokens[len(ids[1]) :] == want[0].token_ids
    assert jobs[2].tokens[len(ids[2]) :] == want[1].token_ids[:80]
    *text, end = jobs[0].tokens[len(ids[0]) :]
    assert len(text) == 20 and set(text) <= set(DIGITS) and end == END


def test_who_lacks_pages_for_one_step_more_takes_the_call_alone(pair, grammar):
    """Its prompt began before a grammar came, and ends in the round of the grammar's first step."""
    loop, calls = loop_of(pair, burst=1)
    tokens = 320 - 1 - STEPS * pair.models.block_size
    ids = prompts(1, seed=4, low=tokens, high=tokens + 1)[0]
    assert tokens > 8 * CHUNK  # more than one round computes
    other = job_of(loop, Request(prompt_ids=ids, max_tokens=40), 0)
    loop.round(lambda *_: None)
    assert other.end
    request = Request(prompt_ids=ids[:9], max_tokens=40, grammar=grammar, stop_ids=[END])
    form = job_of(loop, request, 1, priority=-1)
    while not loop.idle:
        loop.round(lambda *_: None)
    assert calls[:2] == [("step", [form]), ("call", [other])]
    assert calls[2] == ("step", [other, form])  # who has begun comes first
    want = generate(pair, [ids], max_new_tokens=40)[0]
    assert other.tokens[tokens:] == want.token_ids


def test_drafts_that_wait_are_those_of_the_newest_step(pair, grammar):
    """A text that was away for a step gets new drafts: the device has others in its place."""
    loop, _ = loop_of(pair)
    how: dict[str, Any] = dict(max_tokens=90, grammar=grammar, stop_ids=[END])
    nobody, texts, given_up = (lambda *_: None), [], 0
    for away in (False, True):
        jobs = [
            job_of(loop, Request(prompt_ids=p, cache_salt=str(away), **how), i)
            for i, p in enumerate(prompts(2, seed=4))
        ]
        while not loop.idle:
            loop.round(nobody)
            if away and len(loop.running) == 2 and len(jobs[0].tokens) % 3 == 0:
                loop._unread.append(loop._step_with_forms([jobs[1]]))
                loop.drain(nobody)
                ready = loop.device.forms.who(jobs, np.arange(BATCH))[0]
                assert (jobs[0] not in ready and jobs[1] in ready) or jobs[1].reason
                given_up += 1
        texts.append([job.tokens for job in jobs])
    assert texts[0] == texts[1] and given_up > 3


@pytest.mark.parametrize("recurrent", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_text_of_a_grammar_waits_for_a_place_with_its_prompt_computed(pair, grammar, recurrent):
    """A step in which some texts have a grammar has no rows for those that wait, and a text is what
    it is alone, whichever slot and place it has."""
    pair = hybrid_pair() if recurrent else pair
    ids, ahead = prompts(7, seed=4, high=30), 3
    ways: list[dict[str, Any]] = [dict(grammar=grammar, max_tokens=30), dict(max_tokens=40)]
    requests = [
        Request(prompt_ids=p, stop_ids=[END], **ways[i % 3 == 1]) for i, p in enumerate(ids)
    ]
    alone = []
    for one in requests:
        loop, _ = loop_of(pair)
        job = job_of(loop, replace(one, speculate=False), 0)
        while not loop.idle:
            loop.round(lambda *_: None)
        alone.append(job.tokens)
    loop, calls = loop_of(pair, ahead=ahead)
    rows, masks = list[int](), loop.device.forms.masks
    loop.device.forms.masks = lambda jobs, slots: (rows.append(len(slots)), masks(jobs, slots))[1]
    jobs = [job_of(loop, one, i) for i, one in enumerate(requests)]
    most = 0
    while not loop.idle:
        loop.round(lambda *_: None)
        most = max(most, len(loop.running))
    assert most == BATCH + ahead and set(rows) == {BATCH}
    assert all(len(who) <= BATCH for name, who in calls if name == "step")
    assert [job.tokens for job in jobs] == alone


def test_sleep_frees_the_drafts(pair, grammar):
    loop, _ = loop_of(pair)
    request = Request(prompt_ids=[1, 2], max_tokens=9, grammar=grammar, stop_ids=[END])
    texts = []
    for salt in "ab":
        job = job_of(loop, replace(request, cache_salt=salt), 0)
        while not loop.idle:
            loop.round(lambda *_: None)
        texts.append(job.tokens)
        assert loop.device.forms.drafted is not None
        loop.sleep()
        assert loop.device.forms.drafted is None
        loop.wake()
    assert texts[0] == texts[1] and len(texts[0]) == 11
    masks = loop.device.forms.masks([], np.arange(BATCH))
    assert np.all(masks == -1)
