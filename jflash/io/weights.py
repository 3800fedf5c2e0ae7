"""Safetensors to parameters and back: strict both ways, and no weight twice in memory."""

import collections
import contextlib
import functools
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from jflash.config import DrafterConfig, TargetConfig
from jflash.io.foreign import one_line
from jflash.io.hf_config import read_json
from jflash.io.hf_values import shown
from jflash.io.names import is_dropped, is_stacked, leaf_sources
from jflash.io.read_ahead import Piece, find_tensors, read_ahead, split_rows

FLOATS = ("F64", "F32", "F16", "BF16")
sources_of = functools.cache(leaf_sources)  # traces the model
_STACKS = ("gate_up", "down")  # an expert's matrices, [E, in, out] in a leaf
LAYER, EXPERT = re.compile(r"\blayers\.(\d{1,9})\."), re.compile(r"\bexperts\.(\d{1,9})\.")
SHOWN = 20  # problems printed of a checkpoint that does not fit


def load_safetensors(
    folder: Path, config: TargetConfig | DrafterConfig, dtype: str | None, progress: bool = False
) -> dict:
    """Parameters of `config` from a folder's safetensors, as device arrays of `dtype`.

    None keeps the stored dtype. Beside them the device holds one leaf at most a second time, the
    host some pieces of a file. ValueError with every unknown, missing, twice-given or wrongly
    shaped tensor.
    """
    sources, owners = _open_checked(folder, config)
    plan, experts = _plan(sources, owners), _experts_of(config)
    return fill_leaves(plan, dtype, folder.name, progress, experts)


def fill_leaves(
    plan: dict[str, list[Piece]],
    dtype: str | None,
    name: str,
    progress: bool,
    experts: Mapping[str, int] = MappingProxyType({}),
) -> dict:
    """Parameters of the pieces that make up each leaf, read ahead; `name` is for the progress bar.

    Kernels are stored [out, in], those of `experts` (how many, by leaf) one expert after the other.
    `dtype` None keeps what the pieces give.
    """
    turning = _device_turns()
    plan = {
        leaf: [
            piece._replace(transposed=_is_kernel(leaf) and not turning and leaf not in experts)
            for piece in pieces
        ]
        for leaf, pieces in plan.items()
    }
    # The largest first: while the last leaves are put together, little is missing and less is held
    # twice, so nothing comes on top of the parameters.
    order = sorted(plan, key=lambda leaf: -sum(piece.nbytes for piece in plan[leaf]))
    pieces = [piece for leaf in order for piece in plan[leaf]]
    bar = tqdm(
        total=sum(piece.nbytes for piece in pieces), desc=f"loading {name}", unit="B",
        unit_scale=True, disable=not progress,
    )  # fmt: skip
    leaves = {}
    with contextlib.closing(read_ahead(pieces, dtype or "float32")) as arrivals, bar:
        for leaf in order:
            parts = []
            for _ in plan[leaf]:
                piece, rows = next(arrivals)
                bar.update(piece.nbytes)
                parts.append(rows)
            if leaf in experts:
                leaves[leaf] = jax.block_until_ready(_join_experts(parts, experts[leaf], dtype))
            else:
                leaves[leaf] = _assemble(parts, _is_kernel(leaf), turning, dtype)
    return _nest({leaf: leaves[leaf] for leaf in plan})


def check_safetensors(folder: Path, config: TargetConfig | DrafterConfig) -> None:
    """The errors of load_safetensors, by the files' headers alone."""
    _open_checked(folder, config)


def check_counts(folder: Path, config: TargetConfig | DrafterConfig) -> None:
    """ValueError if the files' names show other numbers of layers or experts than `config` has.

    Asked before anything is made of each of them: a config.json may say any number.
    """
    names = [name for file in _files(folder) for name in _open(file).keys()]  # noqa: SIM118
    counts = {"num_hidden_layers": (LAYER, config.num_layers)}
    if isinstance(config, TargetConfig) and config.moe is not None and not is_stacked(names):
        counts["num_experts"] = (EXPERT, config.moe.num_experts)
    problems = []
    for key, (pattern, count) in counts.items():
        stored = max((int(m[1]) for m in map(pattern.search, names) if m), default=-1) + 1
        if stored and stored != count:
            problems.append(f"{key} is {count}, the tensors are those of {stored}")
    check_problems(folder, problems)


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
        if leaf.endswith("/kernel"):  # [in, out], or [E, in, out] with an expert after the other
            rows = value.swapaxes(-1, -2).reshape(-1, value.shape[-2])
        else:
            rows = value
        edges = np.cumsum([part.shape[0] for part in parts])[:-1]
        for part, piece in zip(parts, np.split(rows, edges), strict=True):
            tensors[part.name] = np.ascontiguousarray(piece)
    save_file(tensors, path, metadata={"format": "pt"})


