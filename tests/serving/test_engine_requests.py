"""The engine from outside: events and results, ends of every kind, readers in threads and loops."""

import asyncio
import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jflash.generate import generate
from jflash.records.decoding import Decoding, Sampling
from jflash.serving import engine as engine_module
from jflash.serving import limits
from jflash.serving.engine import Engine
from jflash.serving.request import Full, Request
from jflash.serving.stats import SIZES, Stats
from jflash.serving.thread import device
from tests.support.pairs import one_arithmetic, prompts, random_pair


@pytest.fixture(scope="module")
def pair():
    return one_arithmetic(random_pair())


@pytest.fixture(scope="module")
def engine(pair):
    with Engine(pair, max_batch=2, max_context=240, max_queue=3, prefill_chunk=64) as engine:
        yield engine


def by_itself(pair, request: Request):
    drawn = replace(pair, models=replace(pair.models, sampled=True))
    how = replace(Decoding(), max_new_tokens=request.max_tokens, stop_token_ids=request.stop_ids)
    return generate(drawn, [list(request.prompt_ids)], how, prefill_chunk=64)[0]


def test_events_are_the_steps_of_the_text_alone(pair, engine):
    for prompt in prompts(3, seed=4):
        request = Request(prompt_ids=prompt, max_tokens=30, seed=0)
        want = by_itself(pair, request)
        handle = engine.submit(request)
        events = list(handle)
        assert [len(e.token_ids) for e in events] == [1, *want.acceptance_lengths]
        assert [t for e in events for t in e.token_ids] == want.token_ids
        assert [e.accepted for e in events[1:]] == [n - 1 for n in want.acceptance_lengths]
        assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["length"]
        assert handle.result().acceptance_lengths == want.acceptance_lengths


def test_a_loop_reads_while_the_engine_works(engine):
    async def ids(request: Request) -> list[int]:
        return [t async for e in engine.submit(request) for t in e.token_ids]

    async def both(requests):
        return await asyncio.gather(*map(ids, requests))

    requests = [Request(prompt_ids=p, max_tokens=20) for p in prompts(2, seed=5)]
    got = asyncio.run(both(requests))
    assert got == [result.token_ids for result in engine.generate(requests)]


def test_ends_of_every_kind(engine):
    long = Request(prompt_ids=[1, 2], max_tokens=200)
    first = engine.submit(long)
    next(iter(first))
    first.cancel()
    assert first.result().finish_reason == "cancelled"
    assert 1 <= len(first.result().token_ids) < 200
    assert engine.submit(replace(long, timeout=1e-3)).result().finish_reason == "timeout"
    whole = engine.submit(replace(long, max_tokens=20)).result()
    stop = whole.token_ids[5]
    stopped = engine.submit(replace(long, stop_ids=[stop])).result()
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    plain = engine.submit(replace(long, max_tokens=20, speculate=False)).result()
    assert plain.token_ids == whole.token_ids and set(plain.acceptance_lengths) == {1}


def test_events_have_the_time_until_a_slot_was_given(engine):
    engine.sleep()
    request, slept = Request(prompt_ids=[1, 2], max_tokens=9), 0.03
    waits, leaves = engine.submit(request), engine.submit(request)
    leaves.cancel()
    assert [event.queued for event in leaves] == [None]
    time.sleep(slept)
    engine.wake()
    late, soon = list(waits), list(engine.submit(request))
    assert len({event.queued for event in late}) == len({event.queued for event in soon}) == 1
    assert soon[0].queued < slept <= late[0].queued


def test_rounds_are_counted_by_their_tokens(engine):
    def settled() -> Stats:
        """After the end of the round that gave the last event."""
        engine.sleep()
        engine.wake()
        return engine.stats()

    before = settled()
    engine.generate([Request(prompt_ids=[3] * 100, max_tokens=1, cache_salt="rounds")])
    after = settled()
    assert after.computed - before.computed == 100
    pairs = zip(after.rounds_by_tokens, before.rounds_by_tokens, strict=True)
    counts = dict(zip((*SIZES, None), (b - a for b, a in pairs), strict=True))
    assert {size: count for size, count in counts.items() if count} == {128: 1}


