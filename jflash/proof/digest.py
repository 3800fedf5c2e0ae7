"""Digests of decoded sequences, and the differences of two of them, whatever programs made them.

A digest holds two checksums of each row of logits and of each position's keys and values in every
layer of the target: one changed bit always shows. So the host can compare texts of different
widths, batches, capacities and chunks. A ring has overwritten its old rows: of those only the last
NEWEST positions are compared, which every ring still holds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jflash.layers.cache import LayerCache, RingCache
from jflash.proof.lossless import Run, Task, checksums

NEWEST = 32  # positions; a ring has 64 slots or more, and a block writes at most 32 past the end
GONE = np.uint32(2**32 - 1)  # in place of the checksums of what a ring need not hold


class Digest(NamedTuple):
    """One sequence of n tokens, prompt included, in a target of L layers."""

    prompt_tokens: int
    tokens: np.ndarray  # [n]
    logits: np.ndarray  # [n, 2] of the row that chose each token; 0 up to the prefill's first one
    keys_values: np.ndarray  # [n - 1, L, 2] of the layers that attend, or GONE


class Apart(NamedTuple):
    """How many tokens and rows of two sequences differ, of how many that were compared.

    Logits, keys and values are compared up to the first token that differs: after it the texts are
    different ones.
    """

    tokens: int = 0
    logits_rows: int = 0
    kv_rows: int = 0
    compared_tokens: int = 0
    compared_logits_rows: int = 0
    compared_kv_rows: int = 0

    @property
    def differ(self) -> bool:
        return any(self[:3])

    def plus(self, other: "Apart") -> "Apart":
        return Apart(*(a + b for a, b in zip(self, other, strict=True)))


@functools.partial(jax.jit, static_argnums=2)
def _cache_checksums(
    caches: tuple[LayerCache | RingCache, ...], ends: Int[Array, " B"], capacity: int
) -> UInt32[Array, "B S L 2"]:
    """Of each position below a sequence's end; its newest token is not in the cache."""
    positions = jnp.arange(capacity)

    def by_position(cache: LayerCache | RingCache) -> Array:
        k, v = (x.reshape(*x.shape[:2], -1) for x in (cache.k, cache.v))
        sums = checksums(jnp.concatenate([k, v], axis=-1))
        if not cache.wraps:
            return sums
        held = (positions >= ends[:, None] - 1 - NEWEST) & (positions < ends[:, None])
        return jnp.where(held[..., None], sums[:, positions % sums.shape[1]], GONE)

    return jnp.stack([by_position(cache) for cache in caches], axis=2)


def digests(run: Run, task: Task) -> list[Digest]:
    """Every sequence of a run."""
    # A recurrent state has no rows; the layers that attend, and the logits, show its differences.
    caches = [c for c in run.state.target_cache if isinstance(c, LayerCache | RingCache)]
    tokens, ends = np.asarray(run.state.sequences.tokens), np.asarray(run.state.sequences.length)
    sums = _cache_checksums(tuple(caches), run.state.sequences.length, tokens.shape[1])
    logits, kv = np.asarray(run.evidence.checksums), np.asarray(sums)
    return [
        Digest(len(prompt), tokens[b, :n], logits[b, :n], kv[b, : n - 1])
        for b, (prompt, n) in enumerate(zip(task.prompts, ends.tolist(), strict=True))
    ]


def apart(one: Digest, other: Digest) -> Apart:
    """The differences of two digests of one text; either's prompt may be the longer one."""
    short, long = sorted((len(one.tokens), len(other.tokens)))
    unequal = np.flatnonzero(one.tokens[:short] != other.tokens[:short])
    same = int(unequal[0]) if unequal.size else short
    # The row that chose the first token that differs is compared, because it shows why.
    rows = slice(max(one.prompt_tokens, other.prompt_tokens) + 1, min(same + 1, short))
    logits = (one.logits[rows] != other.logits[rows]).any(axis=1)
    mine, theirs = (digest.keys_values[: same - 1] for digest in (one, other))
    unlike = (
        (mine != theirs).any(axis=2) & (mine != GONE).any(axis=2) & (theirs != GONE).any(axis=2)
    )
    kv = unlike.any(axis=1)
    return Apart(
        len(unequal) + long - short, int(logits.sum()), int(kv.sum()), long, len(logits), len(kv)
    )
