"""Kept kernels in the order in which a tensor core takes their codes, where a kernel reads it."""

from dataclasses import replace

from jflash.leaves import Leaf
from jflash.models.decoder import Target
from jflash.models.params import leaf_paths
from jflash.pair import Models
from pallas_kernels.matmul import fragments
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.quantised import Quantised


def in_fragments(models: Models) -> Models:
    """The models, with the dense kept kernels of their target in fragments if that is read here.

    It is by the canonical products, on one device.
    """
    if models.mesh is not None or models.kernels.matmul != "canonical":
        return models
    config = models.target.config
    leaves = leaf_paths(config)
    kept = {
        path: leaf.kept._replace(fragments=has_fragments(leaf))
        for path, leaf in leaves.items()
        if leaf.kept
    }
    return replace(models, target=Target(config.keeping(kept))) if kept else models


def has_fragments(leaf: Leaf) -> bool:
    """Whether a kept leaf may lie in fragments: it is dense, and its sizes fit."""
    if not leaf.kept or leaf.experts or leaf.kept.form not in ("fp8", "int4"):
        return False
    plain = replace(leaf, kept=leaf.kept._replace(fragments=False)).struct
    assert isinstance(plain, Quantised)
    K, N = leaf.stored
    cut = pieces("matmul", K, leaf.columns)
    return N % (2 * fragments.COLUMNS) == 0 and fragments.refusal(plain, cut) is None