def test_refusals(engine, monkeypatch):
    wrong: list[tuple[dict[str, Any], str]] = [
        (dict(prompt_ids=[]), "empty"),
        (dict(prompt_ids=[1], max_tokens=240), "1 prompt tokens"),
        (dict(prompt_ids=[1], max_tokens=10**9), "1 prompt tokens [+] max_tokens 1000000000 pass"),
        (dict(prompt_ids=[67]), "token id 67"),
        (dict(prompt_ids=[1], max_tokens=2, stop_ids=list(range(17))), "17 stop_ids"),
    ]
    for request, why in wrong:
        with pytest.raises(ValueError, match=why):
            engine.submit(Request(**request))
    with pytest.raises(ValueError, match="seed -1"):
        Request(prompt_ids=[1], seed=-1)
    with pytest.raises(ValueError, match="timeout 0"):
        Request(prompt_ids=[1], timeout=0.0)
    other: Any = {"prompt_ids": [1]}
    with pytest.raises(ValueError, match=r"{'prompt_ids': .* must be a Request"):
        engine.submit(other)
    with pytest.raises(ValueError, match="no new parameters"):
        engine.update_weights()
    with monkeypatch.context() as forked:
        forked.setattr(engine._work, "_thread", threading.Thread())
        for act in (lambda: engine.submit(Request(prompt_ids=[1], max_tokens=2)), engine.sleep):
            with pytest.raises(RuntimeError, match="of the process that was forked"):
                act()
    handles = []
    with pytest.raises(Full, match="3 requests wait"):
        for _ in range(9):
            handles.append(engine.submit(Request(prompt_ids=[1], max_tokens=200)))
    for handle in handles:
        handle.cancel()
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}


def test_who_has_a_place_takes_none_of_the_queue(engine):
    """Of requests that come faster than the engine looks, as samples of a prompt do."""
    request = Request(prompt_ids=[1], max_tokens=2)
    with engine._work.changed:  # its thread has no turn
        handles = [engine.submit(request) for _ in range(2 + 3)]
        assert engine.room == 0 and engine.stats().waiting == 5
        with pytest.raises(Full, match="3 requests wait"):
            engine.submit(request)
    assert {handle.result().finish_reason for handle in handles} == {"length"}
    assert engine.room == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch", 2.5), ("max_batch", None), ("max_context", "64"), ("max_queue", None),
        ("pages", 0.5), ("kinds", ()), ("kinds", ("fast",)), ("kinds", "fast"),
        ("kinds", None), ("kinds", 2), ("kinds", [["greedy"]]),
        ("max_stop_ids", -1), ("max_stop_ids", "16"), ("states", "4"), ("slots_at_once", 2),
    ],
)  # fmt: skip
def test_sizes_and_kinds_that_cannot_be_are_refused_by_name(pair, name, value):
    """Before anything compiles: some would fail with the first request."""
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"^{name} "):
        Engine(pair, **wrong)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("max_batch", "max_batch {} with "), ("pages", "max_batch 1 with {} pages"),
        ("max_stop_ids", "fewer pages, states or max_stop_ids"),
        ("prefill_chunk", "prefill_chunk {}: a prompt has no more tokens"),
        ("prompts_at_once", "prompts_at_once {}: there are 1 slots"),
    ],
)  # fmt: skip
def test_sizes_that_no_device_holds_are_refused(pair, monkeypatch, name, why):
    monkeypatch.setattr(engine_module, "device_memory", lambda: 10**9)
    sizes: dict[str, Any] = {"max_batch": 1, "max_context": 64} | {name: 10**11}
    with pytest.raises(ValueError, match=why.format(10**11)):
        Engine(pair, **sizes)


