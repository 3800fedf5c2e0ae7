"""Loads models from folders, GGUF files and hub ids, and checks that a drafter fits its target."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jflash.devices.backends import with_backends
from jflash.devices.distribute import place, placed
from jflash.devices.mesh import for_batch, over, shared_mesh, with_context, with_rounding
from jflash.generate import Pair
from jflash.io.checkpoint import Checkpoint, open_checkpoint, opened
from jflash.io.hf_config import drafter_config, names_of, target_config
from jflash.io.hf_write import to_hf_config
from jflash.io.keeping import keeping
from jflash.io.orbax_checkpoint import remove_orbax
from jflash.io.safetensors_write import check_leaves, save_safetensors
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_params
from jflash.pair import Models, Params
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.decoding import whole
from jflash.records.kernels import AUTO
from jflash.system.files import make_folder, replacing, write_text

DTYPES = ("float32", "bfloat16")


def default_dtype() -> str:
    """float32 on the CPU, bfloat16 on an accelerator."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def configure_target(source: str | Path | Checkpoint) -> Target:
    """A target by its configuration, without weights. ValueError if unfit."""
    return Target(opened(source).config(target_config))


def load_target(
    source: str | Path | Checkpoint, dtype: str | None = None, progress: bool = False
) -> tuple[Target, dict]:
    """A target and its parameters; `dtype` defaults to default_dtype(). ValueError if unfit."""
    checkpoint = opened(source)
    config = replace(checkpoint.config(target_config), dtype=_known(dtype))
    return Target(config), checkpoint.check(config)(config.dtype, progress)


def load_drafter(
    source: str | Path | Checkpoint, dtype: str | None = None, progress: bool = False
) -> tuple[Drafter, dict]:
    """A drafter and its parameters; `dtype` defaults to default_dtype(). ValueError if unfit."""
    checkpoint = opened(source)
    config = replace(checkpoint.config(drafter_config), dtype=_known(dtype))
    return Drafter(config), _sound(config, checkpoint.check(config)(config.dtype, progress))


def random_drafter(source: str | Path, seed: int, dtype: str | None = None) -> tuple[Drafter, dict]:
    """The drafter that `source` configures, with random weights: normal(0, 0.02), norms 1."""
    config = replace(open_checkpoint(source).config(drafter_config), dtype=_known(dtype))
    return Drafter(config), random_params(config, seed)


@dataclass(frozen=True)
class PairFiles:
    """A pair whose configs fit, and the checkpoints of its weights.

    `drafter_seed` draws the drafter's weights instead of reading them.
    """

    models: Models
    target: Checkpoint
    drafter: Checkpoint | None
    drafter_seed: int | None = None

    @property
    def dtype(self) -> str:
        return self.models.dtype

    @property
    def targets_scale(self) -> float | None:
        """What the drafter's embeddings are multiplied by, if only its target says that."""
        if self.drafter is None or self.models.drafter is None:
            return None
        if self.drafter.config(drafter_config).input_embedding_scale is not None:
            return None
        scale = self.models.drafter.config.input_embedding_scale
        return None if scale == 1 else scale


def configure_pair(
    target: str | Path | Checkpoint,
    drafter: str | Path | None = None,
    *,
    dtype: str | None = None,
    block_size: int | None = None,
    drafter_seed: int | None = None,
    attention_backend: str = AUTO,
    tensor_parallel: int = 1,
    mesh: Mesh | None = None,
    experts_over: str = "columns",
    quantised: str = AUTO,
    drafter_dtype: str = "",
    batch: int | None = None,
) -> PairFiles:
    """Reads configs and checks all that needs no weights; arguments as for load_pair."""
    dtype = _known(dtype)
    models, first, second = _read_pair(target, drafter, block_size)
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh {mesh!r:.60} is no jax.sharding.Mesh")
    mesh = shared_mesh(mesh, tensor_parallel)
    models = over(models, mesh, experts_over).drafting_in(drafter_dtype, batch)
    models = with_backends(
        models, dtype, jax.local_devices()[0], attention_backend=attention_backend
    )
    models = for_batch(keeping(models, first, quantised, batch), batch)
    return PairFiles(models, first, second, drafter_seed)


