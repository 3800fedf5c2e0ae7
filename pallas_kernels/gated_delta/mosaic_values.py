"""Values of a Mosaic program, as each thread has them: integers, branches, loops and memory."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

GLOBAL = 1  # the address space


class Int:
    """An integer of 32 bits, or whether something holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: "Int") -> "Int":
        return Int(arith.addi(self.value, other.value))

    def __sub__(self, other: "Int") -> "Int":
        return Int(arith.subi(self.value, other.value))

    def __mul__(self, other: "Int") -> "Int":
        return Int(arith.muli(self.value, other.value))

    def __floordiv__(self, other: "Int") -> "Int":
        return Int(arith.divui(self.value, other.value))

    def __mod__(self, other: "Int") -> "Int":
        return Int(arith.remui(self.value, other.value))

    def __lt__(self, other: "Int") -> "Int":
        return Int(arith.cmpi(arith.CmpIPredicate.slt, self.value, other.value))

    def __and__(self, other: "Int") -> "Int":
        return Int(arith.andi(self.value, other.value))

    def __invert__(self) -> "Int":
        one = mosaic.c(1, ir.IntegerType.get_signless(1))
        return Int(arith.xori(self.value, one))

    def is_(self, other: "Int") -> "Int":
        return Int(arith.cmpi(arith.CmpIPredicate.eq, self.value, other.value))


def integer(value: int) -> Int:
    return Int(mosaic.c(value, ir.IntegerType.get_signless(32)))


def number(value: float) -> Any:
    return mosaic.c(value, ir.F32Type.get())


def least(x: Int, y: Int) -> Int:
    return Int(arith.minsi(x.value, y.value))


def most(x: Int, y: Int) -> Int:
    return Int(arith.maxsi(x.value, y.value))


def select(condition: Int, x: Int, y: Int) -> Int:
    return Int(arith.select(condition.value, x.value, y.value))


@contextlib.contextmanager
def when(condition: Int) -> Iterator[None]:
    """What is written inside happens in threads where this holds."""
    branch = scf.IfOp(condition.value)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def loop(
    first: Int, end: Int, by: int, body: Callable[[Int, list[Any]], list[Any]], carry: list[Any]
) -> list[Any]:
    """`body` of first, first + by … as long as they are less than `end`."""
    turns = scf.ForOp(first.value, end.value, integer(by).value, carry)
    with ir.InsertionPoint(turns.body):
        scf.yield_(body(Int(turns.induction_variable), list(turns.inner_iter_args)))
    return list(turns.results)


def in_memory(ref: Any) -> Any:
    """Where an array of the device's memory begins."""
    return llvm.addrspacecast(llvm.PointerType.get(GLOBAL), mosaic.memref_ptr(ref))


def shared(ref: Any) -> Any:
    """Where an array of shared memory begins."""
    return mosaic.memref_ptr(ref)


def at(begin: Any, number: Int) -> Any:
    """Where this number lies of the float32 numbers that begin there."""
    return mosaic.getelementptr(begin, [number.value], ir.F32Type.get())


def load(begin: Any, offset: int = 0, count: int = 1) -> list[Any]:
    """One number so far behind this one, or an even one and its neighbour."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    place = mosaic.getelementptr(begin, [offset], f32)
    if count == 1:
        return [llvm.load(f32, place)]
    pair = llvm.load(ir.VectorType.get((2,), f32), place, alignment=8)
    return [llvm.extractelement(pair, mosaic.c(i, i32)) for i in range(2)]


def store(begin: Any, values: Sequence[Any], offset: int = 0) -> None:
    """As `load`."""
    f32 = ir.F32Type.get()
    place = mosaic.getelementptr(begin, [offset], f32)
    if len(values) == 1:
        llvm.store(values[0], place)
        return
    pair = vector.from_elements(ir.VectorType.get((2,), f32), values)
    llvm.store(pair, place, alignment=8)


def copy(to: Any, source: Any, size: int) -> None:
    """Begins to copy 4 or 16 bytes to shared memory."""
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    kind = "ca" if size == 4 else "cg"
    mosaic.inline_ptx(
        f"cp.async.{kind}.shared.global [$0], [$1], {size};",
        llvm.ptrtoint(i32, to), llvm.ptrtoint(i64, source), has_side_effects=True,
    )  # fmt: skip


def commit() -> None:
    """What this thread has begun to copy since the last time is one group."""
    mosaic.inline_ptx("cp.async.commit_group;", has_side_effects=True)


def arrived(but: int) -> None:
    """Waits for this thread's groups but the last ones."""
    mosaic.inline_ptx(f"cp.async.wait_group {but};", has_side_effects=True)


def together() -> None:
    """Waits for all threads of the CTA."""
    mosaic.warpgroup_barrier()
