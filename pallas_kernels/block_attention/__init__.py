"""Attention of a speculative block against a cache: the contract, the backends and their choice.

Axes: B batch, T query tokens, S cache slots, N query heads, K KV heads, G = N / K, H head dim.
The block's own keys and values already lie in the cache, at slots lengths[b] … lengths[b] + T - 1;
slot and position are one, but for a `ring`. Query i of sequence b, at position p = lengths[b] + i,
sees
- every slot below lengths[b] (its context), and
- slot lengths[b] + j of the block when j < widths[b] and, if causal, also j <= i;
- of these, with a window, only slots s with p - s < window and, if not causal, s - p < window.
A causal window is transformers' sliding window; the two-sided one is dflash's, whose far ends are
window - 1 away (transformers' own bidirectional mask reaches one further).

With `ring` (and a window) a cache may hold fewer slots than positions: position p lies at slot
p % S, so slot s holds the last position of its kind below lengths[b] + T, or none yet. S must be
window + T - 1 at least, unless no position reaches S.

A slot that no query of the block can see (at or above lengths + widths, or at or below
lengths - window) may hold anything, NaN included, without effect; the others must be finite. Rows
i >= widths[b] are padding: finite, of no meaning. A row that sees nothing is 0.

Query head n reads KV head n // G. A score is q·k * scale; softcap makes it
softcap * tanh(score / softcap); sinks[n] is one more logit in head n's softmax, with no value.
Scores, softmax and sums are float32, the result has q's dtype.
"""

from importlib import import_module
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BACKENDS = ("mosaic_gpu", "triton", "xla", "reference")
# What the two kernels take, the better one first; xla and reference take any sizes and types.
MAX_WIDTH, MAX_GROUPS, HEAD_DIMS = 32, 16, (64, 128, 256)
KERNEL_DTYPES = {"mosaic_gpu": ("bfloat16",), "triton": ("bfloat16", "float32")}


class Sizes(NamedTuple):
    """What a backend must be able to take: T, G, H and the dtype of q and the cache."""

    width: int
    groups: int
    head_dim: int
    dtype: Any


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    backend: str,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
) -> Float[Array, "B T N H"]:
    """See the module's contract.

    A backend that is not one of BACKENDS or lacks these sizes is a ValueError. The device is not
    looked at, since a program may be compiled for another: `check_backend` does that, once.
    """
    T, N, H = q.shape[1:]
    check_backend(backend, Sizes(T, N // k.shape[2], H, k.dtype))
    if not q.dtype == k.dtype == v.dtype and backend in KERNEL_DTYPES:
        raise ValueError(
            f"attention backend {backend!r} takes one dtype, not q {q.dtype}, k {k.dtype} and "
            f"v {v.dtype}: use 'xla'"
        )
    if window is not None and window < 1:
        raise ValueError(f"block attention's window is {window}: it must be at least 1, or None")
    if ring and window is None:
        raise ValueError("a ring of block attention needs a window: it holds no other positions")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"block attention's softcap is {softcap}: it must be above 0, or None")
    # Imported when asked for: users of one backend do not need the compiler of another.
    attend = import_module(f"{__name__}.{backend}").block_attention
    return attend(
        q, k, v, lengths, widths,
        causal=causal, scale=scale, window=window, sinks=sinks, softcap=softcap, ring=ring,
    )  # fmt: skip


def check_backend(backend: str, sizes: Sizes, device: Any = None) -> None:
    """Raises ValueError, with the reason and what to use instead, if `backend` cannot do this.

    `device` is the jax.Device that is to run it, or None to leave it out of the question.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"block attention has no backend {backend!r}: use one of {', '.join(BACKENDS)}"
        )
    reason = _lacks(backend, sizes) or (device is not None and cannot_run(backend, device))
    if reason:
        instead = "xla" if device is None else default_backend(device, sizes)
        raise ValueError(f"attention backend {backend!r} {reason}: use {instead!r}")


def default_backend(device: Any, sizes: Sizes | None = None) -> str:
    """The backend for a jax.Device: mosaic_gpu on sm90, triton on others from sm80, else xla.

    With `sizes`, the best that also takes them: float32 on sm90 is triton's.
    """
    kernels = (name for name in KERNEL_DTYPES if not cannot_run(name, device))
    return next((name for name in kernels if sizes is None or not _lacks(name, sizes)), "xla")


def _lacks(backend: str, sizes: Sizes) -> str | None:
    if backend not in KERNEL_DTYPES:
        return None
    if sizes.head_dim not in HEAD_DIMS:
        return f"has head dims {', '.join(map(str, HEAD_DIMS))}, not {sizes.head_dim}"
    if not 1 <= sizes.width <= MAX_WIDTH:
        return f"has blocks of 1 to {MAX_WIDTH} tokens, not {sizes.width}"
    if not 1 <= sizes.groups <= MAX_GROUPS:
        return f"has 1 to {MAX_GROUPS} query heads a KV head, not {sizes.groups}"
    dtypes, dtype = KERNEL_DTYPES[backend], jnp.dtype(sizes.dtype).name
    if dtype not in dtypes:
        return f"has caches of {' and '.join(dtypes)}, not {dtype}"
    return None


def cannot_run(backend: str, device: Any) -> str | None:
    """Why a jax.Device runs no kernel of this kind, whichever operation's; None if it does."""
    major, minor = _compute_capability(device)
    here = f"sm{major}{minor}" if major else f"a {device.platform} device"
    if backend == "mosaic_gpu" and major != 9:  # wgmma is sm90's own: sm100 and sm120 lack it
        return f"needs an NVIDIA GPU of compute capability 9.x, and this is {here}"
    if backend == "triton" and major < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or more, and this is {here}"
    return None


def _compute_capability(device: Any) -> tuple[int, int]:
    """(9, 0) for sm90; (0, 0) for what is no NVIDIA GPU (other makers' say "gfx942" there)."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if device.platform not in ("gpu", "cuda") or not (major.isdigit() and minor.isdigit()):
        return 0, 0
    return int(major), int(minor)
