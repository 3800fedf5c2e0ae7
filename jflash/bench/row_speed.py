"""Tokens a second of a real pair by the rows that its steps verify, on real prompts.

The engine refills its slots from more prompts than it has, so that nearly all sequences are live.
Every way is the text of plain decoding; how many answers are, is counted.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from jflash.decoding import Decoding
from jflash.engine import Job, serve
from jflash.generate import PREFILL_CHUNK, Pair
from jflash.kernels import AUTO
from jflash.programs import Shape, capacity_for, compile_programs
from jflash.row_choice import programs_for, row_counts, with_rows


def ways(pair: Pair, batch: int, widths: Sequence[int]) -> dict[str, Pair]:
    """Rows chosen while it runs, blocks of fixed widths, and plain decoding."""
    models = pair.models
    return {
        "auto": replace(pair, models=with_rows(models, AUTO, batch)),
        **{f"width {w}": replace(pair, models=replace(models, block_size=w)) for w in widths},
        "plain": pair.plain(),
    }


def warm(named: Mapping[str, Pair], shape: Shape) -> float:
    """Compiles everything, several programs at a time; the seconds it took."""
    begin, wanted = time.perf_counter(), []
    for pair in named.values():
        counts = (None,)
        if pair.models.rows is not None:
            counts = row_counts(shape.batch, pair.models.block_size)
        wanted += [(replace(pair.models, rows=count), pair.params) for count in counts]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        list(pool.map(lambda each: compile_programs(each[0], each[1], shape), wanted))
    return time.perf_counter() - begin


def measured(
    pair: Pair,
    prompts: Mapping[str, Sequence[list[int]]],
    batch: int,
    decoding: Decoding,
    widths: Sequence[int],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """A row of results for each set of prompts and each way."""
    longest = max(len(prompt) for each in prompts.values() for prompt in each)
    width = pair.models.block_size
    capacity = capacity_for(longest, decoding.max_new_tokens, width, PREFILL_CHUNK)
    named = ways(pair, batch, widths)
    shape = Shape.of(batch, capacity, len(decoding.stop_token_ids))
    compiled = warm(named, shape)
    chosen = programs_for(named["auto"].models, pair.params, shape)
    times = {str(rows): ms for rows, ms in getattr(chosen, "ms", {}).items()}
    yield {"batch": batch, "compile_seconds": compiled, "capacity": capacity, "step_ms": times}
    for name, several in prompts.items():
        jobs = [Job(i, list(prompt), decoding) for i, prompt in enumerate(several)]
        texts = {}
        for way, own in reversed(named.items()):
            best = None
            for _ in range(rounds):
                begin = time.perf_counter()
                answers = list(serve(own, jobs, batch_size=batch, capacity=capacity))
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
