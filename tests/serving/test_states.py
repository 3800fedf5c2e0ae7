"""Prefixes of hybrids: copies of recurrent states at borders of pages, few of them, bit for bit."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.compiled.shape import Shape
from jflash.generate import Pair
from jflash.layers.cache import DeltaCache
from jflash.memory import memory_budget, tree_bytes
from jflash.proof import under_load
from jflash.proof.under_load import DRAWN, Load
from jflash.serving.calls.constrained import kept_bytes
from jflash.serving.calls.layout import Layout, settled
from jflash.serving.calls.pass_sizes import engine_chunk
from jflash.serving.calls.slots import empty_state
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle, result_of
from jflash.serving.paging.copies import Copies, delta_nets
from jflash.serving.paging.room import needed, pages_within
from jflash.serving.paging.states import States, borders, leaving, states_kept
from jflash.serving.request import Event, Request, Result
from jflash.serving.schedule import Pass, passes
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import hybrid_pair, knowing, prompts, random_pair
from tests.support.virtual_devices import result, start

SHARED = """
import json
from jflash.generate import Pair
from jflash.devices.distribute import placed
from jflash.devices.mesh import over, tensor_mesh
from jflash.pair import Params
from tests.serving.test_states import asked, loop_of, same, told
from tests.support.pairs import one_arithmetic, prompts
from tests.support.shared_steps import pair
models, params = pair()
models = over(models, tensor_mesh(2))
parts = zip(models.configs, params, strict=True)
params = Params(*(placed(models.mesh, config, of) for config, of in parts))
loop = loop_of(one_arithmetic(Pair(models, params)), counts=(1,), ahead=1)
request, *others = map(asked, prompts(4, seed=4, low=150, high=151))
(cold, want), (hit, got) = (told(loop, request)[0] for _ in range(2))
[copy] = loop.device.copies.arrays
lies = [str(x.sharding.spec) for x in copy]
beside = [text for _, text in told(loop, request, *others)]
alone = [want, *(told(loop, each)[0][1] for each in others)]
counts = [*loop.device.counts]
print(json.dumps([cold, hit, same(want, got), lies, counts, [*map(same, beside, alone)]]))
"""

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
CONTEXT, CHUNK, BATCH, STEPS = 320, 32, 3, 2
PAGES = 15  # each text fills 5 at most


def test_which_states_are_copied():
    """Where a pass ends anyway, and where a text leaves what others have computed."""
    every = lambda *how: [*passes(*how)]  # noqa: E731
    assert every(0, (100,), (32,), 9) == [Pass(32, end) for end in (32, 64, 96, 100)]
    assert every(64, (130, 200), (64,), 9) == [Pass(64, end) for end in (128, 130, 194, 200)]
    assert every(0, (1000,), (64, 512), 99) == [Pass(512, 512), Pass(512, 1000)]
    assert every(0, (640, 1000), (64, 512), 2) == [Pass(64, 64), Pass(64, 128)]
    assert every(0, (1000,), (64, 512), 5) == [Pass(512, 512)]  # most of 320 tokens
    assert borders(0, 0, 100, (32,)) == (64,)
    assert borders(0, 0, 128, (32,)) == (64,)  # the same text again computes its last token
    assert borders(0, 0, 64, (32,)) == borders(0, 0, 400, (512,)) == ()
    assert borders(0, 0, 1000, (64, 512)) == (512,)
    assert borders(64, 64, 1000, (64, 512)) == (576,)
    assert borders(384, 0, 1000, (64, 512)) == (384, 960)
    assert borders(384, 0, 400, (512,)) == (384,)
    assert borders(128, 128, 150, (32,)) == ()
    narrow, all = (64, 512), (64, 512, 2048)  # a wide pass stops where narrow ones would end
    assert borders(0, 0, 1600, narrow) == (1536,) and borders(0, 0, 1600, all) == ()
    assert every(0, (1536, 1600), all, 99) == [Pass(2048, 1536), Pass(64, 1600)]
    assert borders(192, 64, 200, (32,)) == (192,)


def test_which_copies_stay():
    whole = {b"a", b"b", b"c"}.__contains__
    assert leaving([b"a", b"b", b"c"], whole) == b"a"
    assert leaving([b"a", b"x", b"y"], whole) == b"x"  # its pages are gone
    states = States(2)
    assert [states.keep(name, whole) for name in (b"a", b"b", b"a")] == [0, 1, None]
    assert states.keep(b"c", whole) == 1  # a counts as used after b
    assert states.longest([b"c", b"b", b"a", b"d"], len) == 3
    assert states.longest([b"c", b"b", b"a"], lambda names: min(2, len(names))) == 1
    assert states.use([b"c", b"b", b"a"]) == 0 and states.use([]) is None
    assert states.keep(b"x", whole) == 1 and states.keep(b"b", whole) == 1  # x has no pages
    states.forget_all()
    assert states.longest([b"a", b"b"], len) == 0
    assert States(None).longest([b"a", b"b"], len) == 2 and States(None).use([b"a"]) is None
    assert States(0).longest([b"a"], len) == 0


def loop_of(pair: Pair, states: int = 4, burst: int = 4, **more: Any) -> Loop:
    layout = Layout(Shape.of(BATCH, CONTEXT, 16, CHUNK), PAGES, STEPS, ("drawn",), states, **more)
    return Loop(pair.models, pair.params, layout, b"", burst)


def job_of(request: Request, order: int = 0) -> Job:
    handle, tokens = Handle(request, lambda _: None), list(request.prompt_ids)
    return Job(handle=handle, order=(0, order), seed=0, deadline=None, tokens=tokens)


def told(loop: Loop, *requests: Request) -> list[tuple[int | None, Result]]:
    """The cached tokens of each request and its result; they run together."""
    jobs, events = [], list[list[Event]]()
    for i, request in enumerate(requests):
        jobs.append(job_of(request, i))
        events.append([])
    loop.waiting += jobs
    while not loop.idle:
        loop.round(lambda job, some: events[job.order[1]].extend(some))
    pages = loop.holdings.pages
    assert pages.available == pages.count
    return [(job.cached, result_of(job.request, e)) for job, e in zip(jobs, events, strict=True)]


def same(one: Result, other: Result) -> bool:
    names = ("token_ids", "logprobs", "top_logprobs", "acceptance_lengths", "finish_reason")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def asked(ids: list[int], new: int = 20, **how) -> Request:
    return Request(prompt_ids=ids, max_tokens=new, logprobs=True, top_logprobs=3, **how)


@pytest.fixture(scope="module")
def pair() -> Pair:
    pair, [ids] = hybrid_pair(), prompts(1, seed=4, low=150, high=151)
    [(_, text)] = told(loop_of(pair), asked(ids, 150))
    return knowing(pair, ids, text.token_ids)


def test_a_hit_has_the_bits_of_what_was_computed():
    """By the whole prompt, by a part, with a text that grows; the drafter's context as well."""
    loop, [ids, tail] = loop_of(hybrid_pair()), prompts(2, seed=9, low=150, high=151)
    fresh = lambda request: told(loop, replace(request, cache_salt=str(next(salts))))[0]  # noqa: E731
    salts = iter(range(99))
    first, again = told(loop, asked(ids))[0], told(loop, asked(ids))[0]
    want = fresh(asked(ids))
    assert [first[0], again[0], want[0]] == [0, 128, 0]
    assert same(first[1], again[1]) and same(first[1], want[1])
    assert len(set(want[1].token_ids)) > 5
    # 70 tokens in common: the border at 64 gets a copy when the first text leaves there.
    parts = [asked([*ids[:70], *tail[:n]]) for n in (20, 30, 40)]
    got = [told(loop, part)[0] for part in parts]
    assert [cached for cached, _ in got] == [0, 64, 64]
    assert all(same(one, fresh(part)[1]) for (_, one), part in zip(got, parts, strict=True))
    # A talk: each turn has the last one's answer, whose pages no copy ends.
    turns, talk = [], ids[:100]
    for turn in range(3):
        cached, one = told(loop, asked(talk, 30, cache_salt="talk"))[0]
        assert same(one, fresh(asked(talk, 30))[1])
        turns.append(cached)
        talk = [*talk, *one.token_ids, *tail[turn * 30 : turn * 30 + 30]]
    assert turns == [0, 64, 128]


