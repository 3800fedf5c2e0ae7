"""What is made of rows before and after the rule, in Pallas-Triton: its inputs, and their norm.

Both kernels read their columns out of the whole projection, where the product has left them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.grid import CHUNK, Memory, Rows
from pallas_kernels.gated_delta.in_ring import put
from pallas_kernels.in_pairs import sum_in_pairs

ROWS = 16  # of a program at most
ROWS_OF_A_WARP = 4


def rows_of(count: int) -> int:
    """Rows of a program of a call of `count` rows; no number of them changes a bit of a row."""
    return min(ROWS, 1 << (count - 1).bit_length())


def warps_of(rows: int) -> plt.CompilerParams:
    return plt.CompilerParams(num_warps=pl.cdiv(rows, ROWS_OF_A_WARP), num_stages=1)


def at(ref, *index):
    """The entries of an array's axes, each an integer or a vector: two vectors at most."""
    vectors = [i for i in index if jnp.ndim(i)]
    shape = tuple(v.size for v in vectors)
    made, axis = [], 0
    for i in index:
        if jnp.ndim(i):
            i = jnp.expand_dims(i, [a for a in range(len(shape)) if a != axis])
            axis += 1
        made.append(jnp.broadcast_to(i, shape))
    return ref.at[tuple(made)]


def read(ref, mask, *index):
    """`at`, where `mask` holds along the first vector, and zeros elsewhere."""
    where = at(ref, *index)
    shape = tuple(i.size for i in index if jnp.ndim(i))
    mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (len(shape) - 1)), shape)
    return plt.load(where, mask=mask, other=0.0)


def write(ref, value, mask, *index):
    mask = jnp.broadcast_to(mask.reshape(-1, *[1] * (value.ndim - 1)), value.shape)
    plt.store(at(ref, *index), value.astype(ref.dtype), mask=mask)


@functools.partial(jax.jit, static_argnames=("heads", "firsts", "interpret"))
def next_inputs(
    fused: Float[Array, "B T F"],
    ring: Float[Array, "B R D"],
    weights: Float[Array, "D U"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    start: Int[Array, " B"],
    real: Int[Array, " B"],
    heads: tuple[int, int],
    firsts: tuple[int, int, int],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T Hk dk"], Rows, Float[Array, "B R D"]]:
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
        input_output_aliases={3: 5} if in_place else {},
        compiler_params=warps_of(size),
        interpret=interpret,
    )(start, real, fused, ring, weights, a_log, dt_bias)
    if in_place:
        *rows, ring = rows
    else:
        ring = put(ring, fused[..., firsts[0] : firsts[0] + D], start, real)
    return q, Rows(*rows), ring


def _make_inputs(
    start_ref, real_ref, fused_ref, ring_ref, weights_ref, a_log_ref, dt_bias_ref,
    q_ref, k_ref, v_ref, g_ref, beta_ref, *kept_refs, size, heads, firsts, exact,
):  # fmt: skip
    (Hk, dk), dv, (R, _), taps = heads, v_ref.shape[3], ring_ref.shape[1:], weights_ref.shape[1]
    first, first_b, first_a = firsts
    head, b = pl.program_id(0), pl.program_id(2)
    row = pl.program_id(1) * size + jnp.arange(size)
    start, inside = start_ref[b], row < q_ref.shape[1]
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
            x = given.astype(jnp.float32) + read(ring_ref, earlier, b, place, column)
            total += weight[None, :] * x
        total = total / (1 + jnp.exp(-total))

        def keep():
            for kept_ref in kept_refs:
                write(kept_ref, given, real, b, lax.rem(start + row, jnp.int32(R)), column)

        return total.astype(fused_ref.dtype).astype(jnp.float32), keep

    def unit(x):
        return x * lax.rsqrt(sum_in_pairs(_squares(x, exact)) + 1e-6)[:, None]

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


def _squares(x, exact: bool):
    """x · x, which no compiler joins with the sum that follows: whether it would hangs on which
    thread has a neighbour. An interpreter has no such operation."""
    if exact:
        return x * x
    (squares,) = plt.elementwise_inline_asm(
        "mul.rn.f32 $0, $1, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return squares


@functools.partial(jax.jit, static_argnames=("first", "eps", "interpret"))
def finish(
    out: Float[Array, "B T Hv dv"],
    fused: Float[Array, "B T F"],
    first: int,
    scale: Float[Array, " dv"],
    eps: float,
    rows: Rows,
    memory: Memory,
    start: Int[Array, " B"],
    real: Int[Array, " B"],
    kept: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T Hv dv"], Memory]:
    """The contract's; the memory then begins at start + kept.

    Its base and its rows lie where they lay, so that a loop of steps copies none of them.
    """
    B, T, Hv, _ = out.shape
    size = rows_of(T)
    rest = memory.base, *memory.rows
    normed, base, *rings = pl.pallas_call(
        functools.partial(_finish, size=size, first=first, eps=eps, exact=interpret),
        name="gated_delta_finish",
        grid=(Hv, pl.cdiv(T, size), B),
        out_shape=(
            jax.ShapeDtypeStruct(out.shape, fused.dtype), *(jax.typeof(x) for x in rest)
        ),
        input_output_aliases={10 + i: 1 + i for i in range(len(rest))},
        compiler_params=warps_of(size),
        interpret=interpret,
    )(start, real, kept, out, fused, scale, *rows, *rest)  # fmt: skip
    return normed, Memory(memory.state, base, Rows(*rings))


def _finish(
    start_ref, real_ref, kept_ref, out_ref, fused_ref, scale_ref, *refs, size, first, eps, exact
):
    """The norm of some rows of a head; its first program writes the base, and the rows that may
    still be rolled back, ROWS at most, into the memory."""
    given, (normed_ref, base_ref, *rings) = refs[:4], refs[9:]
    h, b, first_rows = pl.program_id(0), pl.program_id(2), pl.program_id(1) == 0
    start, real, kept = start_ref[b], real_ref[b], kept_ref[b]
    # All that a program reads is on its way before its first write, which no read may pass.
    later = kept + jnp.arange(size)
    held = [(ring, *_held(one, (later < real) & first_rows, b, later, h)) for one, ring in
            zip(given, rings, strict=True)]  # fmt: skip
    (T, _, width), dtype = out_ref.shape[1:], fused_ref.dtype
    row, column = pl.program_id(1) * size + jnp.arange(size), jnp.arange(width)
    inside = row < T
    x = read(out_ref, inside, b, row, h, column).astype(dtype).astype(jnp.float32)
    z = read(fused_ref, inside, b, row, first + h * width + column).astype(jnp.float32)
    normed = x * lax.rsqrt(sum_in_pairs(_squares(x, exact)) / width + eps)[:, None]
    scaled = (plt.load(scale_ref.at[column])[None, :] * normed.astype(dtype)).astype(jnp.float32)
    write(normed_ref, scaled * (z / (1 + jnp.exp(-z))), inside, b, row, h, column)

    place = lax.rem(start + later, jnp.int32(2 * CHUNK))
    for ring, rows, stays, rest in held:
        write(ring, rows, stays, b, place, *rest)

    @pl.when((h == 0) & first_rows)
    def _():
        base_ref[b] = start + kept


def _held(ref, stays, b, row, h):
    """A head's rows, which of them there are, and their place in a row; none of a head that is
    missing."""
    heads = ref.shape[2]
    stays, rest = stays & (h < heads), [jnp.minimum(h, heads - 1), *map(jnp.arange, ref.shape[3:])]
    return read(ref, stays, b, row, *rest), stays, rest
