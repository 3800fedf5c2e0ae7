"""The lossless check of one pair at one batch size, and of the fault that it must catch.

All modes decode the same tasks through one executable and are compared with its oracle. This file
does not know the command line, which holds the thresholds over several checks.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jflash.proof.cases import (
    FAULT_CAPACITY,
    Case,
    case_shape,
    fault_shape,
    random_prompts,
)
from jflash.proof.differences import Comparison, differences, first_difference
from jflash.proof.faults import SPLIT_BY_LENGTH, SPLITS, planted
from jflash.proof.lossless import (
    CORRUPTION,
    Executable,
    Mode,
    Run,
    Task,
    compile_executable,
    compile_recorded,
    corrupted,
    decode,
    prefilled,
)
from jflash.proof.width_1 import Parting, compile_narrow, partings
from jflash.records.decoding import Decoding

FAULT_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is decoded."""

    tokens: int  # the oracle's, at least
    replays: int  # of each task, each with other wrong tokens
    seed: int
    dtype: str
    width_1: bool  # decode at width 1 as well


def replays_needed(tokens: int, width: int, minimum: int) -> int:
    """Replays of a text of `tokens` tokens until every acceptance length came `minimum` times.

    There are some to spare: four standard deviations, and a tenth for steps that a limit cuts.
    """
    right = 1 - CORRUPTION
    rarest = min(right ** (width - 1), right ** (width - 2) * CORRUPTION)
    mean = (1 - right**width) / CORRUPTION
    expected = 0.9 * tokens * rarest / mean
    return max(1, math.ceil((minimum + 4 * math.sqrt(minimum)) / expected))


def modes_of(case: Case, text: Array, replays: int, key: Array) -> Iterator[Mode]:
    """The modes that must equal the oracle, whose tokens are `text`."""
    yield Mode(case.drafters[0], case.params)
    yield Mode(case.drafters[1], case.other_drafter, own_drafter=False)
    vocabulary = case.models.target.config.vocab_size
    for i in range(replays):
        wrong = corrupted(text, jax.random.fold_in(key, i), vocabulary)
        yield Mode("replay", case.params, text=wrong)


def check_batch(
    case: Case, batch: int, plan: Plan, progress: Callable[[int], Any]
) -> tuple[dict[str, Any], set[int]]:
    """One pair at one batch size: the comparisons' result, and the tokens that occurred."""
    begin = time.perf_counter()
    executable = compile_executable(case.models, case.params, case_shape(case, batch))
    narrow = compile_narrow(executable, case.params) if plan.width_1 else None
    compiled = time.perf_counter()
    width = case.models.block_size
    oracle = Mode("oracle", case.params, accept=False)
    totals: dict[str, Counter[str]] = {}
    histogram, distinct, first = np.zeros(width, int), set(), None
    parted: list[Parting] = []
    tokens = rounds = not_top = 0
    while tokens < plan.tokens:
        task = next_task(case, batch, plan, rounds, plan.tokens - tokens)
        task = task._replace(start=prefilled(executable, oracle, task))
        reference = decode(executable, oracle, task)
        news = new_tokens(reference, task)
        distinct.update(np.concatenate(news).tolist())
        not_top += int(reference.evidence.not_top.sum())
        key = jax.random.key(task_seed(plan.seed, batch, rounds))
        for mode in modes_of(case, reference.sequences.tokens, plan.replays, key):
            diff, lengths, counts = decode_and_compare(executable, reference, mode, task)
            totals.setdefault(mode.name, Counter()).update(counts)
            if diff.total and first is None:
                first = first_difference(executable, oracle, mode, task, diff)
                first |= {"pair": case.name, "batch": batch, "round": rounds}
            if mode.text is not None:  # a limit may cut a last step
                whole = np.concatenate([steps[:-1] for steps in lengths])
                histogram += np.bincount(whole, minlength=width + 1)[1:]
        if narrow is not None:
            parted += partings(narrow, oracle, reference, task)
        grown = sum(map(len, news))
        progress(grown)
        tokens, rounds = tokens + grown, rounds + 1
    return {
        "pair": case.name,
        "batch": batch,
        "block_size": width,
        "capacity": executable.shape.capacity,
        "backends": case.models.kernels._asdict(),
        "rounds": rounds,
        "sequences": rounds * batch,
        "tokens": tokens,
        "distinct_tokens": len(distinct),
        "tokens_not_top": not_top,
        "replays": plan.replays,
        "modes": {name: dict(counts) for name, counts in totals.items()},
        "replay_histogram": histogram.tolist(),
        "first_difference": first,
        "width_1": [p._asdict() for p in parted] if narrow is not None else None,
        "compile_seconds": compiled - begin,
        "seconds": time.perf_counter() - begin,
    }, distinct


