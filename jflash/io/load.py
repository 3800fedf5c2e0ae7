"""From a folder or a hub id to models that decode: what a pair is loaded from and must agree on."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash.backends import AUTO, with_backends
from jflash.config import DrafterConfig, TargetConfig
from jflash.files import replacing
from jflash.generate import Pair
from jflash.io import hf_config
from jflash.io.gguf import check_gguf, load_gguf
from jflash.io.gguf_config import hf_config_of
from jflash.io.gguf_file import is_gguf, open_gguf
from jflash.io.hf_write import to_hf_config
from jflash.io.names import abstract_params
from jflash.io.orbax_checkpoint import PARAMS, check_orbax, is_orbax, load_orbax
from jflash.io.weights import check_counts, check_safetensors, load_safetensors, save_safetensors
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, with_context_kernel
from jflash.models.dflash2 import drafter_of
from jflash.speculative import Models, Params

DTYPES = ("float32", "bfloat16")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", f"{PARAMS}/*"]


def default_dtype() -> str:
    """float32 on the CPU, bfloat16 on an accelerator."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def resolve(source: str | Path) -> Path:
    """A checkpoint's folder or GGUF file: `source` itself, or a hub id's folder, downloaded.

    ValueError if it is none of them, or if the hub cannot give it.
    """
    path = Path(source)
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"{path} is an empty folder")
        return path
    if is_gguf(path):
        if not path.exists():
            raise ValueError(f"{path}: no such file")
        return path
    if path.exists():
        raise ValueError(f"{path} is a file, expected a checkpoint folder or a .gguf file")
    if not HUB_ID.fullmatch(str(source)):
        raise ValueError(f"{source}: no such folder, and not a hub id (organisation/name)")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{source}: no such folder, and the hub cannot be reached: "
            "download it where there is a network, then give its folder"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"{source}: no such folder, and the hub says: {error}") from None


def configure_target(source: str | Path) -> Target:
    """A target by its configuration alone: no weight is read. ValueError if unfit."""
    return Target(read_config(resolve(source), hf_config.target_config))


def load_target(
    source: str | Path, dtype: str | None = None, progress: bool = False
) -> tuple[Target, dict]:
    """A target and its parameters; `dtype` defaults to default_dtype(). ValueError if unfit."""
    folder = resolve(source)
    config = read_config(folder, hf_config.target_config)
    return Target(config), load_params(folder, config, _known(dtype), progress)


def load_drafter(
    source: str | Path, dtype: str | None = None, progress: bool = False
) -> tuple[Drafter, dict]:
    """A drafter and its parameters; `dtype` defaults to default_dtype(). ValueError if unfit."""
    folder = resolve(source)
    config = read_config(folder, hf_config.drafter_config)
    return drafter_of(config), load_params(folder, config, _known(dtype), progress)


def random_drafter(source: str | Path, seed: int, dtype: str | None = None) -> tuple[Drafter, dict]:
    """The drafter that `source` configures, with random weights: normal(0, 0.02), norms 1."""
    config = read_config(resolve(source), hf_config.drafter_config)
    return drafter_of(config), random_params(config, seed, _known(dtype))


