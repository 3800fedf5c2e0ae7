"""What one caller does fails no other's request, and what comes while an engine ends is ended."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jflash import checks
from jflash.generate import generate
from jflash.records.decoding import Decoding
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Failed, Request
from jflash.serving.thread.loop import Loop
from tests.support.pairs import random_pair

PATIENCE = 60


@pytest.fixture(scope="module")
def pair():
    return random_pair()


@pytest.fixture
def engine(pair):
    with Engine(pair, max_batch=1, max_context=160) as engine:
        yield engine


def asked(new: int = 20, **fields: Any) -> Request:
    return Request(prompt_ids=[1, 2, 3], max_tokens=new, **fields)


def test_a_callback_that_fails_is_logged_and_fails_nobody(engine, caplog):
    def fails() -> None:
        raise ZeroDivisionError("the caller's")

    one = engine.submit(asked(60))
    one.at_end(fails)
    other = engine.submit(asked())
    assert len(one.result().token_ids) == 60 and len(other.result().token_ids) == 20
    assert len(engine.submit(asked()).result().token_ids) == 20
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        ZeroDivisionError
    ]
    one.at_end(fails)  # it has ended
    assert len(caplog.records) == 2


def test_what_the_engines_thread_calls_may_not_wait_for_it(pair):
    """New weights at the end of a rollout waited for themselves, and all others for them."""
    engine = Engine(pair, max_batch=1, max_context=160)  # whose end would wait for ever, too
    waits = [
        engine.sleep, engine.wait_for_room, lambda: engine.update_weights(target=pair.params.target)
    ]  # fmt: skip
    for wait in (*waits, engine.close):
        came = Future[None]()

        def at_end(wait=wait, came=came) -> None:
            try:
                came.set_result(wait())
            except RuntimeError as error:
                came.set_exception(error)

        handle = engine.submit(asked())
        handle.at_end(at_end)
        if wait == engine.close:
            assert came.result(PATIENCE) is None
        else:
            with pytest.raises(RuntimeError, match="cannot wait for itself"):
                came.result(PATIENCE)
        assert len(handle.result().token_ids) == 20
    engine._work._thread.join(PATIENCE)
    assert not engine._work.alive


def test_events_given_to_what_fails_always_leave_no_other_reader_waiting(pair):
    """The engine fails, and whoever waits hears of it, the reader of those events too."""

    def fails(_: Any) -> None:
        raise ZeroDivisionError("the caller's")

    failures = list[BaseException]()

    def read(handle: Handle) -> None:
        try:
            handle.result()
        except Failed as error:
            failures.append(error)

    with Engine(pair, max_batch=3, max_context=160) as engine:
        handles = [engine.submit(asked(100)) for _ in range(5)]
        handles[1].forward(fails)
        readers = [threading.Thread(target=read, args=(each,), daemon=True) for each in handles]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(PATIENCE)
    assert len(failures) == 5
    assert {type(failure.__cause__) for failure in failures} == {ZeroDivisionError}


def test_what_came_with_events_that_cannot_be_given_is_read(pair):
    """Two texts end in one call: the failure of one's reader does not take the other's end."""
    ended = list[str | None]()

    def fails_at_end(events: list[Event] | BaseException) -> None:
        if isinstance(events, list) and events[-1].finish_reason:
            raise ZeroDivisionError("the caller's")

    def read(handle: Handle) -> None:
        ended.append(handle.result().finish_reason)

    with Engine(pair, max_batch=2, max_context=160) as engine:
        bad, good = engine.submit(asked(2)), engine.submit(asked(2))
        bad.forward(fails_at_end)
        readers = [threading.Thread(target=read, args=(h,), daemon=True) for h in (bad, good)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(10)
        assert ended == ["length", "length"]
        with pytest.raises(Failed):
            engine.submit(asked()).result()


def test_a_submitted_requests_bias_does_not_change(engine):
    want = engine.generate([asked(logit_bias={5: 1.0})])[0].token_ids
    before, request = engine.submit(asked(100)), asked(logit_bias={5: 1.0})
    waits = engine.submit(request)
    bias: Any = request.logit_bias
    bias.update({i: 1.0 for i in range(3000)})
    assert waits.result().token_ids == want
    assert len(before.result().token_ids) == 100


def test_what_waits_asleep_ends_when_the_engine_is_closed_meanwhile(pair, monkeypatch):
    """Between the engine's look at what came and its look at whether it should end."""
    idle, engine = Loop.idle, Engine(pair, max_batch=1, max_context=160)
    work, told = engine._work, list[bool]()

    def closing(loop: Loop) -> bool:
        found = idle.fget(loop)  # type: ignore[misc]
        owned = work.changed._is_owned()  # type: ignore[attr-defined]
        if found and loop.waiting and not owned and not told:
            told.append(True)
            ending = threading.Thread(target=work.tell_to_end)
            ending.start()
            ending.join()
        return found

    engine.sleep()
    monkeypatch.setattr(Loop, "idle", property(closing))
    handle, ended = engine.submit(asked()), threading.Event()
    handle.at_end(ended.set)
    assert ended.wait(PATIENCE) and told
    assert handle.result().finish_reason == "cancelled"
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        _ = engine.room


