"""Times of the engine: bursts of requests, time to the first token, and how busy the device is.

It knows token ids and an engine; where they come from is its caller's.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from jflash.bench.serving.steady import looked_at, steady
from jflash.serving.engine import Engine
from jflash.serving.request import Request
from jflash.serving.stats import Stats

PROMPT, NEW = 512, 256  # tokens of a request of random ids


class RandomPrompts:
    """Prompts of random ids, never the same one: no prefix of one is cached."""

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary = np.random.default_rng(0), vocabulary

    def take(self, count: int, tokens: int = PROMPT) -> list[list[int]]:
        return self._draw.integers(0, self._vocabulary, (count, tokens)).tolist()


def burst(engine: Engine, requests: Sequence[Request], slots: int) -> dict[str, Any]:
    """The figures of requests that come all at once, from the first submission to the last end.

    "steady": of a long burst those without its ends, see `jflash.bench.serving.steady`.
    """
    before, begin = engine.stats(), time.perf_counter()
    with looked_at(engine) as moments:
        results = engine.generate(requests)
    found = figures(before, engine.stats(), time.perf_counter() - begin)
    found |= {"requests": len(results)}
    ends = steady(moments, slots)
    if ends is not None:
        first, last = ends
        found["steady"] = figures(first.stats, last.stats, last.seconds - first.seconds)
    return found


def figures(before: Stats, after: Stats, seconds: float) -> dict[str, Any]:
    """Counts between two moments of an engine, by the second and by the step."""
    since = {
        name: value - getattr(before, name)
        for name, value in asdict(after).items()
        if name not in ("ended", "steps_by_rows", "rounds_by_tokens", "device_bytes")
    }
    ended = sum(after.ended.values()) - sum(before.ended.values())
    tokens = since["new_tokens"]
    steps = max(1, tokens - since["accepted"] - ended)  # of sequences; prefills give a token each
    return {
        "seconds": seconds,
        "new_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tau": 1 + since["accepted"] / steps,
        "device_busy": since["busy_seconds"] / seconds,
        "device_busy_seen": since["seen_seconds"] / seconds,
        "prefill_share": since["prefill_seconds"] / seconds,
        "live": since["live"] / max(1, since["calls"]),
        "cached_tokens": since["cached_tokens"],
        "steps_by_rows": after.steps_by_rows,
        "a_round": of_a_round(since, seconds),
    }


def of_a_round(since: dict[str, Any], seconds: float) -> dict[str, float]:
    """Means: chunks of prompts, calls of steps, and milliseconds.

    `idle_ms`: the device computed nothing, at least; `host_ms`: the engine's thread worked;
    `dispatch_ms`: beside it, programs were dispatched. The longest of these and of what the device
    computes is what a round takes.
    """
    rounds = max(1, since["rounds"])
    ms = {
        "round_ms": seconds,
        "idle_ms": seconds - since["busy_seconds"],
        "host_ms": since["host_seconds"],
        "dispatch_ms": since["dispatch_seconds"],
    }
    return {
        "chunks": since["chunks"] / rounds,
        "calls": since["calls"] / rounds,
        **{name: 1e3 * value / rounds for name, value in ms.items()},
    }


def median_of(repeats: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The run of median speed, with the speeds of all."""
    runs = sorted((run() for _ in range(repeats)), key=lambda each: each["tokens_per_second"])
    speeds = [each["tokens_per_second"] for each in runs]
    return runs[len(runs) // 2] | {"tokens_per_second_of_repeats": speeds}


def first_token(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds from submission to the first token; the request ends with it."""
    begin = time.perf_counter()
    next(iter(engine.submit(Request(prompt_ids=prompt, max_tokens=1))))
    return time.perf_counter() - begin


def first_tokens(
    engine: Engine, prompts: RandomPrompts, count: int, again: bool = False
) -> dict[str, float]:
    """Milliseconds to the first token of fresh prompts one by one, or of prompts known already."""
    draw, seconds = np.random.default_rng(1), []
    for [prompt] in (prompts.take(1) for _ in range(count)):
        time.sleep(draw.uniform(0.0, 0.03))  # so that it comes at any time of a step
        took = first_token(engine, prompt)
        seconds.append(first_token(engine, prompt) if again else took)
    ms = sorted(1e3 * each for each in seconds)
    return {"p50_ms": statistics.median(ms), "p90_ms": ms[int(0.9 * len(ms))], "most_ms": ms[-1]}


@contextmanager
def running(engine: Engine, prompts: RandomPrompts, count: int) -> Iterator[None]:
    """`count` requests that decode all the while; ValueError if one ended before the block did."""
    length = engine.max_context - PROMPT
    handles = [
        engine.submit(Request(prompt_ids=prompt, max_tokens=length))
        for prompt in prompts.take(count)
    ]
    for handle in handles:
        next(iter(handle))
    yield
    ended = sum(handle.ended for handle in handles)
    for handle in handles:
        handle.cancel()
    if ended:
        raise ValueError(f"{ended} of {count} texts ended too early: give a longer context")