def random_params(config: TargetConfig | DrafterConfig, seed: int, dtype: str) -> dict:
    """Parameters that know nothing: normal(0, 0.02), norms 1."""
    leaves, tree = jax.tree.flatten(abstract_params(config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    random = [
        jnp.ones(leaf.shape, dtype) if leaf.ndim == 1 else _normal(key, leaf.shape, dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, random)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Compiled whole, so that nothing of it is held in float32."""
    return (0.02 * jax.random.normal(key, shape)).astype(dtype)


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """A pair whose configs are read and fit, and where its weights will come from.

    `drafter_seed` draws the drafter's weights instead of reading them.
    """

    models: Models
    dtype: str
    target: Path
    drafter: Path | None
    drafter_seed: int | None = None


def configure_pair(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str | None = None,
    block_size: int | None = None,
    drafter_seed: int | None = None,
    attention_backend: str = AUTO,
) -> PairFiles:
    """Reads configs and checks all that needs no weights; arguments as for load_pair."""
    dtype = _known(dtype)
    models, first, second = _read_pair(target, drafter, block_size)
    models = with_backends(models, dtype, jax.devices()[0], attention_backend=attention_backend)
    return PairFiles(
        models=models, dtype=dtype, target=first, drafter=second, drafter_seed=drafter_seed
    )


def pair_models(
    target: str | Path, drafter: str | Path | None = None, block_size: int | None = None
) -> Models:
    """A pair by its configurations alone, before kernels are chosen for it: touches no device."""
    return _read_pair(target, drafter, block_size)[0]


def _read_pair(
    target: str | Path, drafter: str | Path | None, block_size: int | None
) -> tuple[Models, Path, Path | None]:
    """A pair's models and the folders that they were read from; ValueError if they do not fit."""
    target_folder = resolve(target)
    target_config = read_config(target_folder, hf_config.target_config)
    if drafter is None:
        width = 1 if block_size is None else block_size
        if width < 1:
            raise ValueError(f"block size {width} must be at least 1")
        return Models(Target(target_config), None, width), target_folder, None
    drafter_folder = resolve(drafter)
    drafter_config = read_config(drafter_folder, hf_config.drafter_config)
    check_fit(target_config, drafter_config)
    width = drafter_config.block_size if block_size is None else block_size
    models = Models(Target(target_config), drafter_of(drafter_config), width)
    return models, target_folder, drafter_folder


def load_weights(files: PairFiles, progress: bool = False) -> Pair:
    """Fills a configured pair; both checkpoints are checked whole before a tensor is read."""
    dtype = files.dtype
    target, drafter = files.models.target.config, files.models.drafter
    check_params(files.target, target)
    if drafter is None or files.drafter is None:
        return Pair(files.models, Params(load_params(files.target, target, dtype, progress), None))
    if files.drafter_seed is None:
        check_params(files.drafter, drafter.config)
    target_params = load_params(files.target, target, dtype, progress)
    if files.drafter_seed is None:
        drafter_params = load_params(files.drafter, drafter.config, dtype, progress)
    else:
        drafter_params = random_params(drafter.config, files.drafter_seed, dtype)
    return Pair(files.models, Params(target_params, with_context_kernel(drafter, drafter_params)))


def load_pair(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str | None = None,
    block_size: int | None = None,
    attention_backend: str = AUTO,
    progress: bool = False,
) -> Pair:
    """A target with its drafter, or alone with None, from folders or hub ids.

    `dtype`: 'float32' or 'bfloat16', by default what suits the device. `block_size`: the drafter's
    own by default, smaller on request; without a drafter 1. `attention_backend`: 'mosaic_gpu',
    'triton' or 'xla', by default the best that the device has. Everything that can be checked
    without weights is checked before any are read. ValueError says what does not fit.
    """
    files = configure_pair(
        target, drafter, dtype=dtype, block_size=block_size, attention_backend=attention_backend
    )
    return load_weights(files, progress)


def check_fit(target: TargetConfig, drafter: DrafterConfig) -> None:
    """ValueError listing everything in which a drafter does not fit its target."""
    pairs = {
        "hidden_size": (drafter.hidden_size, target.hidden_size),
        "num_target_layers": (drafter.num_target_layers, target.num_layers),
        "vocab_size": (drafter.vocab_size, target.vocab_size),
    }
    problems = [
        f"{name} is {mine} in the drafter, {theirs} in the target"
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]
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
    extra_config: dict[str, Any] | None = None,
    overwrite: bool = True,
) -> None:
    """Writes model.safetensors, then config.json, in Hugging Face layout beside what is there.

    Qwen3's shape only. `extra_config` adds keys to config.json (eos_token_id and the like).
    """
    folder = Path(path)
    raw = to_hf_config(config, dtype) | (extra_config or {})
    if not overwrite and (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a checkpoint already")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as part:
        save_safetensors(part, config, params, dtype)
    with replacing(folder / "config.json") as part:
        part.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def read_config[C: TargetConfig | DrafterConfig](
    folder: Path, read: Callable[[dict[str, Any]], C]
) -> C:
    """A checkpoint's config through one of hf_config's readers; its errors name the checkpoint."""
    raw = raw_config(folder)
    try:
        config = read(raw)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if not is_gguf(folder) and not is_orbax(folder) and any(folder.glob("*.safetensors")):
        check_counts(folder, config)
    return config


def raw_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, or what it would be for a GGUF file."""
    if is_gguf(folder):
        return hf_config_of(open_gguf(folder))
    return hf_config.read_json(folder / "config.json")


def load_params(
    folder: Path, config: TargetConfig | DrafterConfig, dtype: str | None, progress: bool = False
) -> dict:
    """Parameters from a folder in either form or a GGUF file, as device arrays.

    dtype None: as stored.
    """
    if is_gguf(folder):
        assert isinstance(config, TargetConfig)
        return load_gguf(folder, config, dtype, progress)
    if is_orbax(folder):
        return load_orbax(folder, config, dtype, progress)
    return load_safetensors(folder, config, dtype, progress)


def check_params(folder: Path, config: TargetConfig | DrafterConfig) -> None:
    """ValueError with all that is wrong with a checkpoint's weights, by their headers alone."""
    if is_gguf(folder):
        assert isinstance(config, TargetConfig)
        check_gguf(folder, config)
    elif is_orbax(folder):
        check_orbax(folder, config)
    else:
        check_safetensors(folder, config)


def _known(dtype: str | None) -> str:
    dtype = default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype
