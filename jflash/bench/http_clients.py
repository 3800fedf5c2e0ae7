"""Clients of a server, in another process: so many at once, and each reads streams to their end.

`python -m jflash.bench.http_clients` takes a JSON object on stdin: url, clients, bodies. It prints
another: the seconds from the first request to the last end, and the counts of all streams. They are
parsed after the clock has stopped.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

ROUTE = "/v1/chat/completions"
PATIENCE = 600.0


async def load(url: str, clients: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures; ValueError for an answer that is not whole."""
    left, answers, first = iter(bodies), list[bytes](), list[float]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:

        async def user(left: Iterator[dict[str, Any]]) -> None:
            for body in left:
                sent, pieces = time.perf_counter(), []
                async with client.stream("POST", ROUTE, json=body) as answer:
                    async for piece in answer.aiter_raw():
                        if not pieces:
                            first.append(time.perf_counter() - sent)
                        pieces.append(piece)
                answers.append(b"".join(pieces))

        begin = time.perf_counter()
        await asyncio.gather(*(user(left) for _ in range(clients)))
        seconds = time.perf_counter() - begin
    counts = [counted(answer) for answer in answers]
    return {
        "seconds": seconds,
        "requests": len(answers),
        "new_tokens": sum(tokens for tokens, _ in counts),
        "chunks": sum(chunks for _, chunks in counts),
        "first_chunk_p50_ms": 1e3 * sorted(first)[len(first) // 2],
    }


def counted(answer: bytes) -> tuple[int, int]:
    """The new tokens by the usage at the end of a stream, and its chunks before that."""
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if len(events) < 3 or events[-1] != b"[DONE]":
        raise ValueError(f"a stream without an end: {answer[-200:]!r}")
    return json.loads(events[-2])["usage"]["completion_tokens"], len(events) - 2


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(**json.load(sys.stdin)))))
