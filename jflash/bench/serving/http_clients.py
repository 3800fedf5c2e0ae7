"""Clients of a server, in processes of their own: so many at once, each reads streams to their end.

`python -m jflash.bench.serving.http_clients` takes a JSON object on stdin: url, clients, processes,
bodies. It prints another: the seconds from the first request to the last end, the counts of all
streams, and the share of the time in which the busiest process computed: near 1 the clients bound
what is measured. A process parses its streams when it has no more to ask.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import httpx

ROUTE = "/v1/chat/completions"
PATIENCE = 600.0
IMPORTS = 120.0  # seconds until every process can begin


class Seen(NamedTuple):
    """What the clients of one process saw; times are of a clock that all processes share."""

    begin: float
    end: float
    first: list[float]  # seconds to the first piece of an answer
    counts: list[tuple[int, int]]  # an answer's tokens and chunks
    busy: float  # the share of the time in which it computed


def load(url: str, clients: int, processes: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures; ValueError for an answer that is not whole."""
    context = get_context("spawn")
    begun, ready = context.Value("q", 0), context.Barrier(processes)
    shares = [len(range(i, clients, processes)) for i in range(processes)]
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_share, initargs=(begun, ready)
    ) as pool:
        seen = list(pool.map(partial(_clients, url, bodies), shares))
    first = sorted(x for each in seen for x in each.first)
    counts = [x for each in seen for x in each.counts]
    return {
        "seconds": max(each.end for each in seen) - min(each.begin for each in seen),
        "requests": len(counts),
        "new_tokens": sum(tokens for tokens, _ in counts),
        "chunks": sum(chunks for _, chunks in counts),
        "first_chunk_p50_ms": 1e3 * first[len(first) // 2],
        "client_processes": processes,
        "clients_busy": max(each.busy for each in seen),
    }


def _share(begun: Any, ready: Any) -> None:
    """What the processes share: the number of requests that have begun, and the start."""
    global _begun, _ready
    _begun, _ready = begun, ready


def _clients(url: str, bodies: list[dict[str, Any]], clients: int) -> Seen:
    _ready.wait(IMPORTS)
    begin, before = time.monotonic(), time.process_time()
    answers, first = asyncio.run(_read(url, clients, _next_of(bodies)))
    end, computed = time.monotonic(), time.process_time() - before
    counts = [counted(answer) for answer in answers]
    return Seen(begin, end, first, counts, computed / (end - begin))


def _next_of(bodies: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that no process has begun."""
    while True:
        with _begun.get_lock():
            number = _begun.value
            _begun.value += 1
        if number >= len(bodies):
            return
        yield bodies[number]


async def _read(
    url: str, clients: int, left: Iterator[dict[str, Any]]
) -> tuple[list[bytes], list[float]]:
    answers, first = list[bytes](), list[float]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:

        async def user() -> None:
            for body in left:
                sent, pieces = time.monotonic(), []
                async with client.stream("POST", ROUTE, json=body) as answer:
                    async for piece in answer.aiter_raw():
                        if not pieces:
                            first.append(time.monotonic() - sent)
                        pieces.append(piece)
                answers.append(b"".join(pieces))

        await asyncio.gather(*(user() for _ in range(clients)))
    return answers, first


def counted(answer: bytes) -> tuple[int, int]:
    """The new tokens by the usage at the end of a stream, and its chunks before that."""
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if len(events) < 3 or events[-1] != b"[DONE]":
        raise ValueError(f"a stream without an end: {answer[-200:]!r}")
    return json.loads(events[-2])["usage"]["completion_tokens"], len(events) - 2


if __name__ == "__main__":
    print(json.dumps(load(**json.load(sys.stdin))))
