"""Canonical products of few rows with codes, on Hopper: y^T = W^T x^T, so no row is padded.

A CTA's producer warpgroup fills a ring of shared memory with tiles of codes and of rows. The
threads of each consumer take codes from there into registers, convert them exactly as `dequantised`
does, and give them to wgmma as its first operand, which sums K in the canonical order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept import pairs
from pallas_kernels.matmul.kept.fragments import COLUMNS, DEPTH, ROW, Fragments
from pallas_kernels.matmul.mosaic_kernel import PRODUCER_REGISTERS, silu_times, tiled
from pallas_kernels.matmul.mosaic_ring import fill

MOST_ROWS = 128
WGMMA = plgpu.Layout.WGMMA
SHARED_MEMORY = 200_000
FULL = 96  # CTAs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Speed only, never a result's bits."""

    stages: int = 6
    consumers: int = 1  # warpgroups, each with a tile of columns, or two of gate_up
    deep: int = 1  # tiles along K in a stage


def by_rule(M: int, w: Fragments, pieces: int, halves: int) -> Kept:
    """A tile by sizes alone; two consumers share rows where their CTAs still fill the GPU.

    µs of 128 rows by one and by two on an H200 (jax 0.11.2, 2026-11-23), FP8 and INT4: [4096, 6144]
    33.4 and 26.4, 31.1 and 23.2 (96 CTAs); [12288, 4096] 40.2 and 58.6, 37.5 and 46.9 (64 CTAs).
    """
    K, N = w.shape
    columns = N // halves // COLUMNS
    ctas = columns // 2 * pieces * -(-M // MOST_ROWS)
    consumers = 2 if M > 64 and columns % 2 == 0 and ctas >= FULL else 1
    deep = 2 if M <= 64 and halves == 1 and K % (2 * DEPTH * pieces) == 0 else 1
    return Kept(stages=4 if halves == 2 else 8 // deep, consumers=consumers, deep=deep)


def product(
    x: Float[Array, "M K"],
    w: Fragments,
    *,
    pieces: int,
    tile: Kept,
    halves: Firsts | None = None,
) -> Float[Array, "..."]:
    """As `few_rows.product` without a residual; paired columns are two halves by themselves."""
    (M, K), N = x.shape, w.shape[1]
    halves = (0, COLUMNS) if w.paired else halves  # two tiles beside one another
    if M > 8 and M % 8:
        return product(
            jnp.pad(x, ((0, -M % 8), (0, 0))), w, pieces=pieces, tile=tile, halves=halves
        )[..., :M, :]
    columns, halved = (N // 2, 2) if halves else (N, 1)
    C, depth = tile.consumers, DEPTH * tile.deep
    assert columns % (COLUMNS * C) == 0 and K % (depth * pieces) == 0, (w.shape, pieces, tile)
    rows = min(MOST_ROWS, -(-M // 8) * 8)
    dtype = x.dtype if pieces == 1 else jnp.float32
    shape = (M, columns) if pieces == 1 else (pieces, M, N)
    word_rows, steps = w.words.shape[-2], K // pieces // depth
    slot = C * halved * tile.deep * word_rows * ROW * 4 + rows * depth * 2
    stages = min(tile.stages, (SHARED_MEMORY - C * rows * COLUMNS * 4) // slot, steps)
    assert stages, (w.shape, tile)
    launch = plgpu.kernel(
        functools.partial(
            _kernel, w=jax.tree.map(lambda a: None, w), steps=steps, stages=stages, deep=tile.deep,
            consumers=C, firsts=tuple(first // COLUMNS for first in halves or (0,)),
            apart=2 if w.paired else 1,
        ),
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types={
            "ring": plgpu.SMEM((stages, C, halved, tile.deep, word_rows, ROW), jnp.uint32),
            "x_ring": plgpu.SMEM((stages, rows, depth), x.dtype, transforms=tiled(128, 2)),
            "out_smem": plgpu.SMEM((C, rows, COLUMNS), dtype),
            "full": plgpu.Barrier(num_arrivals=1 + C * halved, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=C, num_barriers=stages),
        },
        grid=(columns // COLUMNS // C, pieces, pl.cdiv(M, rows)),
        grid_names=("column", "piece", "row"),
        num_threads=C + 1,
        thread_name="wg",
        kernel_name="kept_gate_up" if halves else "kept_rows",
    )  # fmt: skip
    return launch(x, w.words)


def _kernel(
    x_gmem, w_gmem, out_gmem, *, ring, x_ring, out_smem, full, empty,
    w: Fragments, steps: int, stages: int, deep: int, consumers: int, firsts, apart: int,
):  # fmt: skip
    wg, piece = lax.axis_index("wg"), lax.axis_index("piece")
    column = lax.axis_index("column") * consumers
    rows = x_ring.shape[1]
    row = pl.ds(lax.axis_index("row") * rows, rows)

    @pl.when(wg == consumers)
    def _():
        if consumers > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def load(step):
            slot, k = lax.rem(step, stages), (piece * steps + step) * deep
            for part, first in enumerate(firsts):
                for consumer in range(consumers):
                    plgpu.copy_gmem_to_smem(
                        w_gmem.at[first + apart * (column + consumer), pl.ds(k, deep)],
                        ring.at[slot, consumer, part], full.at[slot],
                    )  # fmt: skip
            plgpu.copy_gmem_to_smem(
                x_gmem.at[row, pl.ds(k * DEPTH, DEPTH * deep)], x_ring.at[slot], full.at[slot]
            )

        fill(load, steps, empty, stages)

    @pl.when(wg < consumers)
    def _():
        if consumers > 1:
            registers = min((512 - PRODUCER_REGISTERS) // consumers // 8 * 8, 240)
            plgpu.set_max_registers(registers, action="increase")

        def of_columns(*accs):
            own = ring.at[:, wg]
            return sums(accs, own, x_ring, full, empty, w=w, steps=steps, stages=stages, deep=deep)

        accs = [plgpu.WGMMAAccumulatorRef((COLUMNS, rows)) for _ in firsts]
        values = pl.run_scoped(of_columns, *accs)
        out = out_smem.at[wg]
        if w.paired:
            for part, value in enumerate(values):
                own = pl.ds(part * pairs.OWN, pairs.OWN)
                pairs.store_gated(out_smem.at[wg, slice(None), own], value)
        else:
            value = values[0]
            if len(values) == 2:
                value = silu_times(value, values[1], out_smem.dtype)
            store(out, value.astype(out_smem.dtype))
        plgpu.commit_smem()
        target = out_gmem.at[piece] if len(out_gmem.shape) == 3 else out_gmem
        plgpu.copy_smem_to_gmem(out, target.at[row, pl.ds((column + wg) * COLUMNS, COLUMNS)])
        plgpu.wait_smem_to_gmem(0)


def sums(
    accs, ring, x_ring, full, empty, *, w: Fragments, steps: int, stages: int, deep: int, begin=0
):  # fmt: skip
    """What a consumer's accumulators hold after `steps` of the ring's turns, from `begin` on."""

    @pl.loop(begin, begin + steps)
    def _(turn):
        slot = lax.rem(turn, stages)
        plgpu.barrier_wait(full.at[slot])
        for k in range(deep):
            for part, acc in enumerate(accs):
                numbers = converted(ring.at[slot, part, k], w)
                of_rows = x_ring.at[slot, slice(None), pl.ds(k * DEPTH, DEPTH)]
                plgpu.wgmma(acc, numbers, of_rows.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[slot])

    return [acc[...] for acc in accs]


def store(ref, value):
    """Writes y^T, as wgmma leaves it, as rows of y."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, value):
        del ctx
        if value.mlir_dtype == ir.F32Type.get():  # a pair lies in two rows of y
            value = value.to_layout(mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        value.store_untiled(mgpu.memref_transpose(ref, (1, 0)), optimized=False)

    store(ref, value)  # pyright: ignore[reportCallIssue]


def converted(ref, w: Fragments):
    """A tile's numbers [64, 128], columns before K, each made by the thread that gives it on."""
    strided = plgpu.Layout.WG_STRIDED((w.code_rows, ROW), vec_size=4)
    words = plgpu.load(ref.at[pl.ds(0, w.code_rows)], layout=strided)
    count = w.groups * (1 if w.bits == 8 else 2)
    of_columns = range(w.code_rows, w.code_rows + count)
    by_column = [plgpu.load(ref.at[i], layout=WGMMA.reduce(1)) for i in of_columns]
    out = plgpu.ShapeDtypeStruct((COLUMNS, DEPTH), jnp.bfloat16, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(strided, [WGMMA.reduce(1)] * count), return_type=out)
    def convert(ctx, words, by_column):
        del ctx
        return _numbers(words, by_column, w)

    return convert(words, by_column)  # pyright: ignore[reportCallIssue]


def _numbers(words, by_column, w: Fragments):
    i32 = ir.IntegerType.get_signless(32)
    layout = mgpu.WGMMA_LAYOUT
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    out = np.empty(layout.registers_shape((COLUMNS, DEPTH)), dtype=object)
    flat = out.reshape(DEPTH // 8, 2)  # blocks of 8 numbers, and halves: rows 8 apart
    halves = [list(part.registers.flat) for part in by_column]
    ours = [
        vector.extract(register, [], [i]) for register in words.registers.flat for i in range(4)
    ]
    blocks_a_group = DEPTH // 8 // w.groups

    def of(block: int, half: int, part: int):
        value = halves[block // blocks_a_group + part * w.groups][half]
        if isinstance(value.type, ir.VectorType):
            value = vector.extract(value, [], [0])
        return value

    for block in range(DEPTH // 8):
        for half in range(2):
            scale = of(block, half, 0)
            if w.bits == 8:
                text = (_NARROW_EIGHT if w.narrow else _EIGHT)[half]
                got = llvm.inline_asm(i32, [ours[block], scale], text, "=r,r,r")
            else:
                at = block % 2 * 2 + half
                text = (_NARROW if w.narrow else _FOUR)[at]
                got = llvm.inline_asm(
                    i32, [ours[block // 2], scale, of(block, half, 1)], text, "=r,r,r,r"
                )
            flat[block, half] = llvm.bitcast(pair, got)
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


_PRODUCT = """
mul.rn.f32 f0, f0, s;
mul.rn.f32 f1, f1, s;
cvt.rn.bf16x2.f32 $0, f1, f0;
}"""
_EIGHT = [
    f"""{{
.reg .b16 low, high, a, b;
.reg .b32 both;
.reg .f32 f0, f1, s;
mov.b32 s, $2;
mov.b32 {{low, high}}, $1;
cvt.rn.f16x2.e4m3x2 both, {pair};
mov.b32 {{a, b}}, both;
cvt.f32.f16 f0, a;
cvt.f32.f16 f1, b;{_PRODUCT}"""
    for pair in ("low", "high")
]
# As `fragments` lets a narrow weight's bits lie, so that one rounding is that of the product.
_SCALED = "prmt.b32 u, $2, $2, 0x3232;\nmul.rn.bf16x2 $0, t, u;\n}"
_NARROW_EIGHT = [
    f"""{{
.reg .b32 t, u;
shr.u32 t, $1, 8;
and.b32 t, t, 0x00700070;
lop3.b32 t, $1, 0x87808780, t, 0xEA;
{_SCALED}""",
    f"""{{
.reg .b32 t, u;
shl.b32 t, $1, 4;
and.b32 t, t, 0x87F087F0;
{_SCALED}""",
]


def _four(at: int, narrow: bool) -> str:
    shift = f"shr.b32 t, $1, {4 * at};" if at else "mov.b32 t, $1;"
    start = f"""{{
.reg .b32 t, z, u;
.reg .f32 f0, f1, s;
mov.b32 s, $2;
{shift}
lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
prmt.b32 z, $3, $3, 0x3232;
sub.rn.bf16x2 t, t, z;
"""
    if narrow:
        return start + _SCALED
    return (
        start
        + f"shl.b32 u, t, 16;\nmov.b32 f0, u;\nand.b32 u, t, 0xFFFF0000;\nmov.b32 f1, u;{_PRODUCT}"
    )


_FOUR = [_four(at, False) for at in range(4)]
_NARROW = [_four(at, True) for at in range(4)]
