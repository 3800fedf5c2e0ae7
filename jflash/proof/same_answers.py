"""Answers of a real pair in several ways: each must be plain decoding's, at batch 1 too.

Where `Models.one_arithmetic` holds it follows from the law; here real weights and texts show it.
Knows token ids only.
"""

import copy
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from jflash.devices.distribute import placed
from jflash.generate import Pair
from jflash.models.params import random_params
from jflash.records.decoding import Decoding
from jflash.serving.batch import Job, layout_for, serve
from jflash.serving.calls.programs import compile_programs

GROUP = 64  # answers between two lines of results
REFERENCE_BATCH = 64  # of the plain answers that all others are compared with
ANCHORED = 64  # of them that batch 1 decodes plainly too


class Way(NamedTuple):
    """A pair, how many of its answers are decoded at once, and of which questions, if not all."""

    pair: Pair
    batch: int
    first: int | None = None


def ways(pair: Pair, batch: int, seed: int, anchored: int) -> dict[str, Way]:
    """The ways by name: with the drafter, with a random one, and at batch 1 with and without it."""
    assert pair.models.drafter is not None, "a pair to compare with plain decoding"
    config = pair.models.drafter.config
    drafter = placed(pair.models.mesh, config, random_params(config, seed))
    unlike = replace(pair, params=pair.params._replace(drafter=drafter))
    return {
        f"drafter, batch {batch}": Way(pair, batch),
        f"random drafter, batch {batch}": Way(unlike, batch),
        "plain, batch 1": Way(pair.plain(), 1, anchored),
        "drafter, batch 1": Way(pair, 1),
    }


def compared(
    pair: Pair,
    prompts: Sequence[list[int]],
    batch: int,
    decoding: Decoding,
    seed: int = 0,
    anchored: int = ANCHORED,
) -> Iterator[dict[str, Any]]:
    """A result after each GROUP of a way's answers: how many of them are the reference's.

    The reference is plain decoding at REFERENCE_BATCH; "plain, batch 1" ties it to one sequence by
    the first `anchored` prompts. A digest of its texts tells two processes apart.
    """
    jobs = [Job(i, list(prompt), decoding) for i, prompt in enumerate(prompts)]
    context = max(job.tokens for job in jobs)
    named, plain = ways(pair, batch, seed, anchored), Way(pair.plain(), REFERENCE_BATCH)
    begin = time.perf_counter()
    _compile([plain, *named.values()], jobs)
    spent = {"compile": round(time.perf_counter() - begin, 1)}
    reference = _timed(spent, f"plain, batch {REFERENCE_BATCH}", plain, jobs, context)
    result: dict[str, Any] = {
        "seconds": spent,
        "width": pair.models.block_size,
        "capacity": layout_for(pair.models, jobs, batch).shape.capacity,
        "max_new_tokens": decoding.max_new_tokens,
        "reference_batch": REFERENCE_BATCH,
        "answers": len(jobs),
        "tokens": sum(map(len, reference.values())),
        "texts_sha256": _digest(reference),
        "compared": dict.fromkeys(named, 0),
        "same": dict.fromkeys(named, 0),
    }
    for name, way in named.items():
        some = jobs[: way.first]
        size = GROUP if way.batch == 1 else len(some)  # a batch drains at the end of a group
        for first in range(0, len(some), size):
            found = _timed(spent, name, way, some[first : first + size], context)
            result["same"][name] += sum(reference[i] == ids for i, ids in found.items())
            result["compared"][name] += len(found)
            yield copy.deepcopy(result)


def _timed(
    spent: dict[str, float], name: str, way: Way, jobs: Sequence[Job], context: int
) -> dict[int, list[int]]:
    """The texts; their seconds are added to `spent`."""
    begin = time.perf_counter()
    texts = _texts(way, jobs, context)
    spent[name] = round(spent.get(name, 0) + time.perf_counter() - begin, 1)
    return texts


def _digest(texts: dict[int, list[int]]) -> str:
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()


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
