"""An engine at the other end of a pipe: events, refusals, those who leave, and an end that goes."""

import asyncio
import gc
import threading
from multiprocessing import Pipe
from typing import Any

import pytest

from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars
from jflash.serving.handle import Handle
from jflash.serving.pipe import answering
from jflash.serving.pipe.answering import answer
from jflash.serving.pipe.remote import News, Remote, Sizes, hang_up
from jflash.serving.request import Event, Failed, FinishReason, Full, Request
from tests.support.letters import END, letters_tokenizer
from tests.support.pairs import one_arithmetic, random_pair

SIZE = 128


class Ends:
    """Both ends of a pipe in this process, over a small engine."""

    def __init__(self) -> None:
        pair = one_arithmetic(random_pair())
        self.vocabulary = pair.models.target.config.vocab_size
        self.engine = Engine(pair, max_batch=2, max_context=160, max_queue=3, kinds=("drawn",))
        self.grammars = Grammars(letters_tokenizer(), self.vocabulary, [END])
        self.compiled = 0
        self.pipe, far = Pipe()
        news = News([], [], self.engine.stats(), 0)
        self.remote = Remote(self.pipe, Sizes(160, self.vocabulary), news)
        self.thread = threading.Thread(
            target=answer, args=(self.engine, self.grammars, far, lambda: self.compiled)
        )
        self.thread.start()
        self.far = far

    def close(self) -> None:
        self.remote.close()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.engine.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


def of(ends: Ends, work: Any) -> Any:
    async def read() -> Any:
        async with ends.remote:
            return await asyncio.wait_for(work, 60)

    return asyncio.run(read())


async def events(remote: Remote, request: Request) -> list[Any]:
    return [event async for event in await remote.submit(request)]


def test_events_are_those_of_the_engine(ends):
    """Several at once, drawn and greedy, with logprobs and with a grammar."""
    grammar = ends.grammars.compile("regex", "[a-c]{3,5}")
    requests = [
        Request(prompt_ids=[1, 2, 3], max_tokens=20),
        Request(prompt_ids=[4, 5], max_tokens=9, logprobs=True, top_logprobs=2),
        Request(prompt_ids=[6], max_tokens=8, stop_ids=[END], grammar=grammar),
    ]
    want = [list(ends.engine.submit(request)) for request in requests]

    async def all_of_them() -> list[list[Any]]:
        return await asyncio.gather(*(events(ends.remote, request) for request in requests))

    found = of(ends, all_of_them())
    for got, wanted, request in zip(found, want, requests, strict=True):
        ids = [token for event in got for token in event.token_ids]
        assert ids == [token for event in wanted for token in event.token_ids]
        assert got[-1].finish_reason == wanted[-1].finish_reason
        assert [e.logprobs for e in got] == [e.logprobs for e in wanted], request


def test_refusals_come_before_an_event(ends):
    async def asked() -> None:
        with pytest.raises(ValueError, match="logit_bias of token 999999"):
            await ends.remote.submit(
                Request(prompt_ids=[1], max_tokens=9, logit_bias={999999: 1.0})
            )
        many = [ends.remote.submit(Request(prompt_ids=[1], max_tokens=150)) for _ in range(8)]
        found = await asyncio.gather(*many, return_exceptions=True)
        refused = [one for one in found if isinstance(one, Full)]
        assert refused and str(refused[0]) == "3 requests wait"
        for handle in found:
            if not isinstance(handle, BaseException):
                handle.cancel()
                assert [event async for event in handle][-1].finish_reason == "cancelled"

    of(ends, asked())
    assert ends.remote.stats().running == 0


def test_no_event_waits_for_the_clock(ends, monkeypatch):
    """What a round gives is sent, whether or not another round follows."""
    monkeypatch.setattr(answering, "IDLE", 3600.0)

    async def asked() -> None:
        assert await events(ends.remote, Request(prompt_ids=[1], max_tokens=4))
        assert await events(ends.remote, Request(prompt_ids=[1], max_tokens=1))
        handle = await ends.remote.submit(Request(prompt_ids=[2], max_tokens=150))
        handle.cancel()
        assert [event async for event in handle][-1].finish_reason == "cancelled"
        waits = await ends.remote.submit(Request(prompt_ids=[2], max_tokens=150, timeout=1e-3))
        assert [event async for event in waits][-1].finish_reason in ("timeout", "length")

    of(ends, asked())


