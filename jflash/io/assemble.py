"""Joins pieces of files into the leaves of the parameters.

This file knows pieces and leaves, and neither file formats nor names of tensors.
"""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jflash.io.arrange import Arrangement
from jflash.io.folder import Place, as_it_lies
from jflash.io.read_ahead import Piece, read_ahead
from jflash.records.leaves import Leaf, SideBySide

NOTHING: Mapping[str, Arrangement] = MappingProxyType({})


def fill_leaves(
    plan: dict[str, list[Piece]],
    leaves: Mapping[str, Leaf],
    name: str,
    dtype: str | None,
    progress: bool,
    *,
    arranged: Mapping[str, Arrangement] = NOTHING,
    place: Place = as_it_lies,
) -> dict:
    """The parameters, each leaf joined from its pieces; `name` is for the progress bar.

    Files store kernels as [out, in], and those of experts one expert after the other. `arranged`
    names the leaves that differ from their tensors. `dtype` None keeps the pieces' dtype. At most
    one leaf is on the device twice, and the host holds a few pieces of a file. `place` brings a
    finished leaf to the devices that share it.
    """
    turning = _device_turns()
    kept = {path: leaf for path, leaf in leaves.items() if leaf.kept}
    arrays = [(path, f"{path}/{n}", part) for path in kept for n, part in kept[path].arrays.items()]
    leaves = {**leaves, **{array: leaf for _, array, leaf in arrays}}
    arranged = {**arranged, **{array: arranged[p] for p, array, _ in arrays if p in arranged}}
    plan = {
        leaf: [
            piece._replace(transposed=_is_kernel(leaf) and not turning and not leaves[leaf].experts)
            for piece in pieces
        ]
        for leaf, pieces in plan.items()
    }
    # The largest leaf comes first: only small ones are held twice when memory is nearly full.
    # The arrays of a kept kernel come one after the other.
    owner, sizes = {leaf: leaf for leaf in plan}, Counter[str]()
    owner |= {array: path for path, array, _ in arrays}
    for leaf, own in plan.items():
        sizes[owner[leaf]] += sum(piece.nbytes for piece in own)
    order = sorted(plan, key=lambda leaf: (-sizes[owner[leaf]], owner[leaf]))
    pieces = [piece for leaf in order for piece in plan[leaf]]
    bar = tqdm(
        total=sum(piece.nbytes for piece in pieces), desc=f"loading {name}", unit="B",
        unit_scale=True, disable=not progress,
    )  # fmt: skip
    made = {}
    with contextlib.closing(read_ahead(pieces, dtype or "float32")) as arrivals, bar:
        for leaf in order:
            parts, spec = [], leaves[leaf]
            for _ in plan[leaf]:
                piece, rows = next(arrivals)
                bar.update(piece.nbytes)
                parts.append(rows)
            if spec.experts and _is_kernel(leaf):
                made[leaf] = _join_experts(parts, spec.experts, spec.format, spec.dtype or dtype)
            else:
                names = itertools.groupby(piece.name for piece in plan[leaf])
                tensors = tuple(len(list(pieces)) for _, pieces in names)
                form = _Form(spec.format, tensors, _is_kernel(leaf), turning)
                made[leaf] = _assemble(parts, form, spec.dtype or dtype)
            made[leaf].block_until_ready()  # and the parts are gone
            if leaf in arranged:
                made[leaf] = arranged[leaf].of(made[leaf])
            path = owner[leaf]
            kernel = kept.get(path)
            if kernel is None or not kernel.fragmented:
                made[leaf] = place(leaf, made[leaf])
            if kernel is None:
                continue
            names = {name: f"{path}/{name}" for name in kernel.arrays}
            if made.keys() >= set(names.values()):
                whole = kernel.of_arrays({n: made.pop(array) for n, array in names.items()})
                jax.block_until_ready(whole)  # one at a time lies twice, in its two orders
                made[path] = place(path, whole) if kernel.fragmented else whole
    return nest({leaf: made.pop(leaf) for leaf in sizes})


def _is_kernel(leaf: str) -> bool:
    return leaf.endswith("/kernel") or "/kernel/" in leaf


def _device_turns() -> bool:
    """Whether the device transposes kernels from [out, in] to [in, out].

    On a CPU device_put does it piece by piece, five times as fast as XLA's transpose.
    """
    return jax.default_backend() != "cpu"


class _Form(NamedTuple):
    """How pieces become a leaf: `tensors` has the number of pieces of each tensor."""

    format: SideBySide | None
    tensors: tuple[int, ...]
    kernel: bool
    turning: bool


def _assemble(parts: list[jax.Array], form: _Form, dtype: str | None) -> jax.Array:
    """A leaf from its pieces."""
    dtype = dtype or str(jnp.result_type(*parts))
    if len(parts) == 1 and parts[0].dtype == dtype and not (form.kernel and form.turning):
        return parts[0]
    return _join(parts, form, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(parts: list[jax.Array], form: _Form, dtype: str) -> jax.Array:
    axis, pieces = int(form.kernel and not form.turning), iter(parts)
    tensors = [
        jnp.concatenate(list(itertools.islice(pieces, count)), axis=axis) for count in form.tensors
    ]
    joined = form.format.join(tensors, axis) if form.format else tensors[0]
    return (joined.T if form.kernel and form.turning else joined).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _join_experts(
    parts: list[jax.Array], experts: int, format: SideBySide | None, dtype: str | None
) -> jax.Array:
    """[E, in, out] from rows [.., in] or [.., out, in], one expert after the other."""
    rows = jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    stack = rows.reshape(experts, -1, rows.shape[-1]).swapaxes(1, 2)
    if format:
        edges = list(itertools.accumulate(format.columns))[:-1]
        stack = format.join(jnp.split(stack, edges, axis=2))
    return stack.astype(dtype or stack.dtype)


def nest(leaves: dict[str, Any]) -> dict:
    """The tree whose leaves have these paths."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
