"""A drafter whose products are in e4m3: which leaves are rounded, and their rounding.

It drafts by a rounded copy of its target's head, or of the head that it brings. Files know nothing
of it: a drafter is rounded after it was read. What it computes with is `pallas_kernels.matmul`'s.
"""

from dataclasses import replace
from typing import Any

import jax

from jflash.config import DrafterConfig
from jflash.leaves import Leaf
from jflash.models.dflash import HEAD
from jflash.specs import FLOAT8
from pallas_kernels.matmul.rounded import rounded_rows, rounded_weight

ROUNDED = ("qkv", "out", "gate_up", "down", "fc")  # the products whose kernels are rounded


def float8_leaves(config: DrafterConfig, leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves that a drafter decodes with, of those that it would decode with unrounded."""
    rows = (config.draft_vocab_size or config.vocab_size) // config.shards
    head = Leaf((config.hidden_size, rows), ("embed", "vocab"), dtype=config.dtype)
    kept = {name: leaf for name, leaf in leaves.items() if name != "head"} | {HEAD: head}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            replace(leaf, format=None, shape=leaf.stored, axes=("embed", "columns"), kept=FLOAT8)
            if _is_rounded(path)
            else leaf
        ),
        kept,
    )


def rounded(config: DrafterConfig, drafter: dict[str, Any], target: dict[str, Any]) -> dict:
    """A drafter's parameters as its config wants them; `target` has the head to draft by."""
    if not config.products:
        return drafter
    head = drafter.get("head", target.get("head", target.get("embedding")))
    kept = {name: leaf for name, leaf in drafter.items() if name != "head"}
    made = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _round_weight(leaf) if _is_rounded(path) else leaf, kept
    )
    return made | {HEAD: _round_head(head)}


def heads_of(target: dict[str, Any]) -> dict[str, Any]:
    """Of a target's parameters those that `rounded` reads."""
    return {name: target[name] for name in ("head", "embedding") if name in target}


def _is_rounded(path: Any) -> bool:
    *parents, last = (key.key for key in path)
    if not parents:
        return last in ("context_kernel", HEAD)
    return last == "kernel" and parents[-1] in ROUNDED


_round_weight, _round_head = jax.jit(rounded_weight), jax.jit(rounded_rows)