def pair_models(
    target: str | Path | Checkpoint,
    drafter: str | Path | Checkpoint | None = None,
    block_size: int | None = None,
) -> Models:
    """A pair by its configurations, before kernels are chosen; no device is used."""
    return _read_pair(target, drafter, block_size)[0]


def _read_pair(
    target: str | Path | Checkpoint,
    drafter: str | Path | Checkpoint | None,
    block_size: int | None,
) -> tuple[Models, Checkpoint, Checkpoint | None]:
    """A pair's models and the checkpoints that configure them; ValueError if they do not fit."""
    first = opened(target)
    config = first.config(target_config)
    if drafter is None:
        width = 1 if block_size is None else whole("block size", block_size)
        if width < 1:
            raise ValueError(f"block size {width} must be at least 1")
        return Models(Target(config), None, width), first, None
    second = opened(drafter)
    drafting = second.config(drafter_config)
    check_fit(config, drafting)
    drafting = drafting.meeting(config)
    width = drafting.block_size if block_size is None else block_size
    return Models(Target(config), Drafter(drafting), width), first, second


def load_weights(
    files: PairFiles,
    progress: bool = False,
    on_rounding: Callable[[Models, Params, Models, Params], None] | None = None,
) -> Pair:
    """Fills a configured pair; both checkpoints are checked whole before a tensor is read.

    `on_rounding` is called with the exact and the rounded form, if the drafter is rounded.
    """
    models, dtype = files.models, files.dtype
    places = functools.partial(place, models.mesh)
    target = models.target.config
    fill_target = files.target.check(target)
    if models.drafter is None or files.drafter is None:
        filled = fill_target(dtype, progress, place=functools.partial(places, target))
        return Pair(models, Params(filled))
    config = models.drafter.config
    if files.drafter_seed is None:
        fill_drafter = files.drafter.check(config)
        filled = fill_target(dtype, progress, place=functools.partial(places, target))
        params = fill_drafter(dtype, progress, place=functools.partial(places, config))
        params = _sound(config, params)
    else:
        filled = fill_target(dtype, progress, place=functools.partial(places, target))
        params = placed(models.mesh, config, random_params(config, files.drafter_seed))
    exact = with_context(models, Params(filled, params))
    decoding = with_rounding(models, exact)
    if on_rounding is not None and config.products:
        on_rounding(models.drafting_in(""), exact, models, decoding)
    return Pair(models, decoding)


def _sound(config: DrafterConfig, params: dict) -> dict:
    """A drafter's parameters; ValueError if its tokens are not distinct ones of its target."""
    if "d2t" in params:
        ids = np.arange(len(params["d2t"])) + np.asarray(params["d2t"])
        if len(set(ids.tolist())) < len(ids) or not 0 <= ids.min() <= ids.max() < config.vocab_size:
            raise ValueError(f"d2t gives ids twice, or outside the {config.vocab_size} tokens")
    return params


