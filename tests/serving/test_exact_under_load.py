"""Every text is the text alone, bit for bit, whatever comes, goes, is evicted or preempted."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from jflash.compiled.shape import Shape
from jflash.generate import generate
from jflash.models.decoder import Target
from jflash.proof import forms, under_load
from jflash.proof.under_load import DRAWN, Load
from jflash.records.decoding import GREEDY, Decoding
from jflash.records.kernels import AUTO
from jflash.serving.calls import first_runs, steps
from jflash.serving.calls import pass_sizes as sizes_of_passes
from jflash.serving.calls.layout import KINDS, Kind, Layout
from jflash.serving.calls.pass_sizes import Several
from jflash.serving.engine import STALL, Engine
from jflash.serving.handle import Handle, result_of
from jflash.serving.request import Event, Request, Result
from jflash.serving.thread.device_time import DeviceTime
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from jflash.serving.thread.prompts import Prompts
from pallas_kernels.block_attention import PAGE
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import one_arithmetic, prompts, random_pair, target_config

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
CONTEXT, CHUNK, BATCH, STEPS = 256, 32, 3, 2


@pytest.fixture(scope="module")
def pair():
    pair = one_arithmetic(random_pair(target_layer_ids=(0,)))
    return replace(pair, models=replace(pair.models, draft_rule="greedy"))


def alone(pair, requests: list[Request]):
    """By the drivers, at another batch and capacity, without pages."""
    models = replace(pair.models, sampled=True)
    ways = [replace(request.decoding, oracle=False) for request in requests]
    ids = [list(request.prompt_ids) for request in requests]
    # generate's index is the row: every request here has index 0 of its own seed.
    return [
        generate(replace(pair, models=models), [p], way, capacity=512)[0]
        for p, way in zip(ids, ways, strict=True)
    ]


def test_exact_under_load(pair, compilations):
    """Random arrivals, cancels and time-outs, in a pool for little more than one long request, and
    calls over one slot and over all."""
    load = Load(BATCH, CONTEXT, pages=5, chunk=CHUNK, steps=STEPS, slots_at_once=(1,))
    vocabulary = pair.models.target.config.vocab_size
    tokenizer, end = forms.letters()
    own = forms.grammars(tokenizer, vocabulary, [end])
    requests = under_load.mixed(30, load, vocabulary, own)
    want = under_load.alone(pair, requests, load)
    with under_load.engine_for(pair, load, len(requests)) as engine:
        engine.generate([requests[0], requests[2]])  # the second one has a form
        assert compilations, "the listener hears nothing: the test would pass in vain"
        before = len(compilations)
        got = under_load.through(engine, requests, seed=1, pause=0.02)
        assert len(compilations) == before
        stats = engine.stats()
        assert stats.preempted > 0 and stats.cached_tokens > 0 and stats.ended["cancelled"] > 0
        assert stats.pages_available == stats.pages == 5
    assert under_load.differing(got, want) == []
    texts = [
        tokenizer.decode(result.token_ids, skip_special_tokens=True)
        for request, result in zip(requests, got, strict=True)
        if request.grammar is own[2] and result.finish_reason == "stop"
    ]
    assert texts and set(texts) <= {"yes", "no", "nobody knows"}
    changed = [*got[:3], replace(got[3], token_ids=got[3].token_ids[:-1]), *got[4:]]
    assert under_load.differing(changed, want) == [3]


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding", "preempted"])
def test_a_storm_of_cancels_leaves_the_others_text(pair, phase):
    """Whoever is in the phase is cancelled, round by round; pages and slots come back."""
    ids = prompts(9, seed=5, low=70, high=71)
    requests = [Request(prompt_ids=p, max_tokens=60) for p in ids]
    want = alone(pair, [replace(r, seed=0) for r in requests[:1]])[0]
    loop, events = loop_of(pair, burst=1), list[tuple[Job, Any]]()
    jobs = [job_of(request, i) for i, request in enumerate(requests)]
    loop.waiting += jobs
    give = lambda job, some: events.extend((job, event) for event in some)  # noqa: E731

    def within(job: Job) -> bool:
        if phase == "preempted" and job.slot is not None and job.begun:
            loop.drain(give)
            if job.reason is None:
                loop.preempt(job)
        return {
            "queued": job.slot is None and not job.begun,
            "prefilling": job.slot is not None and 0 < job.computed < 70 and bool(job.end),
            "decoding": job.slot is not None and job.begun and job.unread > 0,
            "preempted": job.slot is None and job.begun,
        }[phase] and job.reason is None

    stormed = 0
    while not loop.idle:
        loop.round(give)
        for job in jobs[1:]:
            if within(job):
                job.cancelled, stormed = True, stormed + 1
    assert stormed >= 6
    assert [job.reason for job in jobs].count("cancelled") == stormed
    assert jobs[0].tokens[70:] == want.token_ids and jobs[0].reason == "length"
    last = [[e for of, e in events if of is job][-1] for job in jobs]
    assert [e.finish_reason for e in last] == [job.reason for job in jobs]
    assert loop.holdings.pages.available == loop.holdings.pages.count
    assert loop.roster.slots == [None] * BATCH


def loop_of(pair, burst: int = 4, kinds: tuple[Kind, ...] = KINDS) -> Loop:
    shape = Shape.of(BATCH, CONTEXT, 16, CHUNK)
    return Loop(pair.models, pair.params, Layout(shape, 8, STEPS, kinds), b"", burst)


def counted(loop: Loop) -> list[str]:
    """The names of what the device is given to do from now on."""
    calls = []

    def named(name: str, method):
        return lambda *args: (calls.append(name), method(*args))[1]

    device: Any = loop.device
    passes: Any = loop.prompts.passes
    device.call = named("call", device.call)
    passes.chunk, passes.whole = named("chunk", passes.chunk), named("chunk", passes.whole)
    return calls


def job_of(request: Request, order: int = 0) -> Job:
    return Job(
        handle=Handle(request, lambda _: None),
        order=(0, order),
        seed=request.seed or 0,
        deadline=None,
        tokens=list(request.prompt_ids),
    )


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
@pytest.mark.parametrize("forgets", [True, False])
def test_preempted_after_every_call(pair, sampling, forgets):
    """With its own pages found again, and with all of it computed again."""
    request = Request(prompt_ids=prompts(1, low=70, high=71)[0], max_tokens=90, sampling=sampling)
    [want] = alone(pair, [replace(request, seed=0)])
    loop, events = loop_of(pair), []
    job = job_of(request)
    loop.waiting.append(job)
    give = lambda _, some: events.extend(some)  # noqa: E731
    while job.reason is None:
        loop.round(give)
        loop.drain(give)
        if job.reason is None and not job.end:
            loop.preempt(job)
            if forgets:
                loop.holdings.pages.forget_all()
    result = result_of(request, events)
    assert result.token_ids == want.token_ids
    assert result.acceptance_lengths == want.acceptance_lengths
    assert loop.counts.preempted >= len(want.acceptance_lengths) // STEPS - 1
    assert loop.holdings.pages.available == loop.holdings.pages.count


def test_a_hit_is_what_was_computed(pair):
    """Pages of generated tokens too, by a chunk or by a step, and the drafter's context."""
    request = Request(prompt_ids=prompts(1, low=50, high=51)[0], max_tokens=150)
    loop, texts = loop_of(pair), []

    def told(request: Request) -> Job:
        job, events = job_of(request, len(texts)), []
        loop.waiting.append(job)
        while job.reason is None:
            loop.round(lambda _, some: events.extend(some))
        loop.drain(lambda *_: None)
        texts.append(events)
        return job

    first = told(request)
    again = told(replace(request, prompt_ids=first.tokens[:170], max_tokens=30))
    assert again.cached == 2 * PAGE
    assert again.tokens == first.tokens
    found = loop.holdings.pages.find(again.names[:3])
    pools = [np.asarray(x[np.array(found)]) for x in jax.tree.leaves(caches(loop))]
    loop.holdings.pages.forget_all()
    fresh = told(replace(request, prompt_ids=first.tokens[:199], max_tokens=1))
    assert fresh.cached == 0
    other = loop.holdings.pages.find(fresh.names[:3])
    for got, pool in zip(pools, jax.tree.leaves(caches(loop)), strict=True):
        np.testing.assert_array_equal(got, np.asarray(pool[np.array(other)]))


