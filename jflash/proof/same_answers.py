"""Answers of a real pair in several ways: each must be plain decoding's at width 1 and batch 1.

Where `Models.one_arithmetic` holds it follows from the law; here real weights and texts show it.
Knows token ids only.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from jflash.decoding import Decoding
from jflash.generate import Pair
from jflash.models.params import random_params
from jflash.serving.batch import Job, layout_for, serve
from jflash.serving.programs import compile_programs

GROUP = 64  # answers of the reference between two lines of results


class Way(NamedTuple):
    """A pair, and how many of its answers are decoded at once."""

    pair: Pair
    batch: int


def ways(pair: Pair, batch: int, seed: int) -> dict[str, Way]:
    """With the drafter at both batches, with a random drafter, and plainly at the larger batch."""
    assert pair.models.drafter is not None, "a pair to compare with plain decoding"
    drafter = random_params(pair.models.drafter.config, seed)
    unlike = replace(pair, params=pair.params._replace(drafter=drafter))
    return {
        f"drafter, batch {batch}": Way(pair, batch),
        f"random drafter, batch {batch}": Way(unlike, batch),
        f"plain, batch {batch}": Way(pair.plain(), batch),
        "drafter, batch 1": Way(pair, 1),
    }


def compared(
    pair: Pair, prompts: Sequence[list[int]], batch: int, decoding: Decoding, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A result after each GROUP of answers: how many of them are the same in each way."""
    width = pair.models.block_size
    jobs = [Job(i, list(prompt), decoding) for i, prompt in enumerate(prompts)]
    context = max(job.tokens for job in jobs)
    named, plain = ways(pair, batch, seed), Way(pair.plain(), 1)
    begin = time.perf_counter()
    _compile([*named.values(), plain], jobs)
    result: dict[str, Any] = {
        "compile_seconds": round(time.perf_counter() - begin, 1),
        "width": width,
        "capacity": layout_for(pair.models, jobs, batch).shape.capacity,
        "max_new_tokens": decoding.max_new_tokens,
    }
    texts = {name: _texts(way, jobs, context) for name, way in named.items()}
    same, answers, tokens = dict.fromkeys(texts, 0), 0, 0
    for first in range(0, len(jobs), GROUP):
        reference = _texts(plain, jobs[first : first + GROUP], context)
        for name, found in texts.items():
            same[name] += sum(found[i] == ids for i, ids in reference.items())
        answers += len(reference)
        tokens += sum(map(len, reference.values()))
        yield result | {"answers": answers, "tokens": tokens, "same": dict(same)}


def _compile(all_ways: Sequence[Way], jobs: Sequence[Job]) -> None:
    """Everything, several programs at a time."""
    wanted = {(w.pair.models, w.batch): w.pair.params for w in all_ways}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for done in [
            pool.submit(compile_programs, models, params, layout_for(models, jobs, batch))
            for (models, batch), params in wanted.items()
        ]:
            done.result()


def _texts(way: Way, jobs: Sequence[Job], context: int) -> dict[int, list[int]]:
    answers = serve(way.pair, jobs, batch_size=way.batch, context=context)
    return {job.index: list(answer.token_ids) for job, answer in answers}