def load_pair(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str | None = None,
    block_size: int | None = None,
    attention_backend: str = AUTO,
    tensor_parallel: int = 1,
    mesh: Mesh | None = None,
    experts_over: str = "columns",
    quantised: str = AUTO,
    drafter_dtype: str = "",
    batch: int | None = None,
    progress: bool = False,
) -> Pair:
    """A target with its drafter, or without one for None, from folders or hub ids.

    `dtype` is 'float32' or 'bfloat16', by default default_dtype(). `block_size` is by default
    the drafter's, and 1 without a drafter; it may be smaller. `attention_backend` is 'canonical',
    'mosaic_gpu', 'triton' or 'xla', by default the best that the device has. `tensor_parallel`
    devices of this host share both models, or those of a `mesh`, whatever its axes; of experts each
    has some 'columns', or whole ones if `experts_over` is 'devices'. `quantised` says how a
    quantised target's weights lie in memory, which changes no bit: 'kept' as codes with scales, or
    'dequantised', by default kept where kernels read codes and either no step of `batch` sequences
    is slower for it or arrays would take more than two thirds of the device.
    `drafter_dtype` 'float8' rounds the operands of the drafter's products to e4m3, which changes no
    output; `batch`, the most sequences that will be decoded at once, says for how many rows its
    weights should lie, and what of the layers each of several devices has. Everything that can be
    checked without weights is checked before any are read. ValueError says what does not fit.
    """
    if batch is not None and whole("batch", batch) < 1:
        raise ValueError(f"batch {batch} must be at least 1")
    files = configure_pair(
        target, drafter, dtype=dtype, block_size=block_size, attention_backend=attention_backend,
        tensor_parallel=tensor_parallel, mesh=mesh, experts_over=experts_over, quantised=quantised,
        drafter_dtype=drafter_dtype, batch=batch,
    )  # fmt: skip
    return load_weights(files, progress)


def check_fit(target: TargetConfig, drafter: DrafterConfig) -> None:
    """ValueError listing everything in which a drafter does not fit its target."""
    pairs = {
        "hidden_size": (drafter.hidden_size, target.hidden_size),
        "num_target_layers": (drafter.num_target_layers or target.num_layers, target.num_layers),
        "vocab_size": (drafter.vocab_size, target.vocab_size),
    }
    problems = [
        f"{name} is {drafters} in the drafter, {targets} in the target"
        for name, (drafters, targets) in pairs.items()
        if drafters != targets
    ]
    deepest = max(drafter.target_layer_ids)
    if drafter.num_target_layers is None and deepest >= target.num_layers:
        problems.append(
            f"it taps layer {deepest} (counted from 0) of a target of {target.num_layers}"
        )
    if drafter.mask_token_id >= target.vocab_size:
        problems.append(
            f"mask_token_id {drafter.mask_token_id} is outside the target's vocabulary "
            f"of {target.vocab_size}"
        )
    if problems:
        raise ValueError("the drafter does not fit the target: " + "; ".join(problems))


def save_checkpoint(
    path: str | Path,
    config: TargetConfig | DrafterConfig,
    params: Any,
    dtype: str = "bfloat16",
    extra_config: Mapping[str, Any] | None = None,
    overwrite: bool = True,
) -> None:
    """Writes model.safetensors, then config.json, in Hugging Face layout; other files stay.

    Orbax parameters go, which would be read in place of the new ones. The model must have Qwen3's
    shape. `dtype` is 'float32' or 'bfloat16'. `extra_config` adds keys to config.json
    (eos_token_id, …). ValueError, before anything is written, for what no file should say.
    """
    if not isinstance(config, TargetConfig | DrafterConfig):  # such as the model that has it
        raise ValueError(f"config {config!r:.80} must be a model's: give target.config")
    if not isinstance(extra_config, Mapping | None):
        raise ValueError(f"extra_config {extra_config!r:.80} must map keys to values")
    if not str(path):  # which is the folder of the process for Path
        raise ValueError("the path '' is empty: give a folder")
    folder, dtype = Path(path), _known(dtype)
    raw = to_hf_config(config, dtype) | dict(extra_config or {})
    try:
        text = json.dumps(raw, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra_config {extra_config!r:.80} is no JSON: {error}") from None
    if not overwrite and (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a checkpoint already")
    names = names_of(raw)
    check_leaves(names, config, params)
    make_folder(folder)
    with replacing(folder / "model.safetensors") as part:
        save_safetensors(part, names, config, params, dtype)
    remove_orbax(folder)
    write_text(folder / "config.json", text)


def _known(dtype: str | None) -> str:
    dtype = default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype
