"""The GEMMs as one Mosaic GPU kernel (Hopper: TMA, wgmma); a tuning is all it knows of a shape.

A CTA is one producer warpgroup, which streams tiles of x and w through a ring of shared memory, and
one consumer warpgroup for each 64 rows. CTAs are persistent: each takes every C-th column tile of
its row tile, and the ring runs on across tiles, so the next tile's loads overlap the epilogue.
A cluster shares loads by multicast: its CTAs along "n" need the same x, those along "m" the same w.

A row's bits depend only on its values: every tile sums K in the same order, a split over K is
the same for all tiles and combined in fixed order, and nothing is atomic. Rows past M are filled
with zeros by TMA on the way in and clipped on the way out, so they cost no memory traffic.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.halves import Firsts, halves
from pallas_kernels.matmul.mosaic_kernel import (
    SWIZZLED_ROWS,
    add_residual,
    kernel,
    out_dtype,
    scratch,
    silu_times,
)
from pallas_kernels.matmul.tuning import ARGMAX, HEADS, Plan, Tuning, make_plan

# A jit each: the call sites of all layers then share one compiled kernel.
_jit = functools.partial(jax.jit, static_argnames=("tuning", "interpret"))


@_jit
def matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"],
    residual: Float[Array, "M N"] | None = None,
    *,
    tuning: Tuning,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    if residual is not None and tuning.split_k == 1:
        return _launch("residual", x, w, residual, tuning, interpret)
    out = _sum_splits(_launch("matmul", x, w, None, tuning, interpret))
    return out.astype(x.dtype) if residual is None else add_residual(out, residual)


@_jit
def partial_products(
    x: Float[Array, "M K"], w: Float[Array, "K N"], *, tuning: Tuning, interpret: bool = False
) -> Float[Array, "S M N"]:
    """The float32 sums of a split over K, which the caller adds."""
    assert tuning.split_k > 1, f"{tuning} has one piece"
    return _launch("matmul", x, w, None, tuning, interpret)


@functools.partial(jax.jit, static_argnames=("firsts", "tuning", "interpret"))
def gate_up(
    x: Float[Array, "M K"],
    w: Float[Array, "K FF"],
    firsts: Firsts | None = None,
    *,
    tuning: Tuning,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    firsts = firsts or (0, w.shape[1] // 2)
    if tuning.split_k == 1:
        return _launch("gate_up", x, w, None, tuning, interpret, firsts)
    out = _sum_splits(_launch("matmul", x, w, None, tuning, interpret))
    return silu_times(*halves(out, firsts), x.dtype)


@_jit
def head_argmax(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, tuning: Tuning, interpret: bool = False
) -> Int[Array, " M"]:
    return head_largest(x, head, tuning=tuning, interpret=interpret)[0]


@_jit
def head_largest(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, tuning: Tuning, interpret: bool = False
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    found = _launch("head_argmax", x, head, None, tuning, interpret)  # [C, M rounded up]
    best, index = (a[:, : x.shape[0]] for a in found)
    return largest_of_all(best, index, head.shape[0])


@_jit
def head_confidence(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, tuning: Tuning, interpret: bool = False
) -> tuple[Int[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    found = _launch("head_confidence", x, head, None, tuning, interpret)  # [C, M rounded up]
    best, index, total = (a[:, : x.shape[0]] for a in found)
    return best_of_all(best, index, total, head.shape[0])


def best_of_all(
    best: Float[Array, "C M"], index: Int[Array, "C M"], total: Float[Array, "C M"], vocab: int
) -> tuple[Int[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """`largest_of_all`, and the sum of exp(value - largest) of some parts' sums."""
    ids, largest = largest_of_all(best, index, vocab)
    return ids, largest, jnp.sum(total * jnp.exp(best - largest), axis=0)


def largest_of_all(
    best: Float[Array, "C M"], index: Int[Array, "C M"], vocab: int
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    """The lowest id of the largest value of some parts', and the value."""
    largest = best.max(axis=0)
    return jnp.where(best == largest, index, vocab).min(axis=0), largest


@_jit
def head_logits(
    x: Float[Array, "M K"], head: Float[Array, "V K"], *, tuning: Tuning, interpret: bool = False
) -> Float[Array, "M V"]:
    """ValueError for a V that is no multiple of 4: TMA writes rows of whole 16 bytes."""
    if head.shape[0] % 4:
        raise ValueError(f"mosaic_gpu head_logits takes V in 4s, got {head.shape[0]}: use 'xla'")
    return _launch("head_logits", x, head, None, tuning, interpret)


def _sum_splits(out):
    """[S, M, N] partial sums, added in the order of K; an unsplit result passes through."""
    return out if out.ndim == 2 else functools.reduce(jnp.add, list(out))


def plan_for(op: str, x, w, tuning: Tuning) -> Plan:
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise ValueError(f"mosaic_gpu {op} takes bfloat16, got {x.dtype} and {w.dtype}")
    K, N = w.shape[::-1] if op in HEADS else w.shape
    if x.shape[1] != K:
        raise ValueError(f"{op}: x has {x.shape[1]} columns to sum over, w {K}")
    return make_plan(op, x.shape[0], K, N, tuning)


def _launch(op, x, w, residual, tuning, interpret, firsts=(0,)):
    """Runs the kernel: [M, N], or [S, M, N] float32 partial sums, or the argmax's two [C, M']."""
    M = len(x)
    if M > SWIZZLED_ROWS and M % SWIZZLED_ROWS:  # TMA takes whole tiles, or one that is not full
        missing = ((0, -M % SWIZZLED_ROWS), (0, 0))
        x, residual = (None if a is None else jnp.pad(a, missing) for a in (x, residual))
        out = _launch(op, x, w, residual, tuning, interpret, firsts)
        return out if op in ARGMAX else out[..., :M, :]
    plan, t = plan_for(op, x, w, tuning), tuning
    padded = pl.cdiv(plan.M, t.block_m) * t.block_m
    if op in ARGMAX:
        out = (plan.clusters * t.cluster_n, padded)
        types = (jnp.float32, jnp.int32, jnp.float32)[: 2 + (op == "head_confidence")]
        out_type = tuple(jax.ShapeDtypeStruct(out, dtype) for dtype in types)
    else:
        shape = (plan.M, plan.N // plan.halves)
        shape = (t.split_k, *shape) if plan.split else shape
        out_type = jax.ShapeDtypeStruct(shape, out_dtype(plan))
    launch = plgpu.kernel(
        functools.partial(kernel, plan=plan, firsts=firsts),
        out_type=out_type,
        scratch_types=scratch(plan),
        grid=(plan.row_groups * plan.clusters,),
        grid_names=("cluster",),
        cluster=(t.cluster_m, t.cluster_n),
        cluster_names=("m", "n"),
        num_threads=plan.consumers + 1,
        thread_name="wg",
        kernel_name=f"matmul_{op}",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return launch(x, w) if residual is None else launch(x, w, residual)