def test_a_drawn_text_and_its_drafts_after_a_hit(pair):
    """A drafter that knows most of a text, and a seed's draws; logprobs of the prompt hit none."""
    loop, [ids] = loop_of(pair), prompts(1, seed=4, low=150, high=151)
    for how in ({}, {"sampling": DRAWN, "seed": 3}):
        want, got = (told(loop, asked(ids, 60, **how))[0] for _ in range(2))
        assert got[0] == 128 and same(got[1], want[1])
        if not how:
            assert max(want[1].acceptance_lengths) > min(want[1].acceptance_lengths[:-1])
    whole = told(loop, asked(ids, 1, prompt_logprobs=0))[0]
    other = told(loop_of(pair, states=0), asked(ids, 1, prompt_logprobs=0))[0]
    assert whole[0] == 0 and whole[1].prompt_logprobs == other[1].prompt_logprobs


def test_a_wrong_copy_is_noticed(pair, monkeypatch):
    """The other tests could fail: without the copied states the numbers are others."""
    loop, [ids] = loop_of(pair), prompts(1, seed=4, low=150, high=151)
    [(_, want)] = told(loop, asked(ids))
    monkeypatch.setattr(Copies, "put", lambda self, state, *_: state)
    [(cached, got)] = told(loop, asked(ids))
    assert cached == 128 and not same(got, want)


