"""Digests of decoded sequences, and the differences of two of them, whatever programs made them.

A digest holds two checksums of each row of logits and of each position's keys and values in every
layer of the target: one changed bit always shows. So the host can compare texts of different
widths, batches, capacities and chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jflash.cache import LayerCache, RingCache
from jflash.proof.lossless import Run, Task, checksums


class Digest(NamedTuple):
    """One sequence of n tokens, prompt included, in a target of L layers."""

    prompt_tokens: int
    tokens: np.ndarray  # [n]
    logits: np.ndarray  # [n, 2] of the row that chose each token; 0 up to the prefill's first one
    keys_values: np.ndarray  # [n - 1, L, 2] of the layers that attend


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


@jax.jit
def _cache_checksums(caches: tuple[LayerCache | RingCache, ...]) -> UInt32[Array, "B S L 2"]:
    def rows(x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1)

    both = [jnp.concatenate([rows(c.k), rows(c.v)], axis=-1) for c in caches]
    return jnp.stack([checksums(x) for x in both], axis=2)


def digests(run: Run, task: Task) -> list[Digest]:
    """Every sequence of a run. ValueError for a target with rings, whose old rows are gone."""
    # A recurrent state has no rows: the layers that attend, and the logits, are told by them.
    caches = [c for c in run.state.target_cache if isinstance(c, LayerCache | RingCache)]
    if any(cache.wraps for cache in caches):
        raise ValueError("a ring has overwritten its old rows: no digest of them can be made")
    tokens, ends = np.asarray(run.state.sequences.tokens), np.asarray(run.state.sequences.length)
    logits, kv = np.asarray(run.evidence.checksums), np.asarray(_cache_checksums(tuple(caches)))
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
    kv = (one.keys_values[: same - 1] != other.keys_values[: same - 1]).any(axis=(1, 2))
    return Apart(
        len(unequal) + long - short, int(logits.sum()), int(kv.sum()), long, len(logits), len(kv)
    )
