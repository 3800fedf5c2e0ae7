"""Texts over an engine: stop texts, samples of a prompt, and more requests than the queue holds."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jflash.records.decoding import Sampling
from jflash.serving.engine import Engine
from jflash.serving.request import Request
from jflash.serving.texts import TextReader, answers
from tests.support.pairs import one_arithmetic, prompts, random_pair


class Letters:
    """A letter for each token."""

    def decode(self, ids, **_):
        return "".join(chr(ord("A") + token) for token in ids)


LETTERS = Letters()


@pytest.fixture(scope="module")
def engine():
    pair = one_arithmetic(random_pair())
    with Engine(pair, max_batch=2, max_context=240, max_queue=1, prefill_chunk=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests():
    return [Request(prompt_ids=prompt, max_tokens=30) for prompt in prompts(4, seed=4)]


def whole(engine, request: Request) -> str:
    return LETTERS.decode(engine.generate([request])[0].token_ids)


def test_a_text_ends_before_its_stop_text_and_its_tokens_with_it(engine, requests):
    request = replace(requests[0], logprobs=True)
    full, [result] = whole(engine, request), engine.generate([request])
    first = full.index(stop := full[11:14])
    for given in (stop, ["never in it", stop]):
        [answer] = answers(engine, [request], LETTERS, stop=given)
        assert answer.text == full[:first]
        assert (answer.finish_reason, len(answer.token_ids)) == ("stop", first + len(stop))
        assert answer.token_ids == result.token_ids[: first + len(stop)]
        assert answer.logprobs == result.logprobs[: first + len(stop)]
    [answer] = answers(engine, [request], LETTERS, stop="never in it")
    assert (answer.text, answer.finish_reason) == (full, "length")
    assert answer.acceptance_lengths == result.acceptance_lengths


def test_a_stop_id_has_no_text(engine, requests):
    full, [result] = whole(engine, requests[1]), engine.generate(requests[1:2])
    last = result.token_ids[9]
    [answer] = answers(engine, [replace(requests[1], stop_ids=[last])], LETTERS)
    assert answer.text == full[: result.token_ids.index(last)]
    assert answer.token_ids[-1] == last and answer.finish_reason == "stop"


def test_a_stop_that_is_a_special_token_ends_a_text(engine, requests):
    """As its id among the request's would, and not before the least tokens."""
    [result] = engine.generate(requests[1:2])
    last = result.token_ids[9]
    mark = SimpleNamespace(special=True, content="<end>")
    marked = type("Marked", (Letters,), {"added_tokens_decoder": {last: mark}})()
    for least in (0, result.token_ids.index(last) + 1):
        request = replace(requests[1], min_tokens=least)
        tokens = engine.generate([request])[0].token_ids
        count = tokens.index(last, least) + 1 if last in tokens[least:] else len(tokens)
        stopped = last in tokens[least:]
        [answer] = answers(engine, [request], marked, stop=["never in it", "<end>"])
        assert answer.token_ids == tokens[:count]
        assert answer.text == LETTERS.decode(tokens[: count - stopped])
        assert answer.finish_reason == ("stop" if stopped else "length")
        *_, step = TextReader(engine.submit(request), marked, stop="<end>")
        assert step.event.finish_reason == answer.finish_reason
    [given] = answers(engine, [replace(requests[1], stop_ids=[last])], LETTERS)
    assert given == answers(engine, requests[1:2], marked, stop="<end>")[0]


def test_samples_are_the_indices_of_a_seed_in_order(engine, requests):
    drawn = Sampling(temperature=1.0)
    asked = [replace(each, sampling=drawn, seed=7, index=5, max_tokens=12) for each in requests]
    found = answers(engine, asked, LETTERS, n=3)
    want = engine.generate(replace(each, index=5 + i) for each in asked for i in range(3))
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    assert [each.text for each in found] == [LETTERS.decode(each.token_ids) for each in want]
    assert len({each.text for each in found[:3]}) > 1


def test_a_reader_in_a_thread_and_one_in_a_loop(engine, requests):
    full = whole(engine, requests[2])
    stop = full[20:22]
    steps = list(TextReader(engine.submit(requests[2]), LETTERS, stop))

    async def read():
        return [step async for step in TextReader(engine.submit(requests[2]), LETTERS, stop)]

    for found in (steps, asyncio.run(read())):
        assert "".join(step.text for step in found) == full[: full.index(stop)]
        reasons = [step.event.finish_reason for step in found]
        assert reasons == [None] * (len(found) - 1) + ["stop"]
    assert len(steps) > 3


def test_what_is_wrong_is_refused_and_cancels_the_others(engine, requests):
    with pytest.raises(ValueError, match="n 0 must be at least 1"):
        answers(engine, requests, LETTERS, n=0)
    several: Any = 2.0
    with pytest.raises(ValueError, match=r"n 2\.0 must be a whole number"):
        answers(engine, requests, LETTERS, n=several)
    wrong: list[Any] = [None, 7]
    for stop in wrong:
        with pytest.raises(ValueError, match=f"stop {stop} must be a text, or several"):
            answers(engine, requests, LETTERS, stop=stop)
    for stop in ("", ["a", ""]):
        with pytest.raises(ValueError, match="stop '' must be a text of at least one character"):
            answers(engine, requests, LETTERS, stop=stop)
    long, handles = replace(requests[0], max_tokens=150), []

    class Noted:
        def submit(self, request: Request):
            handles.append(engine.submit(request))
            return handles[-1]

    with pytest.raises(ValueError, match="1000000"):
        answers(Noted(), [long, replace(long, prompt_ids=[10**6])], LETTERS)
    assert [each.result().finish_reason for each in handles] == ["cancelled"]


def test_one_request_in_place_of_several_is_refused_in_one_line(engine, requests):
    ways = (engine.generate, lambda given: answers(engine, given, LETTERS))
    for way in ways:
        with pytest.raises(ValueError, match=r"must be a list of requests: put it into \[ \]"):
            way(requests[0])
        with pytest.raises(ValueError, match="7 must be a list of requests"):
            way(7)
        with pytest.raises(ValueError, match="None must be a Request"):
            way([None])
