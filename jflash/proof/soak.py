"""A server under mixed load for minutes: clients that stay, go, read slowly and send garbage.

Each text is compared with the one that the idle server gave for the same request before. In the
end nothing may wait or run, nothing may have compiled since the load began, and memory must be
flat.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from jflash.system.sources import same_paths

PATIENCE = 120.0  # seconds until a request counts as stuck
WARM = 0.2  # of the time, after which memory has to be flat
GROWTH = 32 * 2**20  # bytes that a flat process may gain after that
LOOK_EVERY = 5.0
TEXTS = 24  # different ones
CHAT = "/v1/chat/completions"
NAMES, THINGS = ("Ana", "Theo", "Emma", "Omar"), ("ribbons", "crayons", "stamps", "shells")
GARBAGE = (b"", b"{", b"[]", b'{"messages": 5}', b'{"messages": [{"role": "user"}]}')
SCHEMA = {
    "type": "object", "required": ["count", "sure"], "additionalProperties": False,
    "properties": {"count": {"type": "integer", "minimum": 0}, "sure": {"type": "boolean"}},
}  # fmt: skip
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"guided_regex": "[A-Z][a-z]{2,5}( [0-9]{2}){3}"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
)
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(kw_only=True)
class Soak:
    """What came of it."""

    minutes: float
    clients: int
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)  # bytes, every LOOK_EVERY seconds
    device_bytes: list[int] = field(default_factory=list)  # the same of the device; empty on a CPU
    pages_held: list[float] = field(default_factory=list)  # the share before and after the load
    compiled: int = 0  # programs since the load began
    exit_code: int | None = None

    def body(self) -> dict[str, Any]:
        return vars(self) | {"problems": self.problems[:20]}


def soak(serve_options: Sequence[str], minutes: float, clients: int, seed: int) -> Soak:
    """Starts `jflash serve` with these options on a free port, loads it, ends it by SIGTERM."""
    result = Soak(minutes=minutes, clients=clients)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            command = [sys.executable, "-P", "-m", "jflash.cli.main", "serve", "--port", "0"]
            paths = os.environ | same_paths()
            process = subprocess.Popen([*command, *serve_options], stderr=out, env=paths)
        try:
            url = _url(process, log)
            asyncio.run(load(url, process.pid, result, random.Random(seed)))
            process.terminate()
            result.exit_code = process.wait(PATIENCE)
            if result.exit_code:
                result.problems.append(f"the server ended with {result.exit_code}")
            if "Traceback" in log.read_text():
                result.problems.append("the server's log has a traceback")
        except httpx.HTTPError as error:
            said = log.read_text().strip().splitlines()[-5:]
            result.problems.append(f"{type(error).__name__} {error}: {' / '.join(said)}")
        finally:
            process.kill()
            process.wait()
    return result


def _url(process: subprocess.Popen, log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"listens on (http://\S+)\n", log.read_text()):
            return found[1]
        time.sleep(0.2)
    last = log.read_text().strip().splitlines()[-1:]
    raise ValueError(f"the server did not start: {' '.join(last)}")


def requests(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Greedy ones and drawn ones with a seed, of many lengths and forms, some without drafts."""
    found = []
    for seed in range(count):
        text = "".join(
            f"{draw.choice(NAMES)} has {draw.randint(2, 99)} {draw.choice(THINGS)}. "
            for _ in range(draw.randint(1, 8))
        )
        found.append(
            {
                "messages": [{"role": "user", "content": f"{text}How many are there?"}],
                "max_tokens": draw.choice([3, 20, 60]), "seed": seed, "stream": True,
                "temperature": draw.choice([0, 0, 1]), "speculation": draw.random() < 0.8,
            } | draw.choice(FORMS)
        )  # fmt: skip
    return found