@pytest.mark.parametrize("name", ["a/model", None])
def test_what_is_no_pair_is_refused(name: Any):
    """Such as a checkpoint's name, with which engines of others begin."""
    with pytest.raises(ValueError, match=r"^pair .* must be a Pair: jflash\.load_pair"):
        Engine(name)


@pytest.mark.parametrize("decode", [Engine, lambda pair: generate(pair, [[1]])])
def test_parameters_of_another_dtype_are_refused(pair, decode):
    """As a training may give them: an engine computed with them, in whatever came of it."""
    trained = jax.tree.map(lambda x: x.astype("bfloat16"), pair.params.target)
    for params, why in (
        (pair.params._replace(target=trained), "target's parameters are bfloat16, its .* float32"),
        (pair.params._replace(drafter=None), "drafter's parameters are missing"),
        ((trained, None), "must have Models and Params"),
    ):
        with pytest.raises(ValueError, match=why):
            decode(replace(pair, params=params))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sampling": Sampling(temperature=0.5)}, "temperature 0.5"),
        ({"logprobs": True, "repetition_penalty": 1.0}, "logprobs True"),
        ({"logit_bias": {3: 1.0}}, "logit_bias {3: 1.0}"),
        ({"min_tokens": 2, "repetition_penalty": 1.5}, "min_tokens 2"),
        ({"repetition_penalty": 1.5}, "repetition_penalty 1.5"),
        ({"presence_penalty": -0.5}, "presence_penalty -0.5"),
    ],
)
def test_what_an_engine_of_greedy_requests_lacks_is_named(engine, changed, named):
    """Greedy requests, too, may need more than the argmax of the unchanged logits."""
    layout = engine._layout._replace(kinds=("greedy",))
    request = Request(prompt_ids=[1], max_tokens=4, **changed)
    with pytest.raises(ValueError, match=f"^{re.escape(named)}: the engine was made for requests"):
        limits.check(request, engine.pair.models, layout, engine.max_context)


def test_generate_waits_for_room_and_cancels_all_after_an_error(pair, engine):
    """The engine has two slots, and room for three requests that wait."""
    requests = [Request(prompt_ids=[1, 2 + i % 9], max_tokens=3 + i % 4) for i in range(12)]
    got = [result.token_ids for result in engine.generate(iter(requests))]
    assert got == [by_itself(pair, request).token_ids for request in requests]
    before = engine.stats().ended.get("cancelled", 0)
    long = Request(prompt_ids=[1, 2], max_tokens=200)
    with pytest.raises(ValueError, match="token id 67"):
        engine.generate([long, long, long, Request(prompt_ids=[67])])
    engine.generate([requests[0]])  # begins once a slot is free again
    assert engine.stats().ended["cancelled"] > before
    engine.sleep()  # until no text runs
    engine.wake()
    assert engine.stats().ended["cancelled"] == before + 3


def test_generate_that_waits_for_room_hears_of_the_end(pair):
    engine = Engine(pair, max_batch=1, max_context=240, max_queue=1, prefill_chunk=64)
    engine.sleep()
    failed = Future[BaseException]()

    def run() -> None:
        try:
            engine.generate([Request(prompt_ids=[1], max_tokens=2)] * 3)
        except RuntimeError as error:
            failed.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    while not engine.stats().waiting:
        time.sleep(0.01)
    engine.close()
    assert "closed" in str(failed.result(20))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", "\ud800"), ("cache_salt", None), ("cache_salt", b"x"),
        ("top_logprobs", 2.5), ("prompt_logprobs", 2.5), ("index", None), ("index", -1),
        ("timeout", math.inf), ("timeout", math.nan), ("timeout", "1"), ("prompt_ids", [1.5]),
        ("prompt_ids", 5), ("prompt_ids", "ab"), ("prompt_ids", {3, 1}), ("prompt_ids", {3: 1}),
        ("prompt_ids", b"ab"), ("stop_ids", [None]), ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {1: "x"}), ("logit_bias", [1]), ("priority", "x"), ("priority", 0.5),
        ("seed", 1.5), ("seed", True), ("max_tokens", None), ("max_tokens", 0), ("min_tokens", 0.5),
        ("frequency_penalty", "x"), ("repetition_penalty", None), ("sampling", None),
        ("speculate", "no"), ("logprobs", 3), ("grammar", "a"), ("draft_rule", 1),
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_refused_by_its_name(field, value):
    """Most of these would fail in the engine's thread, and end it for all."""
    fields: dict[str, Any] = {"prompt_ids": [1], "logprobs": True, field: value}
    with pytest.raises(ValueError, match=f"^{field} "):
        Request(**fields)


