"""Two replicas of the embedded pair on a local Ray: equal texts, beginnings, a kill, a redeploy."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.ray_marks import MARKS, keep, served

pytestmark = MARKS
CHAT = "/v1/chat/completions"
OPTIONS = {
    "dtype": "float32", "max_batch": 4, "max_context": 512, "replicas": 2,
    "shutdown_timeout": 600,  # a busy machine takes its time to drain
}  # fmt: skip
DIFFERENT, COUNT = 10, 40


@pytest.fixture(scope="module")
def url():
    with served(OPTIONS) as url:
        yield url


def replicas() -> list[int]:
    """The processes of the replicas, by what Ray calls them."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and process.joinpath("cmdline").exists():
            title = process.joinpath("cmdline").read_bytes()
            if b"ServeReplica:jflash:replica" in title:
                found.append(int(process.name))
    return found


def question(number: int) -> str:
    return f"{number + 2} players share {(number + 2) * 7} crayons equally. How many has each?"


class Answer(NamedTuple):
    question: int
    streamed: bool
    text: str | None  # None if it did not come whole
    error: dict[str, Any] | None


async def ask(
    client: httpx.AsyncClient, number: int, streamed: bool, read: set[object] | None = None
) -> Answer:
    """An answer; its stream is in `read` from its first event to its last."""
    message = {"role": "user", "content": question(number)}
    body = {"messages": [message], "max_tokens": 200, "ignore_eos": True, "stream": streamed}
    if not streamed:
        answer = await client.post(CHAT, json=body)
        value = answer.json()
        error = value.get("error")
        text = None if error else value["choices"][0]["message"]["content"]
        return Answer(number, False, text, error)
    text, error, last, me = "", None, "", object()
    read = set() if read is None else read
    async with client.stream("POST", CHAT, json=body) as answer:
        async for line in answer.aiter_lines():
            if line in ("", "data: [DONE]"):
                last = line or last
                continue
            read.add(me)
            value = httpx.Response(200, content=line.removeprefix("data: ")).json()
            error = value.get("error")
            text += "" if error else value["choices"][0]["delta"].get("content") or ""
    assert last == "data: [DONE]"
    read.discard(me)
    return Answer(number, True, None if error else text, error)


async def under_load(url: str, disturb) -> tuple[dict[int, str | None], list[Answer], float]:
    """The texts of the idle replicas; answers of many clients while `disturb` runs; its seconds."""
    limits = httpx.Limits(max_connections=COUNT)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        idle = {n: (await ask(client, n, False)).text for n in range(DIFFERENT)}
        read = set()
        asks = [ask(client, n % DIFFERENT, bool(n % 4), read) for n in range(COUNT)]
        tasks = [asyncio.create_task(one) for one in asks]
        while len(read) <= OPTIONS["max_batch"]:  # more than one replica runs at once
            assert not all(task.done() for task in tasks)
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        await disturb()
        answers = await asyncio.gather(*tasks)
        return idle, answers, time.monotonic() - begin


def test_a_beginning_returns_to_the_replica_that_has_read_it(url):
    """Each long beginning meets its cached pages, which by chance two in four would."""
    hits = 0
    for topic in "abcdefgh":
        told = [{"role": "user", "content": f"{topic * 8} " * 60 + "How many?"}]
        for turn in range(2):
            body = {"messages": told, "max_tokens": 4}
            usage = httpx.post(url + CHAT, json=body, timeout=60).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert bool(cached) <= bool(turn)
            hits += bool(cached)
            told = [*told, {"role": "assistant", "content": "7"}, {"role": "user", "content": "?"}]
    keep("beginnings", conversations=8, met_their_pages=hits)
    assert hits == 8


def test_a_killed_replica_costs_the_streams_that_it_had_begun_alone(url):
    async def kill() -> None:
        os.kill(replicas()[0], signal.SIGKILL)

    idle, answers, seconds = asyncio.run(under_load(url, kill))
    wholes = [a for a in answers if not a.streamed]
    broken = [a for a in answers if a.text is None]
    assert [a.text for a in wholes] == [idle[a.question] for a in wholes]
    assert all(a.text == idle[a.question] for a in answers if a.text is not None)
    assert broken and all(a.streamed for a in broken)
    codes = [a.error and a.error["code"] for a in broken]
    assert codes == ["replica_lost"] * len(broken)
    begin = time.monotonic()
    while len(replicas()) < 2 and time.monotonic() - begin < 120:
        time.sleep(0.5)
    assert len(replicas()) == 2
    keep(
        "killed", requests=len(answers), whole=len(wholes), whole_lost=0,
        streams=len(answers) - len(wholes), streams_ended_by_an_error=len(broken),
        seconds_to_the_last_answer=round(seconds, 1),
    )  # fmt: skip


def test_a_redeployment_under_load_costs_no_request(url):
    from ray import serve

    from jflash.serving.ray import NAME, app

    before = set(replicas())

    async def redeploy() -> None:
        new = app(OPTIONS | {"served-model-name": "renamed"})
        await asyncio.to_thread(serve.run, new, name=NAME)

    idle, answers, seconds = asyncio.run(under_load(url, redeploy))
    assert [a.text for a in answers] == [idle[a.question] for a in answers]
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "renamed"
    assert not before & set(replicas())
    keep("redeployed", requests=len(answers), lost=0, seconds=round(seconds, 1))