def test_a_first_token_waits_for_its_chunks_and_no_step(pair, monkeypatch):
    """Of a new prompt, of one that was there before, alone and beside a text under way. The device
    has the next call of steps before the host waits for the token."""
    loop = loop_of(pair)
    calls = counted(loop)
    waits = DeviceTime.wait_for

    def wait_for(time: DeviceTime, given: Any) -> dict[str, float]:
        spent = waits(time, given)
        calls.append(f"{time.under_way} left")
        return spent

    monkeypatch.setattr(DeviceTime, "wait_for", wait_for)

    def until_first(request: Request, order: int) -> list[str]:
        job = job_of(request, order)
        loop.waiting.append(job)
        calls.clear()
        given = []
        while not given:
            loop.round(lambda of, _: given.append(list(calls)) if of is job else None)
        return given[0]

    [ids] = prompts(1, low=100, high=101)
    long = Request(prompt_ids=ids, max_tokens=140)
    four = [f"{left} left" for left in (4, 3, 2, 1)]
    assert until_first(long, 0) == ["chunk"] * 4 + ["call"] + four  # 100 tokens by 32
    one = replace(long, prompt_ids=ids[:70], max_tokens=1)
    # 64 of 70 tokens are there; the call of the first text that was under way is read first.
    assert until_first(one, 1) == ["chunk", "call", "2 left", "1 left"]
    three = [f"{left} left" for left in (4, 3, 2, 1)]
    assert until_first(replace(one, cache_salt="new"), 2) == ["chunk"] * 3 + ["call"] + three
    assert loop.roster.slots[0] is not None, "the first text was under way all the time"