def test_two_requests_at_once_share_a_prefix_that_grows(pair):
    loop, [ids, tail] = loop_of(pair), prompts(2, seed=5, low=200, high=201)
    before = [
        told(loop, asked([*ids[:at], *tail[:9]], cache_salt=str(at)))[0][1] for at in (140, 200)
    ]
    hits = []
    for at in (70, 140, 200):
        both = told(loop, *(asked([*ids[:at], *tail[:n]]) for n in (9, 13)))
        hits.append([cached for cached, _ in both])
        if at > 70:
            assert same(both[0][1], before.pop(0))
    assert hits == [[0, 0], [64, 64], [128, 128]]


@pytest.mark.long
def test_a_windowed_drafter_beside_a_hybrid():
    """Its pages, the others and a copy must all be there for a hit; in bfloat16."""
    sights = ({"window": 24}, {"window": None})
    pair = hybrid_pair("bfloat16", sights=sights)
    loop, [ids] = loop_of(pair), prompts(1, seed=4, low=150, high=151)
    want, hits = told(loop, asked(ids, 60))[0][1], []
    nothing, forget = lambda: None, loop.holdings.sliding.pages.forget_all
    for before in (nothing, forget, nothing):
        before()
        cached, got = told(loop, asked(ids, 60))[0]
        hits.append(cached)
        assert same(got, want)
    assert hits == [128, 0, 128]


def test_a_text_that_waits_in_its_slot_keeps_its_copied_states(pair):
    """Steps of others run between its admission and its first pass; and the place of its copy gets
    another one."""
    loop = loop_of(pair, states=1, burst=1)
    long, first, hit = prompts(3, seed=12, low=150, high=151)
    want = [told(loop, asked(p, cache_salt="alone"))[0][1] for p in (first, hit)]
    told(loop, asked(hit))
    waiting, steps = list[int](), loop.device.call

    def call(jobs, *tables):
        waiting.extend(job.computed for job in loop.running if job.origin is not None and job.end)
        return steps(jobs, *tables)

    loop.device.call = call
    job, events = job_of(asked(long[:50], 200)), list[tuple[Job, Event]]()
    give = lambda job, some: events.extend((job, event) for event in some)  # noqa: E731
    loop.waiting.append(job)
    while not job.begun:
        loop.round(give)
    jobs = [job_of(asked(first), 1), job_of(asked(hit), 2)]
    loop.waiting += jobs
    while not loop.idle:
        loop.round(give)
    assert waiting.count(128) >= 3
    assert [one.cached for one in jobs] == [0, 128]
    for one, alone in zip(jobs, want, strict=True):
        assert same(result_of(one.request, [e for of, e in events if of is one]), alone)


