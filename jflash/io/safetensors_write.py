"""Parameters to safetensors, in a family's names and layout."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jflash.io.names import Names, leaf_sources
from jflash.models.params import leaf_paths
from jflash.records.config import DrafterConfig, TargetConfig


def check_leaves(names: Names, config: TargetConfig | DrafterConfig, params: Any) -> None:
    """ValueError if the parameters are not the config's."""
    leaves = leaf_paths(config)
    for path in leaf_sources(config, names):
        _leaf(params, path, leaves[path].stored)


def save_safetensors(
    file: Path, names: Names, config: TargetConfig | DrafterConfig, params: Any, dtype: str
) -> None:
    """Writes parameters as one safetensors file in a family's names and layout.

    ValueError if they are not the config's, or cannot be written.
    """
    tensors = {}
    leaves = leaf_paths(config)
    for path, parts in leaf_sources(config, names).items():
        value = _leaf(params, path, leaves[path].stored)
        value, format = np.asarray(value).astype(jnp.dtype(dtype)), leaves[path].format
        if format:
            value = np.concatenate(format.split(value), axis=-1)
        if path.endswith("/kernel"):  # [in, out] or [E, in, out]
            rows = value.swapaxes(-1, -2).reshape(-1, value.shape[-2])
        else:
            rows = value
        edges = np.cumsum([part.shape[0] for part in parts])[:-1]
        for part, piece in zip(parts, np.split(rows, edges), strict=True):
            tensors[part.name] = np.ascontiguousarray(piece)
    file.touch()
    mode = file.stat().st_mode  # of a new file here; safetensors' own only its owner may read
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disc, which is no OSError there
        raise ValueError(f"cannot write the weights to {file.parent}: {error}") from error
    with contextlib.suppress(OSError):  # a file system without modes
        file.chmod(mode)


def _leaf(params: Any, path: str, shape: tuple[int, ...]) -> Any:
    """The leaf of parameters at a path; ValueError if there is none of that shape."""
    value = params
    for key in path.split("/"):
        value = value.get(key) if isinstance(value, Mapping) else None
    there = getattr(value, "shape", None)
    if there != shape:
        has = "is missing" if there is None else f"is {there}"
        raise ValueError(f"the parameters are not the config's: {path} {has}, expected {shape}")
    return value
