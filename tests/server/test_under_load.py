"""Many clients at once, those that go, those that read slowly, those that send garbage, the end."""

import asyncio
import json
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jflash.proof.soak import Soak, load
from tests.server.conftest import OPTIONS, started

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NAMES = ["Ana", "Theo", "Emma", "Omar"]
THINGS = ["ribbons", "crayons", "stamps", "shells"]
PATIENCE = 60.0
COMPILED_FULLY = True  # the server runs longer than it compiles


def bodies(count: int) -> list[dict]:
    """Questions of several lengths, some drawn with a seed, some without drafts."""
    draw = random.Random(1)
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"{draw.choice(NAMES)} has {draw.randint(2, 99)} "
                    f"{draw.choice(THINGS)} and finds {draw.randint(2, 99)} more. "
                    * draw.randint(1, 4) + "How many are there?",
                }
            ],
            "max_tokens": draw.choice([5, 15, 30]),
            "temperature": 0 if i % 4 else 1,
            "seed": i,
            "speculation": i % 5 > 0,
            "guided_regex": "[A-Z][a-z]{2,9}( [0-9]{2}){3}" if i % 3 == 1 else None,
        }
        for i in range(count)
    ]  # fmt: skip


async def streamed(client: httpx.AsyncClient, body: dict) -> str:
    """The text of one answer from its chunks."""
    text = []
    async with client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text.append(choice["delta"].get("content", ""))
    assert line_of_end(line)
    return "".join(text)


def line_of_end(line: str) -> bool:
    return line in ("", "data: [DONE]")


def idle(server, seconds: float = PATIENCE) -> None:
    """Waits until no request waits or runs: every slot has come free."""
    end = time.monotonic() + seconds
    while server.metric("num_requests_running") + server.metric("num_requests_waiting"):
        assert time.monotonic() < end, "a slot is stuck"
        time.sleep(0.1)


def test_sixteen_streams_at_once_have_the_texts_they_have_alone(server):
    """Among clients that go in every phase: those that wait, those that run, those that read."""
    asked = bodies(16)

    async def alone() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            return [await streamed(client, body) for body in asked]

    async def goes(client: httpx.AsyncClient, seconds: float, form: str | None) -> None:
        long = {**asked[0], "max_tokens": 400, "stream": seconds > 0.2, "guided_regex": form}
        task = asyncio.create_task(client.post(CHAT, json=long))
        await asyncio.sleep(seconds)
        task.cancel()

    async def together() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE, limits=limits
        ) as client:
            texts = [streamed(client, body) for body in asked]
            leaving = [goes(client, 0.05 * i, (None, "[a-z]{300}")[i % 2]) for i in range(16)]
            return (await asyncio.gather(*texts, *leaving))[:16]

    want = asyncio.run(alone())
    assert len(set(want)) > 8
    assert asyncio.run(together()) == want
    idle(server)
    assert server.metric("request_success_total", finished_reason="abort") > 0


def test_a_full_queue_refuses_with_a_time_to_wait(server):
    """Of 6 clients with 8 requests each: 4 run, and 40 wait."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 8}

    async def refused() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            asked = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(6)]
            try:
                for answer in asyncio.as_completed(asked):
                    got = await answer
                    if got.status_code != 200:
                        return got
            finally:
                for task in asked:
                    task.cancel()
        raise AssertionError("all were served")

    answer = asyncio.run(refused())
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue_full"
    idle(server)
    assert httpx.post(server.url + TEXT, json=body | {"max_tokens": 1}).status_code == 200


def in_queues(one: int, other: int) -> int:
    """Bytes that the system keeps of connections between these two ports, sent and not yet read."""
    kept = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, _, queues = line.split()[1:5]
        if {int(end.split(":")[1], 16) for end in (local, remote)} == {one, other}:
            kept += sum(int(queue, 16) for queue in queues.split(":"))
    return kept


def test_a_client_that_reads_nothing_holds_no_slot(server):
    """Its answer is served, and longer than what the system and the server's transport (64 KiB)
    keep of it. Its segments are short, so that the system keeps little."""
    host, port = server.url.removeprefix("http://").split(":")
    count = 8

    def body(n: int, tokens: int) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": "x"}], "n": n, "max_tokens": tokens,
            "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20,
            "stream_options": {"continuous_usage_stats": True},
        }  # fmt: skip

    def served() -> float:
        return server.metric("request_success_total", finished_reason="length")

    parts, tokens = 2, 40
    part = httpx.post(server.url + CHAT, json=body(1, tokens // parts), timeout=PATIENCE)
    before, asked = served(), json.dumps(body(count, tokens)).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        slow.connect((host, int(port)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n"
        slow.sendall(head.encode() + asked)
        end = time.monotonic() + 2 * PATIENCE
        while served() < before + count:
            assert time.monotonic() < end, "it was refused, or holds a slot"
            time.sleep(0.1)
        idle(server)
        kept = in_queues(int(port), slow.getsockname()[1])
    assert part.status_code == 200
    assert 0 < 2 * kept < len(part.content) * parts * count - 2**16, (kept, len(part.content))


def test_a_soak_of_a_minute_finds_nothing(server):
    """As `scripts/soak.py` does for half an hour: clients of all kinds, texts compared. They rest
    between two, so that slots come free and are taken, and other tests have the processor too."""
    result, draw = Soak(minutes=1, clients=6), random.Random(3)
    asyncio.run(load(server.url, server.process.pid, result, draw, texts=10, rest=6.0))
    assert result.problems == [] and result.pages_held == [0, 0] and len(result.resident) > 1
    assert result.ends["read"] + result.ends["read in a form"] > 0 and len(result.ends) > 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = [
    *("messages", "prompt", "input", "model", "stream", "temperature", "top_p", "top_k", "seed"),
    *("stop", "stop_token_ids", "n", "echo", "logprobs", "tools", "tool_choice", "stream_options"),
    *("max_completion_tokens", "response_format", "chat_template_kwargs", "reasoning", "tokens"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("logit_bias", "min_tokens", "presence_penalty", "prompt_logprobs", "text", "ignore_eos"),
]
GOOD = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text()}
            ),
            min_size=1, max_size=2,
        ),
        "prompt": st.text() | st.lists(st.integers(0, 5000), max_size=5),
        "input": st.text(),
        "echo": st.booleans(),
    },
)  # fmt: skip


@settings(
    max_examples=80, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    route=st.sampled_from([CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"]),
    good=GOOD,
    odd=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    raw=st.none() | st.binary(max_size=20),
    most=st.integers(0, 2),
)
def test_garbage_gets_an_answer_below_500(garbage, route, good, odd, raw, most):
    server, client = garbage
    body = {**good, **odd, "max_tokens": most, "max_output_tokens": 2}
    content = json.dumps(body).encode("utf-8", "surrogatepass") if raw is None else raw
    answer = client.post(server.url + route, content=content)
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def garbage(server):
    with httpx.Client(timeout=PATIENCE) as client:
        yield server, client


def test_nothing_is_stuck_or_was_compiled_after_all_that(server):
    """What the tests above left: no slot is taken, and no request made a program compile."""
    idle(server)
    assert server.metric("compilations_total") == 0
    assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.ends_server
def test_after_kill_9_the_same_command_serves_the_same_text(server, servers, tmp_path):
    """On the same port; clients of the killed one see a broken stream, not the end of a text."""
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
    want = httpx.post(server.url + TEXT, json=body, timeout=PATIENCE).json()["choices"]
    broken = pytest.raises((httpx.RemoteProtocolError, httpx.ReadError))
    stream = httpx.stream("POST", server.url + TEXT, json=body | {"stream": True}, timeout=PATIENCE)
    with broken, stream as answer:
        for _ in answer.iter_lines():
            server.process.kill()
    assert server.process.wait(PATIENCE) == -signal.SIGKILL
    port = server.url.rpartition(":")[2]
    servers.append(started(tmp_path / "log", *OPTIONS, "--port", port))
    assert servers[-1].url == server.url
    assert httpx.post(server.url + TEXT, json=body, timeout=PATIENCE).json()["choices"] == want


@pytest.mark.ends_server
def test_sigterm_lets_what_runs_finish_and_takes_nothing_new(servers):
    """The last test: it ends the server."""
    server = servers[-1]
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        data = [line for line in lines if line]
    assert data[-1] == "data: [DONE]"
    assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in server.log.read_text()
