"""What one caller does fails no other's request, and what comes while an engine ends is ended."""

import threading
from typing import Any

import numpy as np
import pytest

from jflash.decoding import Decoding
from jflash.generate import generate
from jflash.serving.engine import Engine
from jflash.serving.loop import Loop
from jflash.serving.request import Request
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
     ({"capacity": 1e9}, "capacity 1000000000.0 must be a whole number")],
)  # fmt: skip
def test_sizes_are_whole_numbers(pair, options, why):
    with pytest.raises(ValueError, match=why):
        generate(pair, [[5, 6]], **options)
