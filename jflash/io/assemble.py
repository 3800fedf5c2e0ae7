"""Leaves of the parameters, put together of the pieces of files that make them up.

Knows pieces and leaves, neither formats of files nor names of tensors.
"""

import contextlib
import functools
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jflash.io.arrange import Arrangement
from jflash.io.read_ahead import Piece, read_ahead

NOTHING: Mapping[str, Arrangement] = MappingProxyType({})


def fill_leaves(
    plan: dict[str, list[Piece]],
    name: str,
    experts: Mapping[str, int],
    dtype: str | None,
    progress: bool,
    *,
    arranged: Mapping[str, Arrangement] = NOTHING,
) -> dict:
    """Parameters of the pieces that make up each leaf, read ahead; `name` is for the progress bar.

    Kernels are stored [out, in], those of `experts` (how many, by leaf) one expert after the other.
    `arranged` names the leaves whose numbers differ from their tensors'. `dtype` None keeps what
    the pieces give. Beside the leaves the device holds one a second time at
    most, the host some pieces of a file.
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
            other = arranged.get(leaf)
            own = other.dtype(dtype) if other else dtype
            if leaf in experts:
                leaves[leaf] = jax.block_until_ready(_join_experts(parts, experts[leaf], own))
            else:
                leaves[leaf] = _assemble(parts, _is_kernel(leaf), turning, own)
            if other:
                leaves[leaf] = other.of(leaves[leaf])
    return _nest({leaf: leaves[leaf] for leaf in plan})


def _is_kernel(leaf: str) -> bool:
    return leaf.endswith("/kernel")


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
