"""Tokens a second of a real pair by the rows that its steps verify, on real prompts.

The engine refills its slots from more prompts than it has, so that nearly all sequences are live.
Every way is the text of plain decoding; how many answers are, is counted.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import eq
from typing import Any, NamedTuple

import jax

from jflash.bench.serving.cases import engine_for
from jflash.bench.serving.speed import figures
from jflash.bench.shapes import model_shape
from jflash.budget.row_choice import ChosenRows, with_rows
from jflash.compiled.shape import Shape
from jflash.devices.backends import with_backends
from jflash.devices.mesh import with_context
from jflash.generate import Pair
from jflash.io import default_dtype
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_weights
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding
from jflash.records.kernels import AUTO
from jflash.serving.batch import Job, layout_for
from jflash.serving.calls.first_runs import choosing
from jflash.serving.calls.layout import Layout, steps_of_call
from jflash.serving.calls.programs import compile_programs, forget
from jflash.serving.collection import only_of_new_objects
from jflash.serving.engine import Engine
from jflash.serving.request import Request


def random_pair(shape: str) -> Pair:
    """A published shape with random weights, in the device's dtype."""
    target, drafter = model_shape(shape)
    models = Models(Target(target), Drafter(drafter), drafter.block_size)
    models = with_backends(models, default_dtype(), jax.devices()[0])
    return Pair(models, with_context(models, Params(*random_weights(models.configs))))


def ways(pair: Pair, batch: int, widths: Sequence[int]) -> dict[str, Pair]:
    """Rows chosen while it runs, blocks of fixed widths, and plain decoding."""
    models = pair.models
    return {
        "auto": replace(pair, models=with_rows(models, AUTO, batch)),
        **{f"width {w}": replace(pair, models=replace(models, block_size=w)) for w in widths},
        "plain": pair.plain(),
    }


def steps_of(pair: Pair, batch: int, capacity: int, alone: Callable[[], None]) -> dict[str, Any]:
    """The times of a step by its rows, without a text, and the seconds that compiling took.

    After `alone` returns, the programs are made once more: read, if compiled programs are kept.
    """
    models = with_rows(pair.models, AUTO, batch)
    if models.rows != AUTO:
        raise ValueError(f"batch {batch}: no number of rows is chosen there")
    shape = Shape.of(batch, capacity)
    steps = steps_of_call(models)
    layout = Layout(shape, None, steps, ("greedy",))
    begin = time.perf_counter()
    programs = compile_programs(models, pair.params, layout)
    took = {"compile_seconds": time.perf_counter() - begin}
    alone()
    if jax.config.jax_compilation_cache_dir:
        forget()
        begin = time.perf_counter()
        programs = compile_programs(models, pair.params, layout)
        took["cached_seconds"] = time.perf_counter() - begin
    begin = time.perf_counter()
    chosen = choosing(models, pair.params, layout, programs)[batch]
    took["timing_seconds"] = time.perf_counter() - begin
    return {"batch": batch, **took, "capacity": capacity, **times_of(chosen)}


def times_of(chosen: ChosenRows) -> dict[str, dict[str, float]]:
    """The times that the choice of rows begins with."""
    return {
        "step_ms": {str(rows): step.ms for rows, step in chosen.times.items()},
        "dispatch_ms": {str(rows): step.dispatch for rows, step in chosen.times.items()},
    }


def warm(named: Mapping[str, Pair], layout: Layout) -> float:
    """Compiles everything, several programs at a time; the seconds it took."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        compiled = lambda pair: compile_programs(pair.models, pair.params, layout)  # noqa: E731
        list(pool.map(compiled, named.values()))
    return time.perf_counter() - begin


def measured(
    pair: Pair,
    prompts: Mapping[str, Sequence[list[int]]],
    batch: int,
    decoding: Decoding,
    widths: Sequence[int],
    rounds: int,
    alone: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """A row of results for each set of prompts and each way; `alone` is called before the first.

    Each way has an engine, and they decode in turn: once untimed, then `rounds` times. The fastest
    turn counts.
    """
    everything = [Job(0, list(prompt), decoding) for each in prompts.values() for prompt in each]
    layout, named = layout_for(pair.models, everything, batch), ways(pair, batch, widths)
    compiled, models, times = warm(named, layout), named["auto"].models, {"step_ms": {}}
    alone()
    if models.rows == AUTO:
        programs = compile_programs(models, pair.params, layout)
        chosen = choosing(models, pair.params, layout, programs)[batch]
        times = times_of(chosen)
    capacity = layout.shape.capacity
    yield {"batch": batch, "compile_seconds": compiled, "capacity": capacity, **times}
    queue = max(len(several) for several in prompts.values())
    with contextlib.ExitStack() as stack:
        engines = {
            way: stack.enter_context(engine_for(own, layout, queue)) for way, own in named.items()
        }
        stack.enter_context(only_of_new_objects())
        for name, several in prompts.items():
            turns = [
                {
                    way: once(engine, several, decoding, salt=f"{name} {turn}")
                    for way, engine in reversed(engines.items())
                }
                for turn in range(rounds + 1)
            ]
            texts = turns[0]["plain"].texts
            for way in reversed(engines):
                own = [turn[way] for turn in turns]
                same = min(sum(map(eq, each.texts, texts)) for each in own)
                best = min(own[1:], key=lambda each: each.row["seconds"])
                seconds = [each.row["seconds"] for each in own[1:]]
                yield {
                    "batch": batch,
                    "prompts": name,
                    "way": way,
                    "answers": len(several),
                    **best.row,
                    "same_as_plain": same,
                    "seconds_of_turns": seconds,
                }


class Turn(NamedTuple):
    """One way's answers to all prompts of a set."""

    texts: list[list[int]]
    row: dict[str, Any]


def once(engine: Engine, prompts: Sequence[list[int]], decoding: Decoding, salt: str) -> Turn:
    """All prompts come at once; no prefix of another turn is found."""
    stops, most = decoding.stop_token_ids, decoding.max_new_tokens
    requests = [
        Request(prompt_ids=ids, max_tokens=most, stop_ids=stops, cache_salt=salt) for ids in prompts
    ]
    before, begin = engine.stats(), time.perf_counter()
    results = engine.generate(requests)
    seconds, after = time.perf_counter() - begin, engine.stats()
    found = figures(before, after, seconds)
    decode = after.decode_seconds - before.decode_seconds
    steps = sum(len(result.acceptance_lengths) for result in results)
    tokens = sum(sum(result.acceptance_lengths) for result in results)
    row = {
        "tokens": tokens,
        "decode_seconds": decode,
        "tokens_per_second": tokens / decode,
        "seconds": seconds,
        "with_prefill": tokens / seconds,
        "tau": tokens / max(1, steps),
        "steps_by_rows": {
            str(rows): count - before.steps_by_rows[rows]
            for rows, count in after.steps_by_rows.items()
        },
        "a_round": found["a_round"],
    }
    return Turn([result.token_ids for result in results], row)