def test_an_end_that_is_certain_takes_no_more_steps(pair):
    """A text of one token needs no call, and one whose last tokens are on their way no other."""
    loop, give = loop_of(pair), lambda *_: None
    calls = counted(loop)
    for new in (1, 1 + STEPS):
        calls.clear()
        job = job_of(Request(prompt_ids=prompts(1, low=20, high=21)[0], max_tokens=new), new)
        loop.waiting.append(job)
        while not loop.idle:
            loop.round(give)
        assert calls == ["chunk", "call"][:new] and job.reason == "length"


@pytest.mark.parametrize(("burst", "seconds"), [(1, 0.0), (2, 0.0), (2, 0.02)])
def test_a_long_prompt_keeps_no_text_waiting(pair, burst, seconds, monkeypatch):
    """Between two calls of its steps there are `burst` chunks, whatever arrives; fewer if a chunk
    takes so many seconds that more would pass the engine's STALL."""
    monkeypatch.setattr(DeviceTime, "lasted", lambda *_: seconds)
    loop, texts = loop_of(pair, burst=8 if seconds else burst), dict[int, list[int]]()
    loop.prompts.stall = STALL
    requests = [
        Request(prompt_ids=p, max_tokens=n)
        for p, n in zip(prompts(3, seed=2, low=180, high=181), (50, 9, 9), strict=True)
    ]
    short = replace(requests[0], prompt_ids=requests[0].prompt_ids[:9])
    jobs = [job_of(request, i) for i, request in enumerate([short, *requests[1:]])]

    def give(job, events):
        for event in events:
            texts.setdefault(job.order[1], []).extend(event.token_ids)

    loop.waiting.append(jobs[0])
    loop.round(give)
    calls = counted(loop)
    loop.waiting += jobs[1:]
    while jobs[0].reason is None:
        loop.round(give)
    while not loop.idle:
        loop.round(give)
    runs = [len(list(run)) for name, run in itertools.groupby(calls) if name == "chunk"]
    assert max(runs) == burst and sum(runs) == 2 * 6 and calls[-1] == "call"
    assert sorted(texts) == [0, 1, 2]


@pytest.mark.parametrize(
    ("seconds", "burst"),
    [({}, 16), ({512: 0.013}, 12), ({512: 0.026}, 4), ({512: 0.044, 128: 0.02}, 4),
     ({512: 0.05, 128: 0.02}, 2), ({512: 0.1, 128: 0.06}, 1), ({128: 0.001}, 16),
     ({1024: 0.04}, 8)],
)  # fmt: skip
def test_whole_chunks_fit_into_the_stall(seconds, burst):
    """Of chunks that take so long: a small one takes more than its part of a large one's time, and
    one that was computed beside another half the time of both."""
    time = SimpleNamespace(lasted=lambda part, size: seconds.get(size, 0.0))
    programs, several = SimpleNamespace(chunk={512: None, 128: None}), (Several(2, 512),)
    device = SimpleNamespace(time=time, programs=programs)
    over = SimpleNamespace(device=device, several=several)
    prompts = Prompts(cast(Any, over), cast(Any, None), dict, burst=16, stall=0.045)
    assert prompts.now == burst


