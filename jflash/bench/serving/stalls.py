"""How long a long prompt keeps texts waiting that are under way: the gaps between their chunks.

A chunk is what one call of steps gives to a text.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from jflash.bench.serving.speed import PROMPT, RandomPrompts
from jflash.compiled.shape import Shape
from jflash.serving.calls.layout import Layout
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle
from jflash.serving.request import Request
from pallas_kernels.block_attention import PAGE

TEXT = 6144  # new tokens of a text, so that it lasts
ALONE = 1.0  # seconds in which the texts run before the prompt comes
ONE_CHUNK = 1e-3  # seconds; tokens that come closer together are of one call


def beside_long(slots: int, tokens: int, steps: int, chunk: int) -> Layout:
    """Pages for one prompt of so many tokens, and for texts in all other slots."""
    columns = -(-(tokens + 1) // PAGE)
    others = min(columns, (PROMPT + TEXT) // PAGE)
    shape = Shape.of(slots, columns * PAGE, 0, chunk)
    return Layout(shape, columns + (slots - 1) * others, steps, ("greedy",))


def stalled(engine: Engine, texts: int, prompts: RandomPrompts, tokens: int) -> dict[str, Any]:
    """Milliseconds between two chunks of a text: alone, and while a prompt of so many is computed.

    `stall_ms` is what the longest gap has more than a usual one. ValueError if a text ends early.
    """
    new = min(TEXT, engine.max_context - PROMPT)
    requests = [Request(prompt_ids=ids, max_tokens=new) for ids in prompts.take(texts)]
    handles = [engine.submit(request) for request in requests]
    seen = [list[float]() for _ in handles]
    readers = [
        threading.Thread(target=_read, args=each, daemon=True)
        for each in zip(handles, seen, strict=True)
    ]
    for reader in readers:
        reader.start()
    while not all(seen):
        time.sleep(0.01)
    settled = time.perf_counter()
    time.sleep(ALONE)
    came = time.perf_counter()
    [long] = prompts.take(1, tokens)
    next(iter(engine.submit(Request(prompt_ids=long, max_tokens=1))))
    began = time.perf_counter()
    time.sleep(ALONE)
    early = sum(handle.ended for handle in handles)
    for handle in handles:
        handle.cancel()
    for reader in readers:
        reader.join()
    if early:
        raise ValueError(f"{early} of {texts} texts ended before the prompt was computed")
    alone, beside = (
        [gap for times in seen for gap in gaps(times, *span)]
        for span in ((settled, came), (came, began))
    )
    return {
        "texts": texts,
        "prompt_tokens": tokens,
        "first_token_ms": 1e3 * (began - came),
        "alone": _numbers(alone),
        "beside": _numbers(beside),
        "stall_ms": 1e3 * (max(beside) - statistics.median(alone)),
    }


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """The seconds between chunks that came one after another, some part of them in begin … end."""
    found = [(a, b) for a, b in itertools.pairwise(times) if a < end and b > begin]
    return [b - a for a, b in found if b - a > ONE_CHUNK]


def _read(handle: Handle, seen: list[float]) -> None:
    """Notes when each event of a text came."""
    for _ in handle:
        seen.append(time.perf_counter())


def _numbers(gaps: Sequence[float]) -> dict[str, float]:
    ms = sorted(1e3 * gap for gap in gaps)
    return {"p50_ms": statistics.median(ms), "p99_ms": ms[int(0.99 * len(ms))], "most_ms": ms[-1]}