def task_seed(seed: int, batch: int, number: int) -> int:
    """A seed for the `number`-th task of a batch size."""
    return (seed * 1_000_003 + batch * 10_007 + number) % 2**32


def next_task(case: Case, batch: int, plan: Plan, number: int, wanted: int) -> Task:
    """Other prompts for every task, and no more new tokens than are still wanted."""
    prompts = case.prompts(batch, task_seed(plan.seed, batch, number))
    new = min(case.max_new_tokens, max(2 * case.models.block_size, -(-wanted // batch)))
    return Task(prompts, Decoding(max_new_tokens=new, stop_token_ids=tuple(case.stops)))


def new_tokens(run: Run, task: Task) -> list[np.ndarray]:
    """Each sequence's tokens without its prompt."""
    tokens, ends = np.asarray(run.sequences.tokens), np.asarray(run.sequences.length)
    return [tokens[b, n : ends[b]] for b, n in enumerate(task.prompt_lengths)]


def acceptance_lengths(run: Run) -> list[np.ndarray]:
    """Tokens committed by each step of each sequence."""
    lengths, steps = np.asarray(run.sequences.acceptance_lengths), run.sequences.steps
    return [row[:count] for row, count in zip(lengths, steps.tolist(), strict=True)]


def decode_and_compare(
    executable: Executable, reference: Run, mode: Mode, task: Task
) -> tuple[Comparison, list[np.ndarray], dict[str, int]]:
    """A mode's differences from the oracle, its acceptance lengths, and counts of both."""
    run = decode(executable, mode, task)
    diff, lengths = differences(executable, reference, mode, run, task), acceptance_lengths(run)
    ends = np.asarray(run.sequences.length)
    by_kind = Counter()
    for thing, count in zip(diff.things, diff.count, strict=True):
        by_kind[thing.split(" of ")[0]] += count
    return diff, lengths, {
        "runs": 1,
        "steps": sum(map(len, lengths)),
        "tokens": int((ends - task.prompt_lengths).sum()),
        "logits_rows": int((ends - task.prompt_lengths - 1).sum()),
        "kv_rows": int((ends - 1).sum()),
        "differing_tokens": by_kind["tokens"],
        "differing_logits_rows": by_kind["logits"],
        "differing_target_kv_rows": by_kind["target K/V"],
        "differing_context_kv_rows": by_kind["context K/V"],
    }  # fmt: skip


def planted_fault(case: Case, seed: int) -> dict[str, Any]:
    """Long contexts, by the case's attention and by one that splits the keys by length.

    The first must show no difference between replay and oracle, and the second must show one.
    """
    config, width = case.models.target.config, case.models.block_size
    shape = fault_shape()
    room = min(FAULT_CAPACITY, config.max_position_embeddings) - FAULT_NEW_TOKENS - width
    prompts = [random_prompts(config.vocab_size, 1, seed, n, n)[0] for n in (room, 2 * room // 3)]
    task = Task(prompts, Decoding(max_new_tokens=FAULT_NEW_TOKENS))
    result: dict[str, Any] = {
        "pair": case.name,
        "capacity": FAULT_CAPACITY,
        "splits": SPLITS,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": FAULT_NEW_TOKENS,
    }
    sound = compile_executable(case.models, case.params, shape)
    start = prefilled(sound, Mode("oracle", case.params), task)
    models = planted(case.models, SPLIT_BY_LENGTH)
    faulty = sound._replace(models=models, run=compile_recorded(models, case.params, start, shape))
    task = task._replace(start=start)  # no prompt is faulty: prefill has another attention
    for name, executable in (("without", sound), ("with", faulty)):
        result[name] = compare_replay(executable, case, task, seed)
    return result


def compare_replay(executable: Executable, case: Case, task: Task, seed: int) -> dict[str, Any]:
    """One replay against the oracle: how many things differ, and the first."""
    oracle = Mode("oracle", case.params, accept=False)
    reference = decode(executable, oracle, task)
    vocabulary = case.models.target.config.vocab_size
    wrong = corrupted(reference.sequences.tokens, jax.random.key(seed), vocabulary)
    replay = Mode("replay", case.params, text=wrong)
    diff, _, counts = decode_and_compare(executable, reference, replay, task)
    first = first_difference(executable, oracle, replay, task, diff) if diff.total else None
    return {"differences": diff.total, **counts, "first_difference": first}