def test_how_many_prompts_of_a_length_come_together():
    """Whatever the length: the last pass counts, of several or of one."""
    programs = SimpleNamespace(chunk=dict.fromkeys((64, 128, 512)))
    several = Several(4, 128, 3), Several(2, 512)
    passes = SimpleNamespace(device=SimpleNamespace(programs=programs), several=several)
    prompts = Prompts(cast(Any, passes), cast(Any, None), dict)
    found = {n: prompts.together(n) for n in range(1, 600)}
    assert {n: found[n] for n in (1, 64, 65, 128, 200, 256, 257, 512, 513)} == {
        1: 4, 64: 4, 65: 4, 128: 4, 200: 4, 256: 4, 257: 2, 512: 2, 513: 1,
    }  # fmt: skip


def test_slot_and_pages_are_free_when_the_last_event_comes(pair):
    """Who sees it may ask for the counts at once."""
    loop, seen = loop_of(pair), []

    def on_events(job, events):
        pages = loop.holdings.pages
        seen.append((events[-1].finish_reason, job.slot, pages.available == pages.count))

    loop.waiting.append(job_of(Request(prompt_ids=[1, 2, 3], max_tokens=12), 0))
    while not loop.idle:
        loop.round(on_events)
    *during, end = seen
    assert end == ("length", None, True)
    assert during[0] == (None, 0, False)


def test_long_prompts_take_larger_chunks_and_keep_their_texts(pair, monkeypatch):
    """Of a text of 180 tokens one pass computes 128; the texts are those by small chunks."""
    requests = [Request(prompt_ids=p, max_tokens=9) for p in prompts(2, seed=2, low=180, high=181)]
    texts: list[dict[int, list[int]]] = [{}, {}]
    loops = [loop_of(pair)]
    monkeypatch.setattr(sizes_of_passes, "chunk_sizes", lambda models, shape: (CHUNK, 128))
    shape = Shape.of(BATCH, CONTEXT, 16, CHUNK)
    loops.append(Loop(pair.models, pair.params, Layout(shape, 9, STEPS, ("greedy",)), b""))
    for loop, got in zip(loops, texts, strict=True):
        calls = counted(loop)
        loop.waiting += [job_of(request, i) for i, request in enumerate(requests)]
        while not loop.idle:
            loop.round(
                lambda job, some, got=got: got.setdefault(job.order[1], []).extend(
                    token for event in some for token in event.token_ids
                )
            )
    assert calls.count("chunk") == 2 * 3  # of 128, 32 and 32
    assert texts[0] == texts[1] and [len(text) for text in texts[0].values()] == [9, 9]


def caches(loop: Loop):
    return loop.device.state.target_cache, loop.device.state.drafter_cache


