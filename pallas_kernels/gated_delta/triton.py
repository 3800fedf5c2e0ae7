"""The gated delta rule by chunks in Pallas-Triton: a state stays on chip for all chunks of a call.

One program has a sequence, a value head and some of its columns. It reads rows where they lie, in
the memory or in the call, walks the chunks that hold any, and writes the state at its border and
the new rows' outputs in place. A chunk is computed by one loop body whatever the call's length is,
and sums of products are the tensor cores' in three parts of TF32, which is float32 up to 2^-21.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta.grid import CHUNK, Memory, Rows
from pallas_kernels.in_pairs import sum_in_pairs

COLUMNS = 64  # of a state in one program, at most
ROWS = 16  # of a program that makes inputs or norms, whatever the call's length is
ONCE = plt.CompilerParams(num_warps=4, num_stages=1)


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


@functools.partial(jax.jit, static_argnames="interpret")
def gated_delta(
    q: Float[Array, "B T Hk dk"],
    rows: Rows,
    memory: Memory,
    start: Int[Array, " B"],
    real: Int[Array, " B"],
    border: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T Hv dv"], Memory]:
    """The contract's; the memory then begins at `border`."""
    B, T = q.shape[:2]
    Hv, _, dv = memory.state.shape[1:]
    columns = min(dv, COLUMNS)
    places = memory.base, start, real, border
    out, state = pl.pallas_call(
        functools.partial(_walk, columns=columns, exact=interpret),
        name="gated_delta",
        grid=(dv // columns, Hv, B),
        out_shape=(
            jax.ShapeDtypeStruct((B, T, Hv, dv), jnp.float32),
            jax.typeof(memory.state),
        ),
        input_output_aliases={13: 1},
        compiler_params=ONCE,
        interpret=interpret,
    )(*places, q, *rows, *memory.rows, memory.state)
    kept = pl.pallas_call(
        _keep,
        name="gated_delta_rows",
        grid=(Hv, B),
        out_shape=tuple(jax.typeof(x) for x in memory.rows),
        input_output_aliases={7 + i: i for i in range(4)},
        compiler_params=ONCE,
        interpret=interpret,
    )(*places[1:], *rows, *memory.rows)
    return out, Memory(state, border, Rows(*kept))


def _walk(
    base_ref, start_ref, real_ref, border_ref, q_ref, k_ref, v_ref, g_ref, beta_ref,
    old_k_ref, old_v_ref, old_g_ref, old_beta_ref, state_ref, out_ref, kept_ref,
    *, columns: int, exact: bool,
):  # fmt: skip
    h, b = pl.program_id(1), pl.program_id(2)
    T, (Hk, dk), Hv = q_ref.shape[1], q_ref.shape[2:], v_ref.shape[2]
    key, key_head = jnp.arange(dk), lax.div(h, jnp.int32(Hv // Hk))
    column = pl.program_id(0) * columns + jnp.arange(columns)
    base, start, real = base_ref[b], start_ref[b], real_ref[b]
    kept = lax.div(border_ref[b] - base, jnp.int32(CHUNK))
    row = jnp.arange(CHUNK)

    def chunk(i, state):
        place = i * CHUNK + row
        ahead = base + place - start
        old, new = ahead < 0, (ahead >= 0) & (ahead < real)
        ring = lax.rem(base + place, jnp.int32(2 * CHUNK))

        def laid(before, given, *rest):
            earlier = read(before, old, b, ring, *rest)
            return earlier + read(given, new, b, jnp.maximum(ahead, 0), *rest)

        k = laid(old_k_ref, k_ref, key_head, key)
        v = laid(old_v_ref, v_ref, h, column)
        g, beta = laid(old_g_ref, g_ref, h), laid(old_beta_ref, beta_ref, h)
        q = read(q_ref, new, b, jnp.maximum(ahead, 0), key_head, key)
        here = jnp.broadcast_to(i == kept, key.shape)
        write(kept_ref, state, here, b, h, key, column)
        out, state = _chunk(state, q, k, v, g, beta, exact)
        asked = (ahead >= 0) & (ahead < T)
        write(out_ref, out, asked, b, jnp.maximum(ahead, 0), h, column)
        return state

    state = plt.load(at(state_ref, b, h, key, column))
    count = lax.div(start - base + T + CHUNK - 1, jnp.int32(CHUNK))
    state = lax.fori_loop(0, count, chunk, state)
    write(kept_ref, state, jnp.broadcast_to(kept == count, key.shape), b, h, key, column)


def _chunk(state, q, k, v, g, beta, exact: bool):
    """Outputs of one chunk, and the state after it; the formulas are those of `xla`."""

    def dot(x, y, axis: int = 1):
        """Σ over x's `axis` and y's first."""
        how = lax.Precision.HIGHEST if exact else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return lax.dot_general(
            x, y, (((axis,), (0,)), ((), ())),
            precision=how, preferred_element_type=jnp.float32,
        )  # fmt: skip

    row = jnp.arange(CHUNK)
    lower, before = row[:, None] >= row[None, :], row[:, None] > row[None, :]
    sums = sum_in_pairs(jnp.where(lower, g[None, :], 0.0))
    total = sum_in_pairs(g)
    decays = jnp.exp(jnp.where(lower, sums[:, None] - sums[None, :], -jnp.inf))
    past = jnp.exp(sums)[:, None]

    one = jnp.where(row[:, None] == row[None, :], 1.0, 0.0)
    A = jnp.where(before, beta[:, None] * dot(k, k.T) * decays, 0.0)
    power, inverse = A, one - A
    for _ in range(3):
        power = dot(power, power)
        inverse = dot(inverse, one + power)
    change = dot(inverse, beta[:, None] * (v - past * dot(k, state)))
    out = past * dot(q, state) + dot(dot(q, k.T) * decays, change)
    left = k * jnp.exp(total - sums)[:, None]
    return out, jnp.exp(total) * state + dot(left, change, axis=0)


def _keep(start_ref, real_ref, border_ref, *refs):
    """Writes the rows that may still be rolled back into the memory: CHUNK of them at most."""
    given, rings = refs[:4], refs[8:]
    h, b = pl.program_id(0), pl.program_id(1)
    start = start_ref[b]
    position = jnp.maximum(border_ref[b], start) + jnp.arange(CHUNK)
    row, place = position - start, lax.rem(position, jnp.int32(2 * CHUNK))
    for one, ring in zip(given, rings, strict=True):
        heads, *width = ring.shape[2:]
        stays = (row < real_ref[b]) & (h < heads)
        rest = [jnp.minimum(h, heads - 1), *map(jnp.arange, width)]
        write(ring, read(one, stays, b, row, *rest), stays, b, place, *rest)


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def inputs(
    raw: Float[Array, "B _ D"],
    b: Float[Array, "B T Hv"],
    a: Float[Array, "B T Hv"],
    weights: Float[Array, "D U"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    heads: tuple[int, int],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T Hk dk"], Rows]:
    """The contract's; `heads` are Hk and dk."""
    B, T, Hv = b.shape
    Hk, dk = heads
    keys = (B, T, Hk, dk)
    shapes = keys, keys, (B, T, Hv, (raw.shape[2] - 2 * Hk * dk) // Hv), b.shape, b.shape
    q, *rows = pl.pallas_call(
        _make_inputs,
        name="gated_delta_inputs",
        grid=(2 * Hk + Hv, pl.cdiv(T, ROWS), B),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=ONCE,
        interpret=interpret,
    )(raw, b, a, weights, a_log, dt_bias)
    return q, Rows(*rows)


def _make_inputs(
    raw_ref, b_ref, a_ref, weights_ref, a_log_ref, dt_bias_ref,
    q_ref, k_ref, v_ref, g_ref, beta_ref,
):  # fmt: skip
    (Hk, dk), dv = q_ref.shape[2:], v_ref.shape[3]
    head, b = pl.program_id(0), pl.program_id(2)
    row = pl.program_id(1) * ROWS + jnp.arange(ROWS)
    real = row < q_ref.shape[1]

    def mixed(first, width: int):
        column = first + jnp.arange(width)
        total = jnp.zeros((ROWS, width), jnp.float32)
        for tap in range(weights_ref.shape[1]):
            weight = plt.load(at(weights_ref, column, tap)).astype(jnp.float32)
            x = read(raw_ref, real, b, row + tap, column).astype(jnp.float32)
            total += weight[None, :] * x
        total = total / (1 + jnp.exp(-total))
        return total.astype(raw_ref.dtype).astype(jnp.float32)

    def unit(x):
        return x * lax.rsqrt(sum_in_pairs(x * x) + 1e-6)[:, None]

    @pl.when(head < Hk)
    def _():
        q = unit(mixed(head * dk, dk)) * dk**-0.5
        write(q_ref, q, real, b, row, head, jnp.arange(dk))

    @pl.when((head >= Hk) & (head < 2 * Hk))
    def _():
        k = unit(mixed(head * dk, dk))
        write(k_ref, k, real, b, row, head - Hk, jnp.arange(dk))

    @pl.when(head >= 2 * Hk)
    def _():
        h = head - 2 * Hk
        v = mixed(2 * Hk * dk + h * dv, dv)
        write(v_ref, v, real, b, row, h, jnp.arange(dv))
        x = read(a_ref, real, b, row, h).astype(jnp.float32) + dt_bias_ref[h].astype(jnp.float32)
        softplus = jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
        write(g_ref, -jnp.exp(a_log_ref[h].astype(jnp.float32)) * softplus, real, b, row, h)
        x = read(b_ref, real, b, row, h).astype(jnp.float32)
        write(beta_ref, 1 / (1 + jnp.exp(-x)), real, b, row, h)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def gated_norm(
    out: Float[Array, "B T Hv dv"],
    z: Float[Array, "B T Hv dv"],
    scale: Float[Array, " dv"],
    eps: float,
    *,
    interpret: bool = False,
) -> Float[Array, "B T Hv dv"]:
    """The contract's."""
    flat = [x.reshape(-1, x.shape[-1]) for x in (out, z)]
    return pl.pallas_call(
        functools.partial(_norm, eps=eps),
        name="gated_norm",
        grid=(pl.cdiv(len(flat[0]), ROWS),),
        out_shape=jax.ShapeDtypeStruct(flat[1].shape, z.dtype),
        compiler_params=ONCE,
        interpret=interpret,
    )(*flat, scale).reshape(z.shape)


def _norm(out_ref, z_ref, scale_ref, normed_ref, *, eps: float):
    count, width = out_ref.shape
    row, column = pl.program_id(0) * ROWS + jnp.arange(ROWS), jnp.arange(width)
    x, z = (read(ref, row < count, row, column) for ref in (out_ref, z_ref))
    x, z, dtype = x.astype(z.dtype).astype(jnp.float32), z.astype(jnp.float32), z.dtype
    normed = x * lax.rsqrt(sum_in_pairs(x * x) / width + eps)[:, None]
    scaled = (plt.load(scale_ref.at[column])[None, :] * normed.astype(dtype)).astype(jnp.float32)
    write(normed_ref, scaled * (z / (1 + jnp.exp(-z))), row < count, row, column)
