"""Where a mode's run differs from the oracle's, bit for bit, and the first difference in full.

Both modes decode again for the first difference, which shows whole rows of logits: no run keeps
them.
Axes: B batch, S capacity, F the things compared.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash.layers.cache import Cache
from jflash.pair import Models
from jflash.proof.lossless import Executable, Mode, Run, Task, decode

SHOWN = 3  # logits of each row, the largest


class Differences(NamedTuple):
    """Where two runs differ, for each of the F things that `compared_things` names."""

    first: Int[Array, "F B"]  # the first index, the capacity if none
    count: Int[Array, " F"]
    unrecorded: Int[Array, ""]  # committed rows without evidence: must be 0


def compared_things(models: Models, own_drafter: bool) -> list[str]:
    """The names of `compare`'s rows, in their order."""
    things = ["tokens", "logits"]
    things += [f"target K/V of layer {i}" for i in range(models.target.config.num_layers)]
    if own_drafter and models.drafter is not None:
        things += [f"context K/V of layer {i}" for i in range(models.drafter.config.num_layers)]
    return things


@functools.partial(jax.jit, static_argnums=(3, 4))
def compare(
    one: Run, other: Run, prompt_lengths: Int[Array, " B"], own_drafter: bool, block_size: int
) -> Differences:
    """Compares tokens, logits of committed rows, and K/V of all tokens but the newest, as bits.

    With `own_drafter` both ran with one drafter's weights, so the drafter's cache is compared too;
    in a ring, only slots that the last block cannot have overwritten.
    """
    x, y, a, b = one.sequences, other.sequences, one.evidence, other.evidence
    index = jnp.arange(x.tokens.shape[1])
    short = jnp.minimum(x.length, y.length)[:, None]
    long = jnp.maximum(x.length, y.length)[:, None]
    tokens = (index < long) & ((x.tokens != y.tokens) | (index >= short))
    logits = jnp.any(a.checksums != b.checksums, axis=-1) | (_bits(a.top) != _bits(b.top))
    filled = index < short - 1
    caches = [
        run.state.target_cache + (run.state.drafter_cache if own_drafter else ())
        for run in (one, other)
    ]

    def differ(x: Cache, y: Cache) -> Bool[Array, "B S"]:
        rows, slots = _rows_differ(x, y), x.k.shape[1]
        return rows[:, index % slots] & (index > long + block_size - 2 - slots) if x.wraps else rows

    masks = [tokens, logits, *(filled & differ(*pair) for pair in zip(*caches, strict=True))]
    capacity = index.shape[0]
    first = [jnp.where(jnp.any(m, axis=1), jnp.argmax(m, axis=1), capacity) for m in masks]
    unrecorded = [
        (index > prompt_lengths[:, None]) & (index < run.sequences.length[:, None])
        & jnp.isneginf(run.evidence.top)
        for run in (one, other)
    ]  # fmt: skip
    return Differences(
        jnp.stack(first),
        jnp.stack([jnp.sum(m, dtype=jnp.int32) for m in masks]),
        jnp.sum(jnp.stack(unrecorded), dtype=jnp.int32),
    )


def _rows_differ(one: Cache, other: Cache) -> Bool[Array, "B _"]:
    return jnp.any(_bits(one.k) != _bits(other.k), axis=(2, 3)) | jnp.any(
        _bits(one.v) != _bits(other.v), axis=(2, 3)
    )


def _bits(x: Array) -> Array:
    """Floats as integers: NaN equals itself, and 0 is not -0."""
    return lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


class Comparison(NamedTuple):
    """The comparison of a mode with the oracle, on the host."""

    things: list[str]
    first: np.ndarray  # [F, B]
    count: list[int]

    @property
    def total(self) -> int:
        return sum(self.count)


def differences(
    executable: Executable, oracle: Run, mode: Mode, run: Run, task: Task
) -> Comparison:
    lengths, width = jnp.asarray(task.prompt_lengths), executable.models.block_size
    compared = compare(oracle, run, lengths, mode.own_drafter, width)
    unrecorded = int(compared.unrecorded)
    assert unrecorded == 0, f"{unrecorded} committed rows left no evidence"
    things = compared_things(executable.models, mode.own_drafter)
    assert len(things) == len(compared.count)
    return Comparison(things, np.asarray(compared.first), np.asarray(compared.count).tolist())


def first_difference(
    executable: Executable, oracle: Mode, mode: Mode, task: Task, diff: Comparison
) -> dict[str, Any]:
    """The earliest difference, with the logits of both modes there, each decoded once more.

    If only K/V differ, the logits are those of the first row that was computed from them.
    """
    sequence = int(np.argmin(diff.first.min(axis=0)))
    index = int(diff.first[:, sequence].min())
    things = [diff.things[i] for i in np.flatnonzero(diff.first[:, sequence] == index)]
    prompt = len(task.prompts[sequence])
    shown = index if {"tokens", "logits"} & set(things) else index + 1
    shown = max(shown, prompt + 1)  # the first token's logits belong to the prefill
    probe = np.full(executable.shape.batch, -1)
    probe[sequence] = shown
    runs = [decode(executable, m, task, probe) for m in (oracle, mode)]
    rows = [np.asarray(run.evidence.probed[sequence]) for run in runs]
    tokens = [int(run.sequences.tokens[sequence, shown]) for run in runs]
    with np.errstate(invalid="ignore"):  # a text that ended before it has no logits here: -inf
        apart = np.abs(rows[0] - rows[1]).max()
    return {
        "mode": mode.name,
        "sequence": sequence,
        "prompt_tokens": prompt,
        "index": index,
        "differs": things,
        "logits_index": shown,
        **{
            name: {
                "token": token,
                "logits": {str(t): _number(row[t]) for t in dict.fromkeys(tokens)},
                "top": {str(t): _number(row[t]) for t in np.argsort(-row, kind="stable")[:SHOWN]},
            }
            for name, token, row in zip(("oracle", "other"), tokens, rows, strict=True)
        },
        "logits_that_differ": int((rows[0].view(np.uint32) != rows[1].view(np.uint32)).sum()),
        "largest_difference": _number(apart),
    }


def _number(x: Any) -> float | None:
    """JSON has no infinity and no NaN."""
    return float(x) if np.isfinite(x) else None


def difference_text(difference: dict[str, Any]) -> str:
    d = difference
    things = d["differs"]
    listed = ", ".join(things[:3]) + (f" and {len(things) - 3} more" if len(things) > 3 else "")
    lines = [
        f"first difference: {d['mode']} against the oracle, sequence {d['sequence']} "
        f"(prompt of {d['prompt_tokens']} tokens), index {d['index']}: {listed}",
        f"  logits for index {d['logits_index']}, both modes decoded again:",
    ]
    for name, title in (("oracle", "oracle"), ("other", d["mode"])):
        row = d[name]
        numbers = [
            "; ".join(f"{token}: {_text(logit)}" for token, logit in row[key].items())
            for key in ("logits", "top")
        ]
        lines.append(
            f"  {title:<16} token {row['token']}; of both tokens {numbers[0]}; top {numbers[1]}"
        )
    if d["logits_that_differ"]:
        lines.append(
            f"  {d['logits_that_differ']} logits of the row differ, "
            f"by {_text(d['largest_difference'])} at most"
        )
    else:
        lines.append("  these rows are equal: the difference lies elsewhere, or did not come again")
    return "\n".join(lines)


def _text(logit: float | None) -> str:
    """The logit with the digits that distinguish a float32 from its neighbours."""
    return "none (not finite, or the text ended before)" if logit is None else f"{logit:.9g}"
