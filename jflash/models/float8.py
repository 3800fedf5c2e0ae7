"""A drafter whose products are in e4m3: which leaves are rounded, their rounding, and its form.

It drafts by a rounded copy of its target's head, or of the head that it brings. Files know nothing
of it: a drafter is rounded after it was read. What it computes with is `pallas_kernels.matmul`'s:
products of codes with codes, or, in fragments, those of a target's kept weights.
"""

from dataclasses import replace
from typing import Any

import jax

from jflash.models.dflash import HEAD
from jflash.records.config import DrafterConfig
from jflash.records.leaves import Leaf
from jflash.records.specs import FLOAT8, Kept
from pallas_kernels.matmul.float8 import FEW_ROWS
from pallas_kernels.matmul.float8.rounded import rounded_rows, rounded_weight
from pallas_kernels.matmul.kept.quantised import Quantised

AXES = "embed", "columns"
ROUNDED = ("qkv", "out", "gate_up", "down", "fc")  # the products whose kernels are rounded


def rounding(dtype: str, rows: int | None) -> Kept | None:
    """How a drafter's products are rounded that should be fast with `rows` rows.

    ValueError for another dtype than 'float8', and than '', which rounds nothing.
    """
    if dtype not in ("", FLOAT8.form):
        raise ValueError(f"drafter_dtype {dtype!r} is not {FLOAT8.form!r}")
    few = rows is not None and rows <= FEW_ROWS  # where fragments are the faster form
    return FLOAT8._replace(fragments=few) if dtype else None


def float8_leaves(config: DrafterConfig, leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves that a drafter decodes with, of those that it would decode with unrounded."""
    rows = (config.draft_vocab_size or config.vocab_size) // config.shards
    head = Leaf((config.hidden_size, rows), ("embed", "vocab"), dtype=config.dtype, kept=FLOAT8)
    kept = {name: leaf for name, leaf in leaves.items() if name != "head"}
    made = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            _form(config, replace(leaf, format=None, shape=leaf.stored, axes=AXES))
            if _is_rounded(path)
            else leaf
        ),
        kept,
    )
    return made | {HEAD: head}


def rounded(leaves: dict[str, Any], drafter: dict[str, Any], target: dict[str, Any]) -> dict:
    """A drafter's parameters as `float8_leaves` declares them; `target` may have its head."""
    head = drafter.get("head", target.get("head", target.get("embedding")))
    others = {name: leaf for name, leaf in leaves.items() if name != HEAD}
    made = jax.tree.map(_rounded, others, {name: drafter[name] for name in others})
    return made | {HEAD: _round_head(head)}


def _form(config: DrafterConfig, weight: Leaf) -> Leaf:
    """A rounded weight's leaf [K, N]: in fragments it is one of codes with a scale a column, in
    bfloat16, by which codes are converted sooner."""
    assert config.products
    form = Kept("fp8", weight.stored[0], "bfloat16", zeros=False, fragments=True)
    whole = replace(weight, kept=form)
    fits = config.products.fragments and whole.fits_fragments
    return whole if fits else replace(weight, kept=FLOAT8)


def _rounded(leaf: Leaf, weight: jax.Array) -> Any:
    if not leaf.kept:
        return weight
    made = _round_weight(weight, leaf.kept.scales)
    if not leaf.fragmented:
        return made
    return leaf.in_fragments(Quantised(made.codes.T, made.scales[None], None, len(weight)))


def heads_of(target: dict[str, Any]) -> dict[str, Any]:
    """Of a target's parameters those that `rounded` reads."""
    return {name: target[name] for name in ("head", "embedding") if name in target}


def _is_rounded(path: Any) -> bool:
    *parents, last = (key.key for key in path)
    if not parents:
        return last == "context_kernel"
    return last == "kernel" and parents[-1] in ROUNDED


_round_weight = jax.jit(rounded_weight, static_argnums=1)
_round_head = jax.jit(rounded_rows)
