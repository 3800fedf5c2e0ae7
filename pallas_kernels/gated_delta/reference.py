"""The gated delta rule token by token, and its inputs, in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.grid import CHUNK, Rows


def scan(
    state: Float[Array, "B Hv dk dv"],
    q: Float[Array, "B N C Hk dk"],
    rows: Rows,
    kept: Int[Array, " B"],
) -> tuple[Float[Array, "B N C Hv dv"], Float[Array, "B Hv dk dv"]]:
    """Outputs of all rows, and the state after the first `kept` chunks."""
    B, N, C = q.shape[:3]

    def one(carry, row):
        state, keep, i = carry
        keep = jnp.where((i == kept * CHUNK)[:, None, None, None], state, keep)
        out, state = step(state, *row)
        return (state, keep, i + 1), out

    flat = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(B, N * C, *x.shape[3:]), 1, 0), (q, *rows))
    (state, keep, _), out = lax.scan(one, (state, state, jnp.int32(0)), flat)
    keep = jnp.where((kept == N)[:, None, None, None], state, keep)
    return jnp.moveaxis(out, 0, 1).reshape(B, N, C, *out.shape[2:]), keep


def step(state, q, k, v, g, beta):
    """The output of one token, and the state after it."""
    q, k = (jnp.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in (q, k))
    state = jnp.exp(g)[..., None, None] * state
    seen = jnp.einsum("BHK,BHKV->BHV", k, state, precision="highest")
    change = beta[..., None] * (v - seen)
    state = state + k[..., None] * change[..., None, :]
    return jnp.einsum("BHK,BHKV->BHV", q, state, precision="highest"), state


def convolve(raw: Float[Array, "B _ D"], weights: Float[Array, "D U"]) -> Float[Array, "B T D"]:
    """SiLU of each row's sum over itself and the U - 1 rows before it, the oldest first."""
    taps = weights.shape[1]
    count = raw.shape[1] - taps + 1
    wide = raw.astype(jnp.float32)
    total = sum(weights[:, i].astype(jnp.float32) * wide[:, i : i + count] for i in range(taps))
    return jax.nn.silu(jnp.asarray(total)).astype(raw.dtype)


def unit(x: Float[Array, "*lead dk"]) -> Float[Array, "*lead dk"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def gates(a, b, a_log, dt_bias):
    """The logarithm of the state's decay, and the share of a correction."""
    return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias), jax.nn.sigmoid(b)


def gated_norm(out, z, scale, eps):
    x = out.astype(z.dtype).astype(jnp.float32)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    scaled = (scale * normed.astype(z.dtype)).astype(jnp.float32)
    return (scaled * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def recurrent(q, rows, fresh):
    """Outputs [B, T, Hv, dv] of whole rows; the state is 0 before each `fresh` token."""

    def one(state, row):
        new, *token = row
        out, state = step(jnp.where(new[:, None, None, None], 0, state), *token)
        return state, out

    state = jnp.zeros((len(q), *rows.v.shape[2:3], q.shape[-1], rows.v.shape[-1]))
    flat = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (fresh, q, *rows))
    return jnp.moveaxis(lax.scan(one, state, flat)[1], 0, 1)
