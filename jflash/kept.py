"""Kept kernels in the order in which a tensor core takes their codes, where a kernel reads it."""

from collections.abc import Mapping
from dataclasses import replace

from jflash.config import TargetConfig
from jflash.leaves import Leaf
from jflash.models.decoder import Target
from jflash.models.params import leaf_paths
from jflash.pair import Models
from jflash.specs import DenseSpec, Kept
from pallas_kernels.matmul import fragments
from pallas_kernels.matmul.pieces import pieces
from pallas_kernels.matmul.quantised import Quantised


def in_fragments(models: Models) -> Models:
    """The models, with the kept kernels of their target in fragments if that is read here.

    It is by the canonical products, on one device.
    """
    config = models.target.config
    forms = {path: leaf.kept for path, leaf in leaf_paths(config).items() if leaf.kept}
    if not forms or models.mesh is not None or models.kernels.matmul != "canonical":
        return models
    lies = fragment_paths(models, forms)
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

    An expert's two products do or do not together.
    """
    config, experts = models.target.config, models.kernels.experts == "canonical"
    leaves = {
        path: replace(leaf, kept=forms[path])
        for path, leaf in leaf_paths(config).items()
        if path in forms
    }
    paths = {path for path, leaf in leaves.items() if _has_fragments(leaf)}
    for path in [path for path in paths if leaves[path].experts]:
        module, name, _ = path.rsplit("/", 2)
        other = f"{module}/{'down' if name == 'gate_up' else 'gate_up'}/kernel"
        if not (experts and other in paths and _gated_alone(config, path)):
            paths -= {path, other}
    return paths


def _gated_alone(config: TargetConfig, path: str) -> bool:
    """Whether a layer's experts have SwiGLU's activation and no biases."""
    moe = config.layers[int(path.split("/")[0].removeprefix("layers_"))].moe
    return moe is not None and moe.activation == "silu" and not (moe.bias or moe.clamped)


def _has_fragments(leaf: Leaf) -> bool:
    """Whether a kept leaf's sizes allow fragments."""
    if not leaf.kept or leaf.kept.form not in ("fp8", "int4"):
        return False
    plain = replace(leaf, kept=leaf.kept._replace(fragments=False)).struct
    assert isinstance(plain, Quantised)
    *_, K, N = leaf.stored
    cut = 1 if leaf.experts else pieces("matmul", K, leaf.columns)
    return N % (2 * fragments.COLUMNS) == 0 and fragments.refusal(plain, cut) is None