def test_no_one_asks_whether_a_text_ends_that_has(pair):
    """Another one goes on beside it."""
    seen = list[int]()

    def stop_when(ids: list[int]) -> int | None:
        seen.append(len(ids))
        return len(ids) if len(seen) > 2 else None

    options: Any = {"max_new_tokens": 2, "stop_when": stop_when}
    both = [Decoding(**options), Decoding(max_new_tokens=60)]
    short, long = generate(pair, [[5, 6], [7, 8]], both)
    assert seen == [2] and short.finish_reason == "length" and len(short.token_ids) == 2
    assert len(long.token_ids) == 60


def test_an_empty_array_has_no_prompts(pair):
    none: Any = np.zeros((0, 2), int)
    with pytest.raises(ValueError, match="no prompts given"):
        generate(pair, none)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
     ({"capacity": 1e9}, "capacity 1000000000.0 must be a whole number"),
     ({"sampling": 0.5}, r"sampling 0\.5 must be of the type Sampling"),
     ({"sampling": None}, "sampling None must be of the type Sampling"),
     ({"decoding": {"seed": 1}}, "decoding 'seed' must be of the type Decoding"),
     ({"decoding": 3}, "decoding 3 must be a list with one for each text"),
     ({"decoding": None}, "decoding None must be a list with one for each text"),
     ({"stop_when": 3}, "stop_when 3 must be a function"),
     ({"first_index": None}, "first_index None must be a whole number"),
     ({"first_index": "1"}, "first_index '1' must be a whole number"),
     ({"stop_when": lambda ids: "x"}, "stop_when returned x: None, or a number"),
     ({"stop_when": lambda ids: True}, "stop_when returned True: None, or a number")],
)  # fmt: skip
def test_options_of_another_type_are_refused_by_name(pair, options, why):
    with pytest.raises(ValueError, match=why):
        generate(pair, [[5, 6]], **options)


@pytest.mark.parametrize(
    ("prompts", "why"),
    [(({5} for _ in range(1)), "prompts <generator .* must be a list with one for each text"),
     ([{5, 6}], "the prompt {5, 6} is no list of token ids"),
     ([{5: 6}], "the prompt {5: 6} is no list of token ids"),
     ([b"ab"], "the prompt b'ab' is no list of token ids")],
)  # fmt: skip
def test_what_is_no_list_of_prompts_is_refused(pair, prompts: Any, why):
    with pytest.raises(ValueError, match=why):
        generate(pair, prompts)


def test_sizes_may_be_numpys(pair):
    plain: Any = {"max_new_tokens": 130, "prefill_chunk": 64, "capacity": 512}
    numpys: Any = {name: np.int64(size) for name, size in plain.items()}
    [want], [got] = (generate(pair, [[5, 6]], **options) for options in (plain, numpys))
    assert got.token_ids == want.token_ids and len(want.token_ids) == 130
    del numpys["capacity"], numpys["prefill_chunk"]
    assert generate(pair, [[5, 6]], **numpys)[0].token_ids == want.token_ids


@pytest.mark.parametrize(
    ("name", "why"),
    [("capacity", "1 sequences of a capacity of 100000000000 tokens take"),
     ("prefill_chunk", "prefill_chunk 100000000000: a prompt has no more tokens")],
)  # fmt: skip
def test_sizes_that_no_device_holds_are_refused(pair, monkeypatch, name, why):
    monkeypatch.setattr(checks, "device_memory", lambda: 10**9)
    options: Any = {name: 10**11}
    with pytest.raises(ValueError, match=why):
        generate(pair, [[5, 6]], **options)
