"""Kept kernels in the order in which a tensor core takes their codes, where a kernel reads it."""

from collections.abc import Mapping
from dataclasses import replace

from jflash.models.decoder import Target
from jflash.models.params import leaf_paths
from jflash.pair import Models
from jflash.records.config import TargetConfig
from jflash.records.leaves import Leaf
from jflash.records.parts import part_of
from jflash.records.specs import DenseSpec, Kept
from pallas_kernels.matmul.kept.fragments import COLUMNS


def in_fragments(models: Models) -> Models:
    """The models, with the kept kernels of their target in fragments if that is read here.

    It is by the canonical products; elsewhere a rounded drafter's weights do not lie so either.
    """
    config, canonical = models.target.config, models.kernels.matmul == "canonical"
    forms = {path: leaf.kept for path, leaf in leaf_paths(config).items() if leaf.kept}
    rounded = models.drafter is not None and models.drafter.config.products
    if rounded and not canonical:
        models = models.drafting_in(rounded.form)
    if not forms:
        return models
    lies = fragment_paths(models, forms) if canonical else ()
    kept = {
        path: form._replace(fragments=path in lies, pairs=path in lies and _gated(config, path))
        for path, form in forms.items()
    }
    return replace(models, target=Target(config.keeping(kept)))


def _gated(config: TargetConfig, path: str) -> bool:
    """Whether the leaf is gate and up of an MLP whose product gates in its kernel."""
    layer, _, rest = path.partition("/")
    if rest != "mlp/gate_up/kernel":
        return False
    mlp = config.layers[int(layer.removeprefix("layers_"))].mlp
    return isinstance(mlp, DenseSpec) and mlp.activation == "silu" and not mlp.bias


def fragment_paths(models: Models, forms: Mapping[str, Kept]) -> set[str]:
    """Which of the target's leaves would lie in fragments, if they were kept in these forms.

    An expert's two products do or do not together. Devices that share the pair have whole tiles.
    """
    config, experts = models.target.config, models.kernels.experts == "canonical"
    leaves = _kept_leaves(config, forms)
    paths = {path for path, leaf in leaves.items() if leaf.fits_fragments}
    if models.mesh is not None:
        parts = _kept_leaves(part_of(config, models.mesh.size), forms)
        paths = {path for path in paths if _has_whole_tiles(leaves[path], parts[path])}
    for path in [path for path in paths if leaves[path].experts]:
        module, name, _ = path.rsplit("/", 2)
        other = f"{module}/{'down' if name == 'gate_up' else 'gate_up'}/kernel"
        if not (experts and other in paths and _gated_alone(config, path)):
            paths -= {path, other}
    return paths


def _kept_leaves(config: TargetConfig, forms: Mapping[str, Kept]) -> dict[str, Leaf]:
    leaves = leaf_paths(config)
    return {path: replace(leaves[path], kept=form) for path, form in forms.items()}


def _has_whole_tiles(whole: Leaf, part: Leaf) -> bool:
    """Whether a device's part of a leaf in fragments is a part of its tiles."""
    if not part.fits_fragments:
        return False
    runs = (run for leaf in (whole, part) for run in leaf.runs_of(1))
    return whole.stored == part.stored or not any(run % COLUMNS for run in runs)


def _gated_alone(config: TargetConfig, path: str) -> bool:
    """Whether a layer's experts have SwiGLU's activation and no biases, and no device lacks some
    (a token's may be another's then, which no list of used tiles knows)."""
    moe = config.layers[int(path.split("/")[0].removeprefix("layers_"))].moe
    if moe is None or moe.over == "devices":
        return False
    return moe.activation == "silu" and not (moe.bias or moe.clamped)
