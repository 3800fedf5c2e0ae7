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

COLUMNS = 16  # of a state in one program, at most
WARPS = 1
TILE = 8  # rows of a state whose sums are added in halves
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
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
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
    key_head = lax.div(h, jnp.int32(Hv // Hk))
    column = pl.program_id(0) * columns + jnp.arange(columns)
    keys = [first + jnp.arange(TILE) for first in range(0, dk, TILE)]
    base, start, real = base_ref[b], start_ref[b], real_ref[b]
    ahead, border = start - base, border_ref[b] - base

    def earlier(i):
        """Keys, value, decay and weight of the row i positions after the base, in the memory."""
        place = lax.rem(base + i, jnp.int32(2 * CHUNK))
        k = [plt.load(at(old_k_ref, b, place, key_head, key)) for key in keys]
        v = plt.load(at(old_v_ref, b, place, h, column))
        return k, v, old_g_ref[b, place, h], old_beta_ref[b, place, h]

    def given(i):
        """The same and the queries of the call's row i."""
        k, q = ([plt.load(at(x, b, i, key_head, key)) for key in keys] for x in (k_ref, q_ref))
        v = plt.load(at(v_ref, b, i, h, column))
        return (k, v, g_ref[b, i, h], beta_ref[b, i, h]), q

    def keep(tiles):
        for key, tile in zip(keys, tiles, strict=True):
            plt.store(at(kept_ref, b, h, key, column), tile)

    def replayed(i, carry):
        tiles, row = carry
        following = earlier(jnp.minimum(i + 1, ahead - 1))
        pl.when((i == border) & (i > 0))(lambda: keep(tiles))
        return _step(tiles, *row, exact), following

    def answered(i, carry):
        tiles, (row, q) = carry
        following = given(jnp.minimum(i + 1, real - 1))
        pl.when((ahead + i == border) & (border > 0))(lambda: keep(tiles))
        tiles = _step(tiles, *row, exact)
        plt.store(at(out_ref, b, i, h, column), _seen(q, tiles, exact))
        return tiles, following

    tiles = [plt.load(at(state_ref, b, h, key, column)) for key in keys]
    tiles, _ = lax.fori_loop(0, ahead, replayed, (tiles, earlier(0)))
    tiles, _ = lax.fori_loop(0, real, answered, (tiles, given(0)))
    pl.when((ahead + real == border) & (border > 0))(lambda: keep(tiles))

    def padding(i, _):
        plt.store(at(out_ref, b, i, h, column), jnp.zeros(columns))
        return _

    lax.fori_loop(real, T, padding, 0)


def _step(tiles, k, v, g, beta, exact: bool):
    """The state after one token."""
    tiles = [jnp.exp(g) * tile for tile in tiles]
    change = (beta * (v - _seen(k, tiles, exact)))[None, :]
    return [_fma(key[:, None], change, tile, exact) for key, tile in zip(k, tiles, strict=True)]


def _seen(vector, tiles, exact: bool):
    """vector · state: the tiles' products one after another, then rows of the sum in halves."""
    total = vector[0][:, None] * tiles[0]
    for x, tile in zip(vector[1:], tiles[1:], strict=True):
        total = _fma(x[:, None], tile, total, exact)
    while total.shape[0] > 1:
        total = total.reshape(2, -1, total.shape[1]).sum(axis=0)
    return total.reshape(-1)


def _fma(x, y, z, exact: bool):
    """x · y + z, rounded once; an interpreter has no such operation, and rounds twice."""
    if exact:
        return x * y + z
    x, y = (jnp.broadcast_to(each, z.shape) for each in (x, y))
    (total,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=[x, y, z], constraints="=f,f,f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(z.shape, z.dtype)],
    )  # fmt: skip
    return total


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
