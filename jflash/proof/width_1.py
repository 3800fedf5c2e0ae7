"""Counts how often decoding at width 1 differs from width W, and by how many nats.

Width 1 is the fast baseline, another executable: in bfloat16 it rounds differently, and of two
tokens that are almost equally likely it may take the other one.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from jflash.compiled.shape import new_state
from jflash.pair import Params
from jflash.proof.lossless import (
    Executable,
    Mode,
    Run,
    Task,
    compile_recorded,
    decode,
    inputs_of,
    prefilled,
)


class Narrow(NamedTuple):
    """The target without a drafter at width 1, with the prefill of the pair's executable."""

    wide: Executable
    params: Params
    run: Any


class Parting(NamedTuple):
    """One sequence at both widths; after the first other token the two have different texts."""

    tokens: int  # by the wide run, without the prefill's
    differing: int  # tokens that are not the same
    same: int | None  # equal tokens before the first that differs; None: all are equal
    wide_nats: float | None  # how much less likely the other width's token is, by this one's logits
    narrow_nats: float | None


def compile_narrow(wide: Executable, params: Params) -> Narrow:
    state = jax.eval_shape(lambda: new_state(wide.models, wide.shape))
    target = Params(params.target)
    run = compile_recorded(
        wide.models.plain(), target, state._replace(drafter_cache=()), wide.shape
    )
    return Narrow(wide, target, run)


def partings(narrow: Narrow, oracle: Mode, oracle_run: Run, task: Task) -> list[Parting]:
    """Where each sequence of the task parts, and by how much.

    Both decode once more for the logits there; at width W by replaying the oracle's tokens.
    """
    text, plain = oracle_run.sequences.tokens, _decode(narrow, oracle, task).sequences
    wide, other, ends = (np.asarray(x) for x in (text, plain.tokens, oracle_run.sequences.length))
    both = np.minimum(ends, np.asarray(plain.length))
    firsts = [_first(wide[b, :n], other[b, :n]) for b, n in enumerate(both.tolist())]
    rows = None
    if max(firsts) >= 0:
        replay = oracle._replace(name="replay", accept=True, text=text)
        probe = np.asarray(firsts)
        runs = decode(narrow.wide, replay, task, probe), _decode(narrow, oracle, task, probe)
        rows = [np.asarray(run.evidence.probed) for run in runs]
    parted = []
    for b, (first, prompt) in enumerate(zip(firsts, task.prompt_lengths, strict=True)):
        begin, end = prompt + 1, ends[b]  # the prefill's token is the same program's
        differing = int((wide[b, begin:end] != other[b, begin:end]).sum())
        if first < 0 or rows is None:
            parted.append(Parting(int(end - begin), differing, None, None, None))
            continue
        mine, theirs = int(wide[b, first]), int(other[b, first])
        # A difference of logits is one of log-probabilities: the normaliser cancels.
        wide_nats = float(rows[0][b, mine] - rows[0][b, theirs])
        narrow_nats = float(rows[1][b, theirs] - rows[1][b, mine])
        same = int(first - begin)
        parted.append(Parting(int(end - begin), differing, same, wide_nats, narrow_nats))
    return parted


def summary(sequences: Sequence[Parting]) -> dict[str, Any]:
    """Shares, positions and nats over all sequences; None if no sequence parted."""
    parted = [p for p in sequences if p.same is not None]
    tokens = sum(p.tokens for p in sequences)
    # After the first difference the texts differ too, so widths are comparable only up to it.
    comparable = sum(p.tokens if p.same is None else p.same + 1 for p in sequences)
    return {
        "sequences": len(sequences),
        "sequences_that_differ": len(parted),
        "tokens": tokens,
        "share_of_tokens_that_differ": sum(p.differing for p in sequences) / max(1, tokens),
        "comparable_tokens": comparable,
        "first_differences_per_1000_tokens": 1000 * len(parted) / max(1, comparable),
        "equal_tokens_before": _spread([p.same for p in parted]),
        "nats_at_width_w": _spread([p.wide_nats for p in parted]),
        "nats_at_width_1": _spread([p.narrow_nats for p in parted]),
    }


def _spread(values: Sequence[Any]) -> dict[str, Any] | None:
    if not values:
        return None
    return {"least": min(values), "median": median(values), "most": max(values)}


def _first(one: np.ndarray, other: np.ndarray) -> int:
    """The first position at which two rows differ, -1 if none."""
    unequal = np.flatnonzero(one != other)
    return int(unequal[0]) if unequal.size else -1


def _decode(narrow: Narrow, oracle: Mode, task: Task, probe: np.ndarray | None = None) -> Run:
    state = prefilled(narrow.wide, oracle, task)._replace(drafter_cache=())
    return Run(*narrow.run(narrow.params, state, inputs_of(narrow.wide.shape, None, probe)))