def test_pages_that_left_the_window_return():
    """In target and drafter: texts and acceptance lengths are those of rings, after a hit too."""
    windows: dict[str, Any] = {"sights": ({"window": 24}, {"window": None})}
    pair = one_arithmetic(random_pair(**windows))
    target = Target(target_config(**windows))
    pair = replace(pair, models=replace(pair.models, target=target))
    ids = prompts(2, seed=3, low=100, high=120)
    requests = [Request(prompt_ids=p, max_tokens=120) for p in ids]
    want = generate(pair, ids, Decoding(max_new_tokens=120), capacity=512)
    loop = loop_of(pair, kinds=("greedy",))
    pool = loop.holdings.sliding.pages

    def told(*requests: Request) -> list[tuple[Job, Result]]:
        jobs = [job_of(request, i) for i, request in enumerate(requests)]
        events = [list[Event]() for _ in jobs]
        loop.waiting += jobs
        while not loop.idle:
            begun = [(job, len(job.tokens)) for job in loop.running if job.begun]
            loop.round(lambda job, some: events[job.order[1]].extend(some))
            for job, length in begun:
                seen = job.seen.pages  # of the call that began with at least so many tokens
                assert not seen or min(seen) >= max(0, length - 24) // PAGE
        assert pool.available == pool.count
        return [(job, result_of(job.request, e)) for job, e in zip(jobs, events, strict=True)]

    text = [*ids[0], *want[0].token_ids]
    again = Request(prompt_ids=text[:200], max_tokens=20)
    [(_, fresh)] = told(replace(again, cache_salt="fresh"))
    for (_, result), one in zip(told(*requests), want, strict=True):
        assert result.token_ids == one.token_ids
        assert result.acceptance_lengths == one.acceptance_lengths
    hits = []
    for forget in (lambda: None, pool.forget_all, lambda: None):
        forget()  # without what the next token sees there is no hit
        [(job, result)] = told(again)
        hits.append(job.cached)
        assert result.token_ids == fresh.token_ids == text[200:220]
        assert result.acceptance_lengths == fresh.acceptance_lengths
    assert hits == [3 * PAGE, 0, 3 * PAGE]


def test_a_first_token_keeps_the_next_call_under_way(pair):
    """The round that gives it out still reads the call before, and waits for none after that."""
    loop, give = loop_of(pair), lambda *_: None
    jobs = [job_of(Request(prompt_ids=p, max_tokens=60), i) for i, p in enumerate(prompts(2))]
    for job in jobs:
        loop.waiting.append(job)
        loop.round(give)
    assert jobs[1].begun and [job.unread for job in jobs] == [STEPS, STEPS]
    assert loop.device.time.under_way == 1
    while not loop.idle:
        loop.round(give)


def test_drawn_texts_take_whole_blocks(pair):
    """Where greedy ones would share five rows; or as many as pay, whose programs are the pair's."""
    models = replace(pair.models, rows=AUTO)
    assert steps.of_all_kinds(models, BATCH) == steps.of_all_kinds(pair.models, BATCH)
    request = Request(prompt_ids=prompts(1, seed=6)[0], max_tokens=20, sampling=DRAWN, seed=0)
    [want] = alone(pair, [request])
    few = replace(pair, models=replace(pair.models, rows=5))
    how: dict[str, Any] = dict(max_batch=BATCH, max_context=CONTEXT, prefill_chunk=CHUNK)
    with Engine(few, steps_per_call=STEPS, kinds=("drawn",), **how) as engine:
        [got] = engine.generate([request])
    assert got.token_ids == want.token_ids
    assert got.acceptance_lengths == want.acceptance_lengths


def test_rows_are_timed_over_different_texts(pair):
    """Rows of one token would reach the same experts, and look cheap."""
    texts, layout = [], Layout(Shape.of(2, CONTEXT, 16, CHUNK), 8, STEPS, ahead=0)

    def step(params, state, table, slots):
        texts.append(np.asarray(state.sequences.tokens))
        return state, 0

    assert first_runs._times(pair.models, pair.params, layout, {2: step}, 2)[2].ms > 0
    assert len(np.unique(texts[0])) > 10


@pytest.mark.long
def test_as_many_rows_as_pay(pair):
    """Whatever number a call takes: with each of them in turn the texts are the same."""
    requests = [Request(prompt_ids=p, max_tokens=40) for p in prompts(2, seed=6)]
    want = alone(pair, [replace(r, seed=0) for r in requests])
    models = replace(pair.models, rows=AUTO)
    shape = Shape.of(2, CONTEXT, 16, CHUNK)
    loop = Loop(models, pair.params, Layout(shape, 8, STEPS, ("greedy",)), b"")
    rows = loop.device.step_programs.rows[2]
    turns = itertools.cycle(each.rows for each in loop.device.programs.greedy)
    rows.choice = lambda: (next(turns), STEPS)
    events, jobs = {0: [], 1: []}, [job_of(r, i) for i, r in enumerate(requests)]
    loop.waiting += jobs
    while not loop.idle:
        loop.round(lambda job, some: events[job.order[1]].extend(some))
    assert sorted(rows.steps) == [2, 8, 16] and all(rows.steps.values())
    assert [job.tokens[len(job.request.prompt_ids) :] for job in jobs] == [
        one.token_ids for one in want
    ]
