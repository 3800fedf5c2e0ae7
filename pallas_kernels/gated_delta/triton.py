"""The gated delta rule row by row in Pallas-Triton: a state stays in registers for a whole call.

One program is a warp that has a sequence, a value head and some of its columns. It reads rows where
they lie, in the memory or in the call, and the next one while it works on this; it writes the new
rows' outputs, and in place the state before the first row that may be rolled back: written at each
call, few rows are computed again. A row is computed by one body wherever it comes from. Everything
is float32 on the cores' own units: the products of a chunk of rows, on tensor cores in three parts
of TF32, held more operands than a thread has registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.grid import CHUNK, Memory, Rows, Span
from pallas_kernels.gated_delta.triton_finish import finish as finish
from pallas_kernels.gated_delta.triton_inputs import next_inputs as next_inputs
from pallas_kernels.gated_delta.triton_rows import at

# Columns of a state in one program, at most; of one sequence, whose programs are few, half of them:
# with 16 and 8 batch 8 took 108.6 and 123.0 µs, batch 1 29.1 and 26.3 (an H200, 2026-11-23).
COLUMNS = 16
WARPS = 1
TILE = 8  # rows of a state whose sums are added in halves


@functools.partial(jax.jit, static_argnames="interpret")
def gated_delta(
    q: Float[Array, "B T Hk dk"],
    rows: Rows,
    memory: Memory,
    span: Span,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "S Hv dk dv"]]:
    """The contract's; the state is the one before row `kept`."""
    B, T = q.shape[:2]
    Hv, _, dv = memory.state.shape[1:]
    columns = min(dv, COLUMNS if B > 1 else COLUMNS // 2)
    return pl.pallas_call(
        functools.partial(_walk, columns=columns, exact=interpret),
        name="gated_delta",
        grid=(dv // columns, Hv, B),
        out_shape=(
            jax.ShapeDtypeStruct((B, T, Hv, dv), jnp.float32),
            jax.typeof(memory.state),
        ),
        input_output_aliases={14: 1},
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )(memory.base, *span[:3], span.places, q, *rows, *memory.rows, memory.state)


def _walk(
    base_ref, start_ref, real_ref, kept_ref, slots_ref, q_ref, k_ref, v_ref, g_ref, beta_ref,
    old_k_ref, old_v_ref, old_g_ref, old_beta_ref, state_ref, out_ref, kept_state_ref,
    *, columns: int, exact: bool,
):  # fmt: skip
    h, b = pl.program_id(1), pl.program_id(2)
    T, (Hk, dk), Hv = q_ref.shape[1], q_ref.shape[2:], v_ref.shape[2]
    key_head = lax.div(h, jnp.int32(Hv // Hk))
    column = pl.program_id(0) * columns + jnp.arange(columns)
    keys = [first + jnp.arange(TILE) for first in range(0, dk, TILE)]
    slot = slots_ref[b]
    base, real, kept = base_ref[slot], real_ref[b], kept_ref[b]
    ahead = start_ref[b] - base

    def earlier(i):
        """Keys, value, decay and weight of the row i positions after the base, in the memory."""
        place = lax.rem(base + i, jnp.int32(2 * CHUNK))
        k = [plt.load(at(old_k_ref, slot, place, key_head, key)) for key in keys]
        v = plt.load(at(old_v_ref, slot, place, h, column))
        return k, v, old_g_ref[slot, place, h], old_beta_ref[slot, place, h]

    def given(i):
        """The same of the call's row i, and its query."""
        q, k = ([plt.load(at(x, b, i, key_head, key)) for key in keys] for x in (q_ref, k_ref))
        v = plt.load(at(v_ref, b, i, h, column))
        return q, (k, v, g_ref[b, i, h], beta_ref[b, i, h])

    def keep(tiles):
        for key, tile in zip(keys, tiles, strict=True):
            plt.store(at(kept_state_ref, slot, h, key, column), tile)

    def replayed(i, carry):
        tiles, row = carry
        following = earlier(jnp.minimum(i + 1, ahead - 1))
        return _step(tiles, row, exact), following

    def answered(i, carry):
        tiles, (q, row) = carry
        following = given(jnp.minimum(i + 1, real - 1))
        pl.when((i == kept) & (ahead + kept > 0))(lambda: keep(tiles))
        tiles = _step(tiles, row, exact)
        plt.store(at(out_ref, b, i, h, column), _seen(q, tiles, exact))
        return tiles, following

    tiles, new = [plt.load(at(state_ref, slot, h, key, column)) for key in keys], given(0)
    tiles, _ = lax.fori_loop(0, ahead, replayed, (tiles, earlier(0)))
    tiles, _ = lax.fori_loop(0, real, answered, (tiles, new))
    pl.when((real == kept) & (ahead + kept > 0))(lambda: keep(tiles))

    def padding(i, _):
        plt.store(at(out_ref, b, i, h, column), jnp.zeros(columns))
        return _

    lax.fori_loop(real, T, padding, 0)


def _step(tiles, row, exact: bool):
    """The state after one token."""
    k, v, g, beta = row
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
