"""Safetensors to parameters and back: strict both ways, one leaf in host memory at a time."""

import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from jflash.config import DrafterConfig, TargetConfig
from jflash.io.hf_config import read_json
from jflash.io.names import is_dropped, leaf_sources

FLOATS = ("F64", "F32", "F16", "BF16")
SHOWN = 20  # problems printed of a checkpoint that does not fit


def load_safetensors(
    folder: Path, config: TargetConfig | DrafterConfig, dtype: str | None, progress: bool = False
) -> dict:
    """Parameters of `config` from a folder's safetensors, as device arrays of `dtype`.

    None keeps the stored dtype. ValueError with every unknown, missing, twice-given or wrongly
    shaped tensor.
    """
    sources = leaf_sources(config)
    owners, handles = _open_checked(folder, config, sources)
    leaves = {}
    for leaf, parts in tqdm(sources.items(), desc=f"loading {folder.name}", disable=not progress):
        tensors = []
        for part in parts:
            file, name = owners[part.name][0]
            tensors.append(_read(handles[file], file, name))
        leaves[leaf] = jnp.asarray(_join(leaf, tensors, dtype))
    return _nest(leaves)


def check_safetensors(folder: Path, config: TargetConfig | DrafterConfig) -> None:
    """The errors of load_safetensors, by the files' headers alone."""
    _open_checked(folder, config, leaf_sources(config))


def save_safetensors(
    path: Path, config: TargetConfig | DrafterConfig, params: Any, dtype: str
) -> None:
    """Writes parameters as one safetensors file in Hugging Face's names and layout."""
    tensors = {}
    for leaf, parts in leaf_sources(config).items():
        value: Any = params
        for key in leaf.split("/"):
            value = value[key]
        value = np.asarray(value).astype(jnp.dtype(dtype))
        rows = value.T if leaf.endswith("/kernel") else value
        edges = np.cumsum([part.shape[0] for part in parts])[:-1]
        for part, piece in zip(parts, np.split(rows, edges), strict=True):
            tensors[part.name] = np.ascontiguousarray(piece)
    save_file(tensors, path, metadata={"format": "pt"})


def _canonical(config: TargetConfig | DrafterConfig, name: str) -> str:
    """Some re-exported drafters prefix every tensor with `model.`."""
    return name.removeprefix("model.") if isinstance(config, DrafterConfig) else name


def _open_checked(folder: Path, config, sources) -> tuple[dict, dict]:
    """Where each tensor lies, by its canonical name, and the open files; ValueError if unfit."""
    owners = collections.defaultdict(list)
    handles = {file: _open(file) for file in _files(folder)}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            owners[_canonical(config, name)].append((file, name))
    _check(folder, config, sources, owners, handles)
    return owners, handles


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map: which files hold the tensors?")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors files")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is corrupt or truncated: {error}") from None


def _read(handle: Any, file: Path, name: str) -> np.ndarray:
    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is corrupt or truncated at {name}: {error}") from None


def _check(folder: Path, config, sources, owners, handles) -> None:
    expected = {part.name: part.shape for parts in sources.values() for part in parts}
    problems = [f"missing: {name}" for name in expected if name not in owners]
    for name, places in owners.items():
        if name not in expected:
            if not is_dropped(config, name):
                problems.append(f"unknown: {name}")
            continue
        if len(places) > 1:
            where = ", ".join(f"{stored} in {file.name}" for file, stored in places)
            problems.append(f"given twice: {name} ({where})")
        file, stored = places[0]
        tensor = handles[file].get_slice(stored)
        shape = tuple(tensor.get_shape())
        if shape != expected[name]:
            problems.append(f"wrong shape: {name} is {shape}, expected {expected[name]}")
        if tensor.get_dtype() not in FLOATS:
            problems.append(f"unsupported dtype: {name} is {tensor.get_dtype()}")
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError(f"{folder} does not fit: " + "; ".join(problems[:SHOWN] + more))


def _join(leaf: str, tensors: list[np.ndarray], dtype: str | None) -> np.ndarray:
    if leaf.endswith("/kernel"):
        tensors = [tensor.T for tensor in tensors]
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors, axis=1)
    else:
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
    if dtype is None:  # JAX holds no float64 here
        dtype = "float32" if joined.dtype == np.float64 else joined.dtype.name
    return np.ascontiguousarray(joined, dtype=jnp.dtype(dtype))


def _nest(leaves: dict[str, jax.Array]) -> dict:
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
