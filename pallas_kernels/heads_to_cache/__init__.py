"""From a fused projection to queries and a written cache: head norms, RoPE, and the rows' places.

Axes: P pieces, B batch, T rows, C columns, S cache slots, N query heads, K KV heads, H head dim.
The projection is the sum of the P pieces of `x` in float32, rounded to the caches' dtype (P = 1:
the piece itself, in that dtype). It holds N query heads, K key heads and K value heads, each kind
side by side from its column of `firsts` on. Queries and keys are normed per head if scales are
given (x / rms in float32, rounded to the scale's dtype, times scale), then rotated (halves of a
head, i with i + H/2, in float32 by the given cosines and sines). With
`value_norm` values are x / rms, rounded once; they may have the keys' columns.
Row t of sequence b goes to slots[b, t] of its caches, or of the one [1, S, K, H] that all share; a
slot at or past S is dropped. Slots must be distinct within a cache, the dropped ones too, and
rising unless `rising` is false. Returns q [B, T, N, H] and the caches, which are updated in place
where the caller no longer uses the old ones.

"xla" and "reference" (one and the same: short jnp) run anywhere, "triton" on NVIDIA GPUs from sm80,
"cpu" on CPUs. The last two promise that a row's bits are the same in every program, whatever P is.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.choice import backend_of, device_refusal
from pallas_kernels.heads_to_cache import cpu, reference, triton

BACKENDS = {"triton": triton, "cpu": cpu, "xla": reference, "reference": reference}


class Sizes(NamedTuple):
    """What a backend must be able to take."""

    head_dim: int


class Heads(NamedTuple):
    """Where the heads lie in `x`, and how they are normed. Static."""

    num_heads: int  # N; 0 if there are only keys and values
    num_kv_heads: int
    head_dim: int
    eps: float
    firsts: tuple[int, int, int]  # columns of the first query, key and value head
    value_norm: bool = False  # values are normed too, without a scale


def heads_to_cache(
    x: Float[Array, "P B T C"],
    q_scale: Float[Array, " H"] | None,
    k_scale: Float[Array, " H"] | None,
    cos: Float[Array, "B T _"],
    sin: Float[Array, "B T _"],
    k: Float[Array, "caches S K H"],
    v: Float[Array, "caches S K H"],
    slots: Int[Array, "B T"],
    *,
    heads: Heads,
    backend: str,
    rising: bool = True,
) -> tuple[Float[Array, "B T N H"], Float[Array, "caches S K H"], Float[Array, "caches S K H"]]:
    """See the module's contract. cos and sin are float32 [B, T, H / 2].

    `backend` is one of BACKENDS; any other name is a ValueError.
    """
    op = backend_of("heads_to_cache", backend, BACKENDS).heads_to_cache
    return op(x, q_scale, k_scale, cos, sin, k, v, slots, heads=heads, rising=rising)


def split_heads(
    x: Float[Array, "P B T C"],
    q_scale: Float[Array, " H"] | None,
    k_scale: Float[Array, " H"] | None,
    cos: Float[Array, "B T _"],
    sin: Float[Array, "B T _"],
    *,
    heads: Heads,
    dtype: DTypeLike,
    backend: str,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """The same queries, keys and values in `dtype`, not written. ValueError as `heads_to_cache`."""
    op = backend_of("heads_to_cache", backend, BACKENDS).split_heads
    return op(x, q_scale, k_scale, cos, sin, heads, dtype)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    if backend == "cpu":
        return device_refusal("cpu", device)
    if backend != "triton":
        return None
    if sizes.head_dim & (sizes.head_dim - 1):  # it cuts heads in halves
        return f"has head dims that are powers of two, not {sizes.head_dim}"
    return device_refusal("triton", device)
