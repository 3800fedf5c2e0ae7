"""What follows the gated delta rule in Pallas-Triton: the gated norm, and the rows that are kept.

The kernel reads its columns out of the whole projection, where the product has left them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.grid import CHUNK, Memory, Rows, Span
from pallas_kernels.gated_delta.triton_rows import read, rows_of, squares, warps_of, write
from pallas_kernels.in_pairs import sum_in_pairs


@functools.partial(jax.jit, static_argnames=("first", "eps", "interpret"))
def finish(
    out: Float[Array, "B T Hv dv"],
    fused: Float[Array, "B T F"],
    first: int,
    scale: Float[Array, " dv"],
    eps: float,
    rows: Rows,
    memory: Memory,
    span: Span,
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
        input_output_aliases={11 + i: 1 + i for i in range(len(rest))},
        compiler_params=warps_of(size),
        interpret=interpret,
    )(*span[:3], span.places, out, fused, scale, *rows, *rest)  # fmt: skip
    return normed, Memory(memory.state, base, Rows(*rings))


def _finish(
    start_ref, real_ref, kept_ref, slots_ref, out_ref, fused_ref, scale_ref, *refs,
    size, first, eps, exact,
):  # fmt: skip
    """The norm of some rows of a head; its first program writes the base, and the rows that may
    still be rolled back, ROWS at most, into the memory."""
    given, (normed_ref, base_ref, *rings) = refs[:4], refs[9:]
    h, b, first_rows = pl.program_id(0), pl.program_id(2), pl.program_id(1) == 0
    start, real, kept, slot = start_ref[b], real_ref[b], kept_ref[b], slots_ref[b]
    # All that a program reads is on its way before its first write, which no read may pass.
    later = kept + jnp.arange(size)
    held = [(ring, *_held(one, (later < real) & first_rows, b, later, h)) for one, ring in
            zip(given, rings, strict=True)]  # fmt: skip
    (T, _, width), dtype = out_ref.shape[1:], fused_ref.dtype
    row, column = pl.program_id(1) * size + jnp.arange(size), jnp.arange(width)
    inside = row < T
    x = read(out_ref, inside, b, row, h, column).astype(dtype).astype(jnp.float32)
    z = read(fused_ref, inside, b, row, first + h * width + column).astype(jnp.float32)
    normed = x * lax.rsqrt(sum_in_pairs(squares(x, exact)) / width + eps)[:, None]
    scaled = (plt.load(scale_ref.at[column])[None, :] * normed.astype(dtype)).astype(jnp.float32)
    write(normed_ref, scaled * (z / (1 + jnp.exp(-z))), inside, b, row, h, column)

    place = lax.rem(start + later, jnp.int32(2 * CHUNK))
    for ring, rows, stays, rest in held:
        write(ring, rows, stays, slot, place, *rest)

    @pl.when((h == 0) & first_rows)
    def _():
        base_ref[slot] = start + kept


def _held(ref, stays, b, row, h):
    """A head's rows, which of them there are, and their place in a row; none of a head that is
    missing."""
    heads = ref.shape[2]
    stays, rest = stays & (h < heads), [jnp.minimum(h, heads - 1), *map(jnp.arange, ref.shape[3:])]
    return read(ref, stays, b, row, *rest), stays, rest