def test_states_and_pages_are_evicted(pair):
    """Without its copy, or without its pages, a text begins at the longest border that has both."""
    ids = prompts(3, seed=6, low=150, high=151)
    loop = loop_of(pair, states=1)
    want = [told(loop, asked(p))[0][1] for p in ids]
    assert [told(loop, asked(p))[0][0] for p in (ids[2], ids[0], ids[0], ids[2])] == [
        128,
        0,
        128,
        0,
    ]
    loop = loop_of(pair)
    for hit in (0, 128, 0, 128):
        [(cached, got)] = told(loop, asked(ids[0]))
        assert cached == hit and same(got, want[0])
        if hit:  # three texts fill all pages, and no copy takes the place of this one
            told(loop, *(asked([n], CONTEXT - 1) for n in range(3)))
            [name] = loop.holdings.states._place
            assert name not in loop.holdings.pages._page
    short = loop_of(pair)
    told(short, asked(ids[0][:100]))
    told(short, asked(ids[0]))  # copies at 64 and 128
    name = short.holdings.states._place.popitem()[0]
    assert name in short.holdings.pages._page
    [(cached, got)] = told(short, asked(ids[0]))
    assert cached == 64 and same(got, want[0])


def test_preempted_after_every_call(pair):
    """Each time its text goes on from the longest border with a copy, and is the same."""
    [ids] = prompts(1, seed=4, low=150, high=151)
    request, chunks = asked(ids, 100), {}
    for states in (0, 1, 4):
        loop, events = loop_of(pair, states), list[Event]()
        want = told(loop, replace(request, cache_salt="alone"))[0][1]
        job, before = job_of(request), loop.counts.chunks
        loop.waiting.append(job)
        give = lambda _, some, events=events: events.extend(some)  # noqa: E731
        while job.reason is None:
            loop.round(give)
            loop.drain(give)
            if job.reason is None and not job.end:
                loop.preempt(job)
        assert same(result_of(request, events), want)
        assert loop.counts.preempted > 5
        chunks[states] = loop.counts.chunks - before
    most = 2 * loop.counts.preempted + 5 + 2  # one or two for each border's rest, not five to eight
    assert chunks[4] <= chunks[1] <= most < chunks[0]


def test_other_weights_and_sleep_forget_the_copies(pair):
    loop, [ids] = loop_of(pair), prompts(1, seed=7, low=150, high=151)
    other = hybrid_pair().params._replace(drafter=pair.params.drafter)
    head = {**other.target, "head": -other.target["head"]}
    other = other._replace(target=head)
    want = told(loop, asked(ids))[0][1]
    assert told(loop, asked(ids))[0][0] == 128
    loop.new_weights(other)
    cached, one = told(loop, asked(ids))[0]
    assert cached == 0 and not same(one, want)
    loop.sleep()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(loop.device.copies.arrays))
    loop.wake()
    loop.new_weights(pair.params)
    for hit in (0, 128):
        cached, one = told(loop, asked(ids))[0]
        assert cached == hit and same(one, want)
    assert told(loop, asked(ids, cache_salt="other"))[0][0] == 0


def test_a_new_drafter_leaves_prefixes_to_texts_without_drafts(pair):
    """Others compute theirs again, and accept as many drafts as without a prefix."""
    loop, [ids] = loop_of(pair), prompts(1, seed=4, low=150, high=151)
    drafted, plain = asked(ids, 40), asked(ids, 40, speculate=False)
    waits, [(_, old)] = job_of(drafted), told(loop, drafted)
    loop.waiting.append(waits)
    assert loop.holdings.fresh(waits)[1] == 128  # as a plan looks at it
    other = jax.tree.map(lambda rows: -rows, pair.params.drafter)
    loop.new_weights(pair.params._replace(drafter=other))
    assert loop.holdings.fresh(waits)[1] == 0
    loop.waiting.remove(waits)
    cached, text = told(loop, plain)[0]
    assert cached == 128 and (text.token_ids, text.logprobs) == (old.token_ids, old.logprobs)
    plain = asked([*ids, *text.token_ids], 20, speculate=False)
    assert [told(loop, plain)[0][0] for _ in range(2)] == [128, 128]
    plain, drafted = [
        asked([*plain.prompt_ids, *range(20)], 30, speculate=speculate)
        for speculate in (False, True)
    ]
    assert [told(loop, plain)[0][0] for _ in range(2)] == [128, 192]
    alone = told(loop, replace(drafted, cache_salt="alone"))[0]
    found = [told(loop, drafted)[0] for _ in range(2)]
    assert [alone[0], *(cached for cached, _ in found)] == [0, 0, 192]
    assert all(same(each, alone[1]) for _, each in found)
    loop.new_weights(pair.params)
    assert [told(loop, each)[0][0] for each in (drafted, plain)] == [0, 192]
    target = jax.tree.map(jnp.copy, pair.params.target)
    loop.new_weights(pair.params._replace(target=target))
    assert told(loop, plain)[0][0] == 0