async def load(
    url: str, pid: int, result: Soak, draw: random.Random, texts: int = TEXTS, rest: float = 0.0
) -> None:
    """Loads the server of this process for the minutes of `result`, which gets what comes of it.

    Clients ask for one of so many texts, and rest so many seconds between two, in the mean.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        bodies = requests(draw, texts)
        alone = [await _text(client, body) for body in bodies]
        await _idle(client, result)
        before = await _figures(client)
        end = time.monotonic() + 60 * result.minutes
        seeds = [random.Random(draw.random()) for _ in range(result.clients)]
        users = [_user(client, bodies, alone, end, result, own, rest) for own in seeds]
        await asyncio.gather(_look(client, pid, end, result), *users)
        await _idle(client, result)
        after = await _figures(client)
    result.compiled = round(after["compilations_total"] - before["compilations_total"])
    result.pages_held = [figures["kv_cache_usage_perc"] for figures in (before, after)]
    result.problems += problems_of(result)


def problems_of(result: Soak) -> list[str]:
    """What counts and memory say."""
    found = list[str]()
    if result.compiled:
        found.append(f"{result.compiled} programs compiled under load")
    flat = result.resident[int(WARM * len(result.resident)) :]
    if flat and flat[-1] - flat[0] > GROWTH:
        found.append(f"the server grew from {flat[0]} to {flat[-1]} bytes")
    # What a call takes while it runs comes and goes, so the least of each half counts.
    flat = result.device_bytes[int(WARM * len(result.device_bytes)) :]
    if len(flat) > 1:
        half = len(flat) // 2
        first, last = min(flat[:half]), min(flat[half:])
        if last - first > GROWTH:
            found.append(f"the device's memory grew from {first} to {last} bytes")
    return found


async def _user(
    client: httpx.AsyncClient,
    bodies: Sequence[dict[str, Any]],
    alone: Sequence[str],
    end: float,
    result: Soak,
    draw: random.Random,
    rest: float,
) -> None:
    """One client after another, each of a random kind."""
    while time.monotonic() < end:
        await asyncio.sleep(draw.uniform(0, 2 * rest))
        index, kind = draw.randrange(len(bodies)), draw.random()
        try:
            if kind < 0.1:
                answer = await client.post(CHAT, content=draw.choice(GARBAGE))
                well, how = answer.status_code == 400, "garbage"
            elif kind < 0.35:
                task = asyncio.create_task(_text(client, bodies[index]))
                await asyncio.wait([task], timeout=draw.expovariate(5))
                well, how = True, "left"
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                pause = 0.05 if kind > 0.95 else 0.0
                well = await _text(client, bodies[index], pause) == alone[index]
                how = "read slowly" if pause else "read"
                how += " in a form" if bodies[index].keys() & {*FORMS[2], *FORMS[3]} else ""
        except (httpx.HTTPError, ValueError) as error:
            well, how = False, f"{type(error).__name__} {error}"
        result.ends[how] += 1
        if not well:
            result.problems.append(f"request {index}: {how} went wrong")


async def _text(client: httpx.AsyncClient, body: dict[str, Any], pause: float = 0.0) -> str:
    """A streamed answer; ValueError unless it is whole."""
    text, done = "", False
    async with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            await asyncio.sleep(pause)
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                text += event["choices"][0]["delta"].get("content", "")
            done = done or line == "data: [DONE]"
    if not done:
        raise ValueError("the stream has no end")
    return text


async def _figures(client: httpx.AsyncClient) -> dict[str, float]:
    """The figures of /metrics by name, summed over labels."""
    found = defaultdict[str, float](float)
    for name, value in re.findall(
        r"^(?:vllm|jflash):(\w+)(?:\{.*\})? (\S+)$", (await client.get("/metrics")).text, re.M
    ):
        found[name] += float(value)
    return found


async def _idle(client: httpx.AsyncClient, result: Soak) -> None:
    """Waits until every slot is free."""
    end = time.monotonic() + PATIENCE
    while True:
        figures = await _figures(client)
        if not any(figures[name] for name in GAUGES):
            return
        if time.monotonic() > end:
            result.problems.append("a slot or a page is stuck")
            return
        await asyncio.sleep(0.2)


def _resident(pid: int) -> int | None:
    """Bytes of the server's two processes; None if one has ended."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    found = [
        re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text(encoding="utf-8"))
        for one in (pid, *children)
    ]
    return 1024 * sum(int(size) for [size] in found) if children and all(found) else None


async def _look(client: httpx.AsyncClient, pid: int, end: float, result: Soak) -> None:
    while time.monotonic() < end:
        resident = _resident(pid)
        if resident is None:
            result.problems.append("a process of the server has ended")
            return
        result.resident.append(resident)
        figures = await _figures(client)
        if "device_memory_bytes" in figures:
            result.device_bytes.append(round(figures["device_memory_bytes"]))
        await asyncio.sleep(LOOK_EVERY)