def test_numbers_of_numpy_become_pythons_own():
    fields: dict[str, Any] = dict(
        prompt_ids=np.arange(3), stop_ids=np.array([7]), max_tokens=np.int32(4), seed=np.uint32(9),
        timeout=np.float32(0.5), logit_bias={np.int64(2): np.float32(1.5)},
    )  # fmt: skip
    request = Request(**fields)
    assert request == Request(
        prompt_ids=[0, 1, 2], stop_ids=[7], max_tokens=4, seed=9, timeout=0.5, logit_bias={2: 1.5}
    )
    assert {type(token) for token in (*request.prompt_ids, request.seed)} == {int}
    drawn: dict[str, Any] = dict(temperature=np.float64(0.5), top_k=np.int64(5))
    assert repr(Sampling(**drawn)) == repr(Sampling(temperature=0.5, top_k=5))


def test_new_weights_are_a_new_engine(pair):
    """Tokens, logprobs and acceptance lengths, though the prompt was there before."""
    other = one_arithmetic(random_pair(seed=5, drafter_seed=6)).params
    how: dict[str, Any] = dict(max_batch=2, max_context=240, max_queue=3, prefill_chunk=64)
    request = Request(prompt_ids=prompts(1, low=140, high=141)[0], max_tokens=40, logprobs=True)
    with Engine(pair, **how) as engine:
        before = engine.generate([request])[0]
        running = engine.submit(request)
        next(iter(running))
        given = jax.tree.map(np.array, other.target)
        assert engine.update_weights(target=given, drafter=other.drafter) == 1
        for array in jax.tree.leaves(given):
            array[:] = 0  # its owner may write on
        assert running.result().token_ids == before.token_ids  # of one version
        got = engine.generate([request])[0]
        engine.sleep()
        waits = engine.submit(request)
        engine.wake()
        assert waits.result() == got
        engine.sleep()
        lost = engine.submit(request)
        with pytest.raises(ValueError, match=r"of the drafter: .* is missing"):
            engine.update_weights(drafter=other.target)
    assert lost.result().finish_reason == "cancelled"
    with Engine(replace(pair, params=other), **how) as fresh:
        want = fresh.generate([request])[0]
    assert (before.version, got.version, lost.result().version) == (0, 1, 1)
    assert replace(got, version=0) == want and got.token_ids != before.token_ids


def test_asleep_requests_still_time_out_and_a_failed_wake_is_heard_of(pair, monkeypatch):
    """Without either, the caller would wait for ever: so a thread of its own waits."""

    def within_seconds[T](do: Callable[[], T]) -> T:
        found = Future[T]()

        def run() -> None:
            try:
                found.set_result(do())
            except Exception as error:
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return found.result(20)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory is left")

    engine = Engine(pair, max_batch=2, max_context=240, max_queue=3, prefill_chunk=64)
    request = Request(prompt_ids=[1, 2], max_tokens=3)
    engine.sleep()
    waits = engine.submit(replace(request, timeout=0.05))
    assert within_seconds(waits.result).finish_reason == "timeout"
    stays = engine.submit(request)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory is left"):
        patch.setattr(device, "empty_state", fails)
        within_seconds(engine.wake)
    engine.wake()
    assert within_seconds(stays.result).finish_reason == "length"
    engine.close()
