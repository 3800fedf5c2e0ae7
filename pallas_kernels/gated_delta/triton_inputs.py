"""The gated delta rule's inputs in Pallas-Triton.

The kernel reads its columns out of the whole projection, where the product has left them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.grid import Rows, Span
from pallas_kernels.gated_delta.in_ring import put
from pallas_kernels.gated_delta.triton_rows import ROWS, at, read, rows_of, squares, warps_of, write
from pallas_kernels.in_pairs import sum_in_pairs


@functools.partial(jax.jit, static_argnames=("heads", "firsts", "interpret"))
def next_inputs(
    fused: Float[Array, "B T F"],
    ring: Float[Array, "S R D"],
    weights: Float[Array, "D U"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    span: Span,
    heads: tuple[int, int],
    firsts: tuple[int, int, int],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T Hk dk"], Rows, Float[Array, "S R D"]]:
    """The contract's; `heads` are Hk and dk."""
    (B, T), (R, D), Hv = fused.shape[:2], ring.shape[1:], len(a_log)
    Hk, dk = heads
    keys, gates = (B, T, Hk, dk), (B, T, Hv)
    shapes = keys, keys, (*gates, (D - 2 * Hk * dk) // Hv), gates, gates
    made = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    # More rows would overwrite those that other programs read.
    in_place, size = T <= ROWS and T + weights.shape[1] - 1 <= R, rows_of(T)
    q, *rows = pl.pallas_call(
        functools.partial(_make_inputs, size=size, heads=heads, firsts=firsts, exact=interpret),
        name="gated_delta_inputs",
        grid=(2 * Hk + Hv, pl.cdiv(T, size), B),
        out_shape=made + [jax.typeof(ring)] * in_place,
        input_output_aliases={4: 5} if in_place else {},
        compiler_params=warps_of(size),
        interpret=interpret,
    )(*span[:2], span.places, fused, ring, weights, a_log, dt_bias)
    if in_place:
        *rows, ring = rows
    else:
        ring = put(ring, fused[..., firsts[0] : firsts[0] + D], span)
    return q, Rows(*rows), ring


def _make_inputs(
    start_ref, real_ref, slots_ref, fused_ref, ring_ref, weights_ref, a_log_ref, dt_bias_ref,
    q_ref, k_ref, v_ref, g_ref, beta_ref, *kept_refs, size, heads, firsts, exact,
):  # fmt: skip
    (Hk, dk), dv, (R, _), taps = heads, v_ref.shape[3], ring_ref.shape[1:], weights_ref.shape[1]
    first, first_b, first_a = firsts
    head, b = pl.program_id(0), pl.program_id(2)
    row = pl.program_id(1) * size + jnp.arange(size)
    start, slot, inside = start_ref[b], slots_ref[b], row < q_ref.shape[1]
    real = row < real_ref[b]

    # All that a program reads is on its way before its first write, which no read may pass.
    h = jnp.maximum(head - 2 * Hk, 0)
    decay, share = (
        read(fused_ref, real, b, row, x + h).astype(jnp.float32) for x in (first_a, first_b)
    )
    bias, rate = (x[h].astype(jnp.float32) for x in (dt_bias_ref, a_log_ref))

    def mixed(left, width: int):
        """The convolution's columns, and a function that keeps the call's rows of them."""
        column = left + jnp.arange(width)
        total, given = jnp.zeros((size, width), jnp.float32), None
        for tap in range(taps):
            weight = plt.load(at(weights_ref, column, tap)).astype(jnp.float32)
            ahead = row + (tap - taps + 1)  # of the call's first row
            seen = real & (ahead >= 0)
            given = read(fused_ref, seen, b, jnp.maximum(ahead, 0), first + column)
            place = lax.rem(jnp.maximum(start + ahead, 0), jnp.int32(R))
            earlier = real & (ahead < 0) & (start + ahead >= 0)
            x = given.astype(jnp.float32) + read(ring_ref, earlier, slot, place, column)
            total += weight[None, :] * x
        total = total / (1 + jnp.exp(-total))

        def keep():
            for kept_ref in kept_refs:
                write(kept_ref, given, real, slot, lax.rem(start + row, jnp.int32(R)), column)

        return total.astype(fused_ref.dtype).astype(jnp.float32), keep

    def unit(x):
        return x * lax.rsqrt(sum_in_pairs(squares(x, exact)) + 1e-6)[:, None]

    @pl.when(head < Hk)
    def _():
        x, keep = mixed(head * dk, dk)
        write(q_ref, unit(x) * dk**-0.5, inside, b, row, head, jnp.arange(dk))
        keep()

    @pl.when((head >= Hk) & (head < 2 * Hk))
    def _():
        x, keep = mixed(head * dk, dk)
        write(k_ref, unit(x), inside, b, row, head - Hk, jnp.arange(dk))
        keep()

    @pl.when(head >= 2 * Hk)
    def _():
        x, keep = mixed(2 * Hk * dk + h * dv, dv)
        write(v_ref, x, inside, b, row, h, jnp.arange(dv))
        keep()
        x = decay + bias
        softplus = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        write(g_ref, -jnp.exp(rate) * softplus, inside, b, row, h)
        write(beta_ref, 1 / (1 + jnp.exp(-share)), inside, b, row, h)