def test_events_of_a_round_come_together(ends, monkeypatch):
    """The steps of a call are one list, and all texts' lists one message."""
    came, take = list[Any](), Remote._take

    def noted(remote: Remote, news: News) -> None:
        came.append(news.came)
        take(remote, news)

    monkeypatch.setattr(Remote, "_take", noted)

    async def asked() -> None:
        requests = [Request(prompt_ids=[i], max_tokens=40, speculate=False) for i in (1, 2)]
        found = await asyncio.gather(*(events(ends.remote, each) for each in requests))
        assert [len(one) for one in found] == [40, 40], "a step a token"

    of(ends, asked())
    calls = [news for news in came if any(len(lists) > 1 for _, lists in news)]
    assert any(len(news) == 2 for news in calls), "both texts were in some call"


def test_ends_and_beginnings_go_first_and_others_have_turns_between(ends):
    """Whoever has an answer may ask again, and a first token is waited for: neither is kept waiting
    by all others' events."""
    near, far = Pipe()
    stats, count, order, turns = ends.engine.stats(), 24, list[int](), set[int]()
    remote = Remote(near, Sizes(160, ends.vocabulary), News([], [], stats, 0))

    def of_one(reason: FinishReason | None = None) -> list[tuple[Any, ...]]:
        return [tuple(Event((1,), finish_reason=reason))]

    async def read(number: int, handle: Handle) -> None:
        async for _ in handle:
            order.append(number)

    async def main() -> None:
        async with remote:
            asked = [remote.submit(Request(prompt_ids=[1], max_tokens=9)) for _ in range(count)]
            tasks = [asyncio.create_task(one) for one in asked]
            await asyncio.sleep(0)
            assert [far.recv().number for _ in tasks] == [*range(count)]
            far.send(News([(i, None) for i in range(count)], [], stats, 0))
            readers = [asyncio.create_task(read(i, await t)) for i, t in enumerate(tasks)]
            begun = [*range(count - 1)]
            far.send(News([], [(i, of_one()) for i in begun], stats, 0))
            while len(order) < count - 1:
                await asyncio.sleep(0)
            order.clear()
            reasons: list[FinishReason | None] = [*[None] * (count - 2), "length"]
            came = [(i, of_one(reason)) for i, reason in zip(begun, reasons, strict=True)]
            far.send(News([], [*came, (count - 1, of_one()), (0, Failed("over"))], stats, 0))
            while not readers[0].done():
                turns.add(len(order))
                await asyncio.sleep(0)
            with pytest.raises(Failed, match="over"):
                await readers[0]
            while len(order) < count:
                turns.add(len(order))
                await asyncio.sleep(0)
            for reader in readers:
                reader.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert order == [count - 2, count - 1, *range(count - 2)]
    assert len(turns) > count / 2


def test_news_tell_of_compilations(ends):
    seen = []
    ends.remote.on_compiled = seen.append
    ends.compiled = 3
    of(ends, events(ends.remote, Request(prompt_ids=[1], max_tokens=4)))
    assert seen == [3]


@pytest.fixture
def nothing_frozen() -> None:
    """As where a process begins to serve: each test begins with what was there frozen."""
    gc.unfreeze()


def test_what_was_there_before_is_not_collected_while_requests_are_served(nothing_frozen, ends):
    """After that it is again."""
    of(ends, events(ends.remote, Request(prompt_ids=[1], max_tokens=4)))
    assert gc.get_freeze_count() > 100_000
    ends.remote.close()
    ends.thread.join(30)
    assert gc.get_freeze_count() < 100_000


def test_a_failed_engine_fails_its_readers(ends, monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    async def asked() -> None:
        handle = await ends.remote.submit(Request(prompt_ids=[1], max_tokens=150))
        monkeypatch.setattr(ends.engine._loop, "round", broken)
        with pytest.raises(Failed, match="the engine has failed: the device is lost"):
            async for _ in handle:
                pass
        with pytest.raises(Failed, match="the engine has failed"):
            await ends.remote.submit(Request(prompt_ids=[1], max_tokens=9))

    of(ends, asked())


def test_a_lost_process_fails_its_readers(ends):
    lost = list[str]()
    ends.remote.on_lost = lost.append

    async def asked() -> None:
        handle = await ends.remote.submit(Request(prompt_ids=[1], max_tokens=150))
        hang_up(ends.far)
        with pytest.raises(Failed, match="the engine's process has ended"):
            async for _ in handle:
                pass
        with pytest.raises(Failed, match="the engine's process has ended"):
            await ends.remote.submit(Request(prompt_ids=[1], max_tokens=9))

    of(ends, asked())
    assert lost == ["the engine's process has ended"]
