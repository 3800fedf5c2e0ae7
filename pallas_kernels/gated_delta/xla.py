"""The gated delta rule by chunks, all rows of a chunk at once: a scan that XLA compiles.

For one chunk, with G the running sum of g, E_ij = e^(G_i - G_j) for j ≤ i, and S the state before:
    A_ij = beta_i (k_i · k_j) E_ij for j < i;      U = (1 + A)^-1 beta (v - e^G k S)
    out = e^G q S + ((q kᵀ) ∘ E) U;                S' = e^(G_last) S + Σ_j e^(G_last - G_j) k_j U_j
A is nilpotent, so that (1 + A)^-1 = (1 - A)(1 + A²)(1 + A⁴)(1 + A⁸) for CHUNK = 16.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.grid import CHUNK, Rows
from pallas_kernels.gated_delta.reference import convolve as convolve
from pallas_kernels.gated_delta.reference import gated_norm as gated_norm
from pallas_kernels.gated_delta.reference import gates as gates
from pallas_kernels.gated_delta.reference import unit as unit


def scan(
    state: Float[Array, "B Hv dk dv"],
    q: Float[Array, "B N C Hk dk"],
    rows: Rows,
    kept: Int[Array, " B"],
    rounded: Callable[[Any], Any] = lambda x: x,
) -> tuple[Float[Array, "B N C Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Outputs of all rows, and the state after the first `kept` chunks; one body for all chunks.

    `rounded` keeps a product apart from the sum that follows it.
    """
    N, repeats = q.shape[1], rows.v.shape[3] // q.shape[3]
    heads = [jnp.repeat(x, repeats, axis=3) for x in (q, rows.k)] + [rows.v]
    by_chunk = [x.transpose(1, 0, 3, 2, 4) for x in heads]  # [N, B, Hv, C, d]
    by_chunk += [x.transpose(1, 0, 3, 2) for x in (rows.g, rows.beta)]

    def one(carry, chunk):
        state, keep, i = carry
        keep = jnp.where((i == kept)[:, None, None, None], state, keep)
        q, k, v, g, beta = chunk
        out, state = body(state, q, k, v, g, beta, rounded)
        return (state, keep, i + 1), out

    (state, keep, _), out = lax.scan(one, (state, state, jnp.int32(0)), tuple(by_chunk))
    keep = jnp.where((kept == N)[:, None, None, None], state, keep)
    return out.transpose(1, 0, 3, 2, 4), keep


def body(state, q, k, v, g, beta, rounded):
    """Outputs [B, Hv, C, dv] of one chunk, and the state after it."""

    def dot(x, y):
        return rounded(jnp.matmul(*rounded((x, y)), precision="highest"))

    row = jnp.arange(CHUNK)
    sums = [g[..., 0]]
    for i in range(1, CHUNK):
        sums.append(sums[-1] + g[..., i])
    sums = jnp.stack(sums, axis=-1)
    ahead = sums[..., :, None] - sums[..., None, :]
    decays = jnp.exp(rounded(jnp.where(row[:, None] >= row, ahead, -jnp.inf)))
    past = jnp.exp(rounded(sums))[..., None]

    mixed = rounded(beta[..., None] * dot(k, k.swapaxes(-1, -2))) * decays
    A = rounded(jnp.where(row[:, None] > row, mixed, 0))
    power, inverse, one = A, jnp.eye(CHUNK) - A, jnp.eye(CHUNK)
    for _ in range(3):
        power = dot(power, power)
        inverse = dot(inverse, one + power)
    wanted = rounded(beta[..., None] * (v - rounded(past * dot(k, state))))
    change = dot(inverse, wanted)

    within = dot(rounded(dot(q, k.swapaxes(-1, -2)) * decays), change)
    out = rounded(past * dot(q, state)) + within
    left = rounded(jnp.swapaxes(k * decays[..., -1, :, None], -1, -2))
    return out, rounded(past[..., -1:, :] * state) + dot(left, change)
