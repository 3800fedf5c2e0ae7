"""Requests that are passed on: a lost replica costs no client that has not begun to read."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jflash.server import relay
from jflash.server.relay import TAKEN, Asked, Busy, Lost, Relayed, messages

TEXT, RESPONSES = "/v1/completions", "/v1/responses"


def asked(path: str = TEXT) -> Asked:
    return Asked("POST", path, b"", [], None, b'{"prompt": "ab"}', "ab")


def head(status: int = 200) -> dict:
    return {"type": "http.response.start", "status": status, "headers": []}


def piece(body: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


FAILED = [head(503), piece(b'{"error": {"code": "engine_failed", "message": "gone"}}', False)]
WHOLE = [head(), piece(b"one"), piece(b"two", False)]


@pytest.fixture
def passed_on(monkeypatch):
    """What a client gets of replicas that give these messages and errors, one after another."""
    monkeypatch.setattr(relay, "PAUSE", 0.0)

    def run(*replicas: list, path: str = TEXT) -> tuple[int, bytes, int]:
        left, sent = list(replicas), []

        async def call(request: Asked):
            assert request == asked(path)
            for message in left.pop(0):
                if isinstance(message, Exception):
                    raise message
                yield message

        async def send(message) -> None:
            sent.append(message)

        async def receive():
            raise AssertionError("the body was read before")

        answer = Relayed(call, asked(path), set(), 60.0)
        asyncio.run(answer({"type": "http"}, receive, send))
        assert [m["type"] for m in sent].count("http.response.start") == 1
        assert not sent[-1].get("more_body", False)
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]), len(left)

    return run


@pytest.mark.parametrize(
    "first", [[Lost("dead")], [head(), Lost("dead")], FAILED], ids=["silent", "head", "failing"]
)
def test_a_request_whose_replica_is_lost_goes_to_another(passed_on, first):
    assert passed_on(first, WHOLE) == (200, b"onetwo", 0)


def test_a_stream_that_had_begun_ends_with_an_error_event(passed_on):
    broken = [head(), piece(b"data: {}\n\n"), Lost("dead")]
    for path, before, after in (
        (TEXT, b"", b"data: [DONE]\n\n"),
        (RESPONSES, b"event: error\n", b""),
    ):
        status, body, unused = passed_on(broken, WHOLE, path=path)
        assert (status, unused) == (200, 1)
        event = body.removeprefix(b"data: {}\n\n" + before + b"data: ").removesuffix(after)
        said = json.loads(event)
        error = said["error"]
        assert error["code"] == "replica_lost" and "dead" in error["message"]
        assert path == TEXT or (said["type"], said["sequence_number"]) == ("error", 1)
    assert passed_on([*WHOLE, Lost("later")], WHOLE) == (200, b"onetwo", 1)  # it had all


def test_replicas_that_are_full_or_never_answer_are_errors_of_their_own(passed_on):
    for replicas, code in (
        ([[Busy("full")]], "queue_full"),
        ([[Lost("dead")]] * relay.TRIES, "replica_lost"),
    ):
        status, body, unused = passed_on(*replicas)
        assert (status, json.loads(body)["error"]["code"], unused) == (503, code, 0)


@pytest.mark.parametrize("begun", [[], [head(), piece(b"data: {}\n\n")]], ids=["silent", "begun"])
def test_an_answer_that_the_servers_end_cuts_off_says_so(begun):
    running, sent = set[Relayed](), []

    async def endless(_: Asked):
        for message in begun:
            yield message
        await asyncio.sleep(60)

    async def send(message) -> None:
        sent.append(message)

    async def main() -> None:
        answer = Relayed(endless, asked(), running, 60.0)
        task = asyncio.create_task(answer({"type": "http"}, send, send))
        await asyncio.sleep(0)
        while len(sent) < len(begun):
            await asyncio.sleep(0)
        assert running == {answer}
        answer.end()
        await task
        answer.end()  # as two signals may have it

    asyncio.run(main())
    body = b"".join(message.get("body", b"") for message in sent[1:])
    said = body.removeprefix(b"data: {}\n\ndata: ").removesuffix(b"data: [DONE]\n\n")
    assert json.loads(said)["error"]["code"] == "shutting_down" and not running
    assert sent[0]["status"] == (200 if begun else 503) and not sent[-1].get("more_body")


@pytest.mark.parametrize(
    ("first", "status"),
    [([], 408), ([TAKEN, Lost("dead")], 408), ([TAKEN], 200)],
    ids=["waits", "lost", "runs"],
)
def test_a_request_waits_for_its_turn_as_long_as_the_time_limit(monkeypatch, first, status):
    """How long one runs whose turn has come is the replica's to say."""
    monkeypatch.setattr(relay, "PAUSE", 0.0)
    replicas, sent, cancelled = [first, []], [], []

    async def late(_: Asked):
        for message in replicas.pop(0):
            if isinstance(message, Exception):
                raise message
            yield message
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        for message in WHOLE:
            yield message

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(Relayed(late, asked(), set(), 0.1)({"type": "http"}, send, send))
    assert sent[0]["status"] == status and bool(cancelled) == (status == 408)
    if status == 200:
        assert sent == WHOLE
        return
    assert (b"x-should-retry", b"false") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "timeout"


def test_an_application_answers_a_request_and_sees_its_client_leave():
    ended = []

    async def endless():
        try:
            while True:
                yield b"more"
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse({"prompt": (await request.json())["prompt"]})

    async def stream(_: Request) -> StreamingResponse:
        return StreamingResponse(endless())

    routes = [Route(TEXT, echo, methods=["POST"]), Route(RESPONSES, stream, methods=["POST"])]
    app = Starlette(routes=routes)

    async def main() -> None:
        taken, *got = [message async for message in messages(app, asked())]
        assert taken == TAKEN
        assert got[0]["status"] == 200 and json.loads(got[1]["body"]) == {"prompt": "ab"}
        answer = messages(app, asked(RESPONSES))
        assert await anext(answer) == TAKEN
        assert (await anext(answer))["type"] == "http.response.start"
        assert (await anext(answer))["body"] == b"more"
        assert not ended
        await answer.aclose()
        assert ended

    asyncio.run(main())


def test_equal_beginnings_are_known_by_what_a_template_puts_first():
    def beginning(**body) -> str:
        return relay._beginning(json.dumps(body).encode())

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first, both = beginning(messages=turns[:1], seed=1), beginning(messages=turns, seed=2)
    assert both.startswith(first.rstrip("]}"))
    assert beginning(messages=turns, tools=[{"a": 1}]) != both
    assert beginning(model="x") == ""
    for wrong in (b"no JSON", b"[]", b"[" * 100_000, b'{"prompt": "\xff"}'):
        assert relay._beginning(wrong) == ""
