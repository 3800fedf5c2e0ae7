"""A push of few numbers, each four bytes of them beside the gather's number in one store of eight.

Who waits sees by one load whether they are there, and has them: nothing is said after them, and no
store waits for the others (NCCL calls this protocol LL). Twice the bytes pass, so it is for parts
that take less time than that. The lines of a landing place hold nothing else, so what lies there of
an earlier gather has another number, until counts have gone round.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels.gather.part import THREADS, Part, layout, stretch
from pallas_kernels.gather.registers import LEAST, LONGEST
from pallas_kernels.gather.registers import length as longest

MOST = 2**17  # numbers of a device's part
LINE = 2  # numbers beside a gather's number


def length(rows: int, columns: int, ctas: int) -> int:
    """Columns of a tile: the shortest that gives no CTA two, for the fewest stores of a thread."""
    fitting = (n for n in (LEAST, LONGEST // 2, LONGEST) if columns % n == 0)
    return next((n for n in fitting if rows * (columns // n) <= ctas), longest(columns))


def send(part: Part, tiles: list[Any], turn: Any) -> None:
    """Writes a CTA's tiles to the peers' lines, and to the result."""
    values = [part.value(tile) for tile in tiles]
    for tile, value in zip(tiles, values, strict=True):
        for peer in part.peers:
            lines = part.landing.at[part.place(part.me, tile)]
            _send(plgpu.remote_ref(lines, peer), value, turn)
        part.put(part.me, tile, value)


def take(part: Part, tiles: list[Any], turn: Any) -> None:
    """Waits for the peers' tiles, and writes them to the result."""
    for tile in tiles:
        lines = tuple(part.landing.at[part.place(peer, tile)] for peer in part.peers)
        for peer, value in zip(part.peers, _take(lines, turn, part.length), strict=True):
            part.put(peer, tile, value)


def _send(ref, value, turn) -> None:
    types = (plgpu.RefType(), layout(value.shape[0]), plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=types)
    def send(context, ref, value, turn):
        del context
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        count = value.shape[0] // THREADS // LINE
        each = stretch(value.shape[0]) // LINE
        both = ir.VectorType.get((each,), i32)
        stretches = [vector.bitcast(both, numbers) for numbers in value.registers.flat]
        words = [vector.extract(some, [], [i]) for some in stretches for i in range(each)]
        high = arith.shli(arith.extui(i64, turn.registers.item()), mosaic.c(32, i64))
        for word, at in zip(words, _lines(ref, count), strict=True):
            word = arith.extui(i64, word)
            mosaic.inline_ptx(
                "st.relaxed.sys.global.b64 [$0], $1;", at, arith.ori(high, word),
                has_side_effects=True,
            )  # fmt: skip

    send(ref, value, turn)  # pyright: ignore[reportCallIssue]


def _take(refs: tuple[Any, ...], turn, length: int) -> tuple[jax.Array, ...]:
    """A tile of each peer, once all of them are there: one look is at all."""
    out = plgpu.ShapeDtypeStruct((length,), jnp.bfloat16, layout=layout(length))
    types = (tuple(plgpu.RefType() for _ in refs), plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=types, return_type=tuple(out for _ in refs))
    def take(context, refs, turn):
        del context
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        count = length // THREADS // LINE
        places = [at for ref in refs for at in _lines(ref, count)]
        wanted = turn.registers.item()
        loop = scf.WhileOp([i64] * len(places), [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            seen = [
                mosaic.inline_ptx(
                    "ld.relaxed.sys.global.b64 $0, [$1];", at, result_types=i64,
                    has_side_effects=True,
                )
                for at in places
            ]  # fmt: skip
            numbers = [arith.trunci(i32, arith.shrui(line, mosaic.c(32, i64))) for line in seen]
            missing = [arith.cmpi(arith.CmpIPredicate.ne, n, wanted) for n in numbers]
            some = missing[0]
            for other in missing[1:]:
                some = arith.ori(some, other)
            scf.condition(some, seen)
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*[i64] * len(places))):
            scf.yield_([])
        words = [arith.trunci(i32, line) for line in loop.results]
        return tuple(_array(words[i : i + count], length) for i in range(0, len(words), count))

    return take(refs, turn)  # pyright: ignore[reportCallIssue]


def _array(words: list[ir.Value], length: int) -> Any:
    """A tile of which this thread has these words, of LINE numbers each."""
    each = stretch(length) // LINE
    word = ir.VectorType.get((each,), ir.IntegerType.get_signless(32))
    many = ir.VectorType.get((LINE * each,), ir.BF16Type.get())
    stretches = [words[i : i + each] for i in range(0, len(words), each)]
    numbers = [vector.bitcast(many, vector.from_elements(word, some)) for some in stretches]
    registers = np.array(numbers, dtype=object)
    strided = mgpu.WGStridedFragLayout((length,), stretch(length))
    return mgpu.FragmentedArray(_registers=registers, _layout=strided, _is_signed=None)


def _lines(ref, count: int) -> list[ir.Value]:
    """Where this thread's lines of a tile lie: a warp's are side by side."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.remui(mosaic.thread_idx(), mosaic.c(THREADS, ir.IntegerType.get_signless(32)))
    first = mosaic.getelementptr(mosaic.memref_ptr(ref), [thread], i64)
    return [mosaic.getelementptr(first, [i * THREADS], i64) for i in range(count)]
