"""How a quantised target's weights lie in memory: as codes with scales, or as arrays."""

from dataclasses import replace

import jax

from jflash.devices.kept import fragment_paths, in_fragments
from jflash.devices.mesh import local
from jflash.io.checkpoint import Checkpoint
from jflash.models.decoder import Target
from jflash.models.params import abstract_params, leaf_paths
from jflash.pair import Models
from jflash.records.kernels import AUTO
from jflash.records.leaves import Leaf
from jflash.records.specs import Kept
from jflash.system.device import device_memory

KEPT = "kept"
QUANTISED = (AUTO, KEPT, "dequantised")  # how a quantised target's weights lie in memory
# The share of a device's memory that arrays may take before all weights stay codes by themselves:
# dense FP8 is slower in codes at many rows, and so are experts' codes that do not lie in fragments
# at few. A step of Qwen3-8B's pair on an H200 takes 5.3 ms with arrays, 4.0 with FP8 and 3.6 with
# INT4 at batch 1, 7.0, 6.8 and 6.7 at 8, and 17.4, 19.5 and 17.8 at 32 (benchmarks/README.md). So
# dense INT4 stays in codes wherever it lies in fragments, and FP8 where steps are known to have few
# rows: those of batch 8 if its scales are bfloat16's, of batch 1 if they are float32's (4.4 and 7.2
# ms). Experts win in either form at up to 512 rows, which is a prefill's chunk too (FP8 takes 751
# µs of 2,048 rows, and arrays 648).
ROOMY = 2 / 3
MOST_ROWS, MOST_NARROW_ROWS = 16, 128  # of a step with dense FP8 in codes


def keeping(models: Models, target: Checkpoint, quantised: str, batch: int | None) -> Models:
    """The models, whose target may keep its quantised weights; the others as for load_pair."""
    if quantised not in QUANTISED:
        raise ValueError(f"quantised {quantised!r} is not one of {', '.join(QUANTISED)}")
    asked, kernels = quantised == KEPT, models.kernels
    if not (asked or (quantised == AUTO and kernels.matmul == "canonical")):
        return models
    config = models.target.config
    forms, leaves = target.kept(config), leaf_paths(config)
    kept = {path: form for path, form in forms.items() if form}
    if not asked and _roomy(models):
        rows = batch and batch * models.block_size
        paths = fragment_paths(models, kept)
        wins = {path for path in paths if _wins(leaves[path], kept[path], rows)}
        kept = {path: form for path, form in kept.items() if path in wins}
    if asked and not kept:
        raise ValueError(f"{target.path} has no quantised weights that may be kept in memory")
    if asked and (whole := [p for p in forms if leaves[p].experts and not forms[p]]):
        raise ValueError(
            f"{target.path} has experts in a quantised form that may not be kept in memory, "
            f"{whole[0]} for one: use --quantised dequantised"
        )
    if not asked and kernels.experts != "canonical":
        kept = {path: form for path, form in kept.items() if not leaves[path].experts}
    if not kept:
        return models
    return in_fragments(replace(models, target=Target(config.keeping(kept))))


def _wins(leaf: Leaf, form: Kept, rows: int | None) -> bool:
    """Whether no step of `rows`, or if they are not known of up to 512, is slower with codes in
    fragments, as far as measured."""
    if form.form == "int4" or leaf.experts:
        return True
    return rows is not None and rows <= (MOST_NARROW_ROWS if form.narrow else MOST_ROWS)


def _roomy(models: Models) -> bool:
    """Whether the pair's arrays leave the first device enough memory; False where it is unknown."""
    parts = map(abstract_params, local(models).configs)
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(list(parts)))
    return arrays <= ROOMY * (device_memory() or 0)