def _canonical(config: TargetConfig | DrafterConfig, name: str) -> str:
    """Some re-exported drafters prefix every tensor with `model.`."""
    return name.removeprefix("model.") if isinstance(config, DrafterConfig) else name


def _open_checked(folder: Path, config) -> tuple[dict, dict]:
    """Each leaf's tensors, and where those lie by their canonical names; ValueError if unfit."""
    owners = collections.defaultdict(list)
    handles = {file: _open(file) for file in _files(folder)}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            owners[_canonical(config, name)].append((file, name))
    sources = sources_of(config, is_stacked(owners))
    _check(folder, config, sources, owners, handles)
    return sources, owners


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map: which files hold the tensors?")
        if not all(isinstance(name, str) and _is_inside(name) for name in weight_map.values()):
            raise ValueError(f"{index} must name files of its folder alone in weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [shown(file.name) for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors files")
    return files


def _is_inside(name: str) -> bool:
    """Whether a name in a folder's index stays below that folder."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is corrupt or truncated: {one_line(error)}") from None


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
    check_problems(folder, problems)


def check_problems(source: Path, problems: list[str]) -> None:
    """ValueError with all that is wrong with the tensors of `source`, unless nothing is."""
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        listed = "; ".join(problems[:SHOWN] + more)  # with names of the file's choice
        raise ValueError(f"{source} does not fit: {' '.join(listed.split())}")


def _plan(sources: dict, owners: dict) -> dict[str, list[Piece]]:
    """The pieces of files that make up each leaf, in the order in which it holds them."""
    files = {file for places in owners.values() for file, _ in places}
    stored = {file: find_tensors(file) for file in files}
    plan = {}
    for leaf, parts in sources.items():
        places = [owners[part.name][0] for part in parts]
        plan[leaf] = [piece for file, name in places for piece in split_rows(stored[file][name])]
    return plan


def _is_kernel(leaf: str) -> bool:
    return leaf.endswith("/kernel")


def _experts_of(config: TargetConfig | DrafterConfig) -> dict[str, int]:
    """How many experts a leaf holds, by its path; leaves of one matrix are left out."""
    if not isinstance(config, TargetConfig) or config.moe is None:
        return {}
    names = [f"layers_{i}/mlp/{x}/kernel" for i in config.moe.sparse_layers for x in _STACKS]
    return dict.fromkeys(names, config.moe.num_experts)


def _device_turns() -> bool:
    """Whether kernels are transposed by the device, from [out, in] to [in, out].

    A CPU does it by device_put, a part at a time, which is five times as fast as XLA's transpose.
    """
    return jax.default_backend() != "cpu"


def _assemble(parts: list[jax.Array], kernel: bool, turning: bool, dtype: str | None) -> jax.Array:
    """A leaf of its parts, which nobody needs afterwards; waits for it, so that they are gone."""
    dtype = dtype or str(jnp.result_type(*parts))
    if len(parts) == 1 and parts[0].dtype == dtype and not (kernel and turning):
        return parts[0]
    return jax.block_until_ready(_join(parts, kernel, turning, dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _join(parts: list[jax.Array], kernel: bool, turning: bool, dtype: str) -> jax.Array:
    joined = jnp.concatenate(parts, axis=1 if kernel and not turning else 0)
    return (joined.T if kernel and turning else joined).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join_experts(parts: list[jax.Array], experts: int, dtype: str | None) -> jax.Array:
    """[E, in, out] of rows [.., in] or [.., out, in] that lie expert after expert."""
    rows = jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    stack = rows.reshape(experts, -1, rows.shape[-1]).swapaxes(1, 2)
    return stack.astype(dtype or stack.dtype)


def _nest(leaves: dict[str, jax.Array]) -> dict:
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