def test_a_copy_is_the_state_of_a_whole_pass(pair):
    """At the border, and after more tokens: of chunks of a text with and without a hit."""
    [ids] = prompts(1, seed=8, low=170, high=171)
    loop, found = loop_of(pair), []
    for salt in ("a", "a", "b"):
        told(loop, asked(ids, 1, cache_salt=salt))
        nets = delta_nets(loop.device.state)
        assert nets and all(isinstance(net, DeltaCache) for net in nets)
        [net] = nets
        found.append([np.asarray(net.memory.state[0]), np.asarray(net.raw[0])])
        assert int(net.memory.base[0]) == 160 and np.abs(found[-1][0]).max() > 0.1
    for other in found[1:]:
        for one, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(one, first)
    [copies] = loop.device.copies.arrays
    assert len(loop.holdings.states._place) == 2
    np.testing.assert_array_equal(copies.state[0], copies.state[1])
    np.testing.assert_array_equal(copies.raw[0], copies.raw[1])
    assert np.abs(np.asarray(copies.raw[0])).max() > 0


def test_devices_that_share_a_pair_have_copies_of_their_heads_and_step_some_slots():
    lies = ["P(None, 'tensor')", "P(None, None, 'tensor')"]
    *copied, counts, alike = result(start(SHARED))
    assert copied == [0, 128, True, lies]
    # Alone in calls of one slot, beside others of all, and one waited with its prompt computed.
    assert counts == [1, BATCH] and alike == [True] * 4


def test_nothing_compiles_under_load(compilations):
    """Random arrivals, cancels and evictions in few pages; every text is the text alone."""
    pair = hybrid_pair()
    pair = replace(pair, models=replace(pair.models, draft_rule="greedy"))
    load = Load(2, 256, pages=6, chunk=CHUNK, steps=STEPS)
    requests = under_load.mixed(16, load, pair.models.target.config.vocab_size)
    want = under_load.alone(pair, requests, load)
    with under_load.engine_for(pair, load, len(requests)) as engine:
        assert compilations, "the listener hears nothing: the test would pass in vain"
        before = len(compilations)
        got = under_load.through(engine, requests, seed=1, pause=0.02)
        assert len(compilations) == before
        again = engine.generate([replace(requests[0], prompt_ids=list(range(60)) * 2)] * 2)
        assert len(compilations) == before
        stats = engine.stats()
    assert stats.cached_tokens > 0 and stats.pages_available == stats.pages
    assert again[0].token_ids == again[1].token_ids
    assert under_load.differing(got, want) == []


def test_the_copies_memory_is_counted(pair):
    """To the byte; an attention model has none."""
    models, shape = pair.models, Shape.of(6, 256, chunk=64)
    layout = settled(models, Layout(shape, 24, STEPS))
    state = jax.eval_shape(lambda: empty_state(models, layout))
    nets = delta_nets(state)
    one = sum(
        4 * (net.memory.state.size + 3 * net.raw.size // net.raw.shape[1]) // 6 for net in nets
    )
    budget = memory_budget(replace(models, sampled=True), shape)
    parts = (budget.weights, budget.temporaries, tree_bytes(state), kept_bytes(models, layout))
    assert one and needed(models, shape, STEPS).of(24) == sum(parts) + 6 * one
    assert states_kept(models, 1) == 4 and states_kept(models, 9) == 9
    assert states_kept(random_pair().models, 9) == 0
    assert needed(models, shape, STEPS, 11).of(24) == sum(parts) + 11 * one
    larger = Shape.of(6, 256, chunk=engine_chunk(models, 256))
    more = needed(models, larger, STEPS, 11).of(24)
    assert pages_within(models, 6, 256, None, more, STEPS, 11) == 24
    with pytest.raises(ValueError, match=r"24 pages do not fit: .* there is room for 23 pages"):
        pages_within(models, 6, 256, 24, more - 1, STEPS, 11)
    with pytest.raises(ValueError, match="states 1: no layer is recurrent"):
        Engine(random_pair(), states=1)
    with pytest.raises(ValueError, match="states must be at least 0, got -1"):
        Engine(pair, states=-1)
