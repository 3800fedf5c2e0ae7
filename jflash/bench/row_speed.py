"""Tokens a second of a real pair by the rows that its steps verify, on real prompts.

The engine refills its slots from more prompts than it has, so that nearly all sequences are live.
Every way is the text of plain decoding; how many answers are, is counted.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax

from jflash.backends import with_backends
from jflash.bench.shapes import model_shape
from jflash.decoding import Decoding
from jflash.generate import Pair
from jflash.io import default_dtype
from jflash.kernels import AUTO
from jflash.mesh import with_context
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_weights
from jflash.pair import Models, Params
from jflash.programs import Shape
from jflash.row_choice import with_rows
from jflash.serving.batch import Job, layout_for, serve
from jflash.serving.engine import STEPS_PER_CALL
from jflash.serving.programs import choosing, compile_programs, forget
from jflash.serving.slots import Layout
from pallas_kernels.block_attention import PAGE


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
    layout = Layout(shape, batch * capacity // PAGE, STEPS_PER_CALL, ("greedy",))
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
    chosen = choosing(models, pair.params, layout, programs)
    took["timing_seconds"] = time.perf_counter() - begin
    times = {str(rows): step.ms for rows, step in chosen.times.items()}
    return {"batch": batch, **took, "capacity": capacity, "step_ms": times}


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
    """A row of results for each set of prompts and each way; `alone` is called before the first."""
    everything = [Job(0, list(prompt), decoding) for each in prompts.values() for prompt in each]
    context = max(job.tokens for job in everything)
    layout, named = layout_for(pair.models, everything, batch), ways(pair, batch, widths)
    compiled, models, times = warm(named, layout), named["auto"].models, {}
    alone()
    if models.rows == AUTO:
        programs = compile_programs(models, pair.params, layout)
        chosen = choosing(models, pair.params, layout, programs)
        times = {str(rows): step.ms for rows, step in chosen.times.items()}
    capacity = layout.shape.capacity
    yield {"batch": batch, "compile_seconds": compiled, "capacity": capacity, "step_ms": times}
    for name, several in prompts.items():
        jobs = [Job(i, list(prompt), decoding) for i, prompt in enumerate(several)]
        texts = {}
        for way, own in reversed(named.items()):
            best = None
            for _ in range(rounds):
                begin = time.perf_counter()
                answers = list(serve(own, jobs, batch_size=batch, context=context))
                wall = time.perf_counter() - begin
                decode = sum(answer.seconds.decode for _, answer in answers)
                if best is None or decode < best[0]:
                    best = decode, wall
            assert best is not None, "at least one round"
            texts[way] = {job.index: answer.token_ids for job, answer in answers}
            steps = sum(answer.steps for _, answer in answers)
            tokens = sum(sum(answer.acceptance_lengths) for _, answer in answers)
            yield {
                "batch": batch,
                "prompts": name,
                "way": way,
                "answers": len(answers),
                "tokens": tokens,
                "decode_seconds": best[0],
                "tokens_per_second": tokens / best[0],
                "with_prefill": tokens / best[1],
                "tau": tokens / max(1, steps),
                "same_as_plain": sum(texts["plain"][i] == text for i, text in texts[way].items()),
            }
