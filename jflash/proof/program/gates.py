"""The gates that the compiled step must pass, as pure functions over what a compilation leaves.

The program is `jflash.compiled.programs.run`: one loop around the step. Each gate measures one
thing, and a failure names the instruction or the kernel at fault.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jflash.proof.program.hlo import Module, parse
from jflash.proof.program.moves import CACHE, WEIGHT, Move, moves

# The arguments of `run`, as XLA names its parameters.
ARGUMENTS = {"state.target_cache": CACHE, "state.drafter_cache": CACHE, "params": WEIGHT}
GATHER = "all-gather"
# All that crosses devices; XLA may start and end each by itself.
COLLECTIVES = {
    *(GATHER, "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}
SLICES = {"slice", "dynamic-slice"}
LEAST_WEIGHT = 2**20  # bytes: norm scales may be cast, a kernel's columns may not

_THUNK = re.compile(r"( *)\d+: (k\w+) *\[[^\]]*\] *(\S*)")
_SECTION = re.compile(r"( *)(condition|body|\w+_branch|branch_\d+):")
_KERNEL = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_MOSAIC = re.compile(r'custom_call_target="mosaic_gpu')
_MOSAIC_KERNEL = re.compile(r'kernel_hash = ("[^"]*")')


class Program(NamedTuple):
    """What a compilation left: see `jflash.proof.program.compiled.inspect`."""

    hlo: str  # the optimised program
    thunks: str  # what the host launches, in order
    temporary_bytes: int
    assembler: str  # ptxas's report on the Mosaic kernels


class Result(NamedTuple):
    """A gate's verdict; it passes without offences."""

    gate: str
    value: int  # launches or bytes
    measured: str  # the value in words
    offences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.offences


def check(program: Program, temporary_bound: int) -> list[Result]:
    """All gates, in the order of the functions below; cuBLAS's workspace is added to the bound.

    On a described device there is no such workspace: XLA takes cuBLAS only where it can time it.
    """
    module = parse(program.hlo)
    return [
        one_command_buffer(program.thunks),
        no_cache_copy(module),
        no_weight_copy(module),
        bounded_temporaries(program.temporary_bytes, temporary_bound + cublas_workspace(module)),
        no_spills(program.hlo, program.assembler),
        no_slice_in_place(module),
        only_gathers(module),
    ]


class Thunk(NamedTuple):
    """A launch by the host; `inside` names the thunks around it, outermost first."""

    kind: str
    name: str
    inside: tuple[str, ...]


def read_thunks(text: str) -> Iterator[Thunk]:
    """The launches of XLA's dump of a thunk sequence, which nests by indentation."""
    open_thunks: list[tuple[int, str]] = []
    section = ""
    for line in text.splitlines():
        if heading := _SECTION.fullmatch(line.rstrip()):
            section = heading[2]
        elif launch := _THUNK.match(line):
            indent = len(launch[1])
            while open_thunks and open_thunks[-1][0] >= indent:
                open_thunks.pop()
            if section and open_thunks:  # a heading belongs to what encloses the next launch
                parent = open_thunks.pop()
                open_thunks.append((parent[0], f"{parent[1].split('/')[0]}/{section}"))
            section = ""
            yield Thunk(launch[2], launch[3], tuple(name for _, name in open_thunks))
            open_thunks.append((indent, launch[2]))


def one_command_buffer(thunks: str) -> Result:
    """The body of the step's loop is one command buffer (CUDA graph): one launch by the host."""
    launches = list(read_thunks(thunks))
    buffer = "kCommandBuffer"
    body = [t for t in launches if "kWhile/body" in t.inside]
    gate = "one command buffer"
    if not body:
        return Result(gate, 0, "no loop", ("the program has no loop",))
    above = body[0].inside.index("kWhile/body") + 1  # how deep the loop's launches lie
    by_host = [t for t in body if buffer not in t.inside]
    if buffer in body[0].inside[:above]:  # the loop itself is inside one
        by_host = []
    kernels = [t for t in body if t.kind not in (buffer, "kWhile", "kConditional")]
    measured = f"{len(by_host)} by the host, {len(kernels)} in all"
    one = [t.kind for t in by_host] in ([buffer], [])
    offences = [] if one else [f"the host launches {t.kind} {t.name}".rstrip() for t in by_host]
    return Result(gate, len(by_host), measured, tuple(offences))


def no_cache_copy(module: Module) -> Result:
    """Every cache is updated where it lies: before, in and after the loop."""
    copied = [m for m in moves(module, ARGUMENTS, LEAST_WEIGHT) if m.kind == CACHE]
    offences = [_moved(m) for m in copied]
    caches = [p for p in module.parameters if ARGUMENTS.get(p.label.split("[")[0]) == CACHE]
    if not caches:
        offences.append("no parameter is a cache: nothing was looked at")
    for cache in caches:
        if int(cache.argument) not in module.aliased:
            offences.append(f"{cache.label} is not donated: the result has other memory")
    total = sum(m.bytes for m in copied)
    return Result("no copy of a cache", total, f"{total:,} bytes", tuple(offences))


def no_weight_copy(module: Module) -> Result:
    """No slice, copy, concatenation, conversion or transposition of LEAST_WEIGHT bytes of weights.

    A matrix product written as its single products, as many as the weights, offends too.
    """
    all_moves = moves(module, ARGUMENTS, LEAST_WEIGHT)
    made = [m for m in all_moves if m.kind == WEIGHT and m.bytes >= LEAST_WEIGHT]
    offences = [_moved(m) for m in made]
    if not any(p.label.startswith("params") for p in module.parameters):
        offences.append("no parameter is a weight: nothing was checked")
    total = sum(m.bytes for m in made)
    return Result("no copy of weights", total, f"{total:,} bytes", tuple(offences))


def bounded_temporaries(temporary_bytes: int, bound: int) -> Result:
    """Memory beside arguments and results stays below `bound` bytes."""
    over = temporary_bytes - bound
    offences = (f"{over:,} bytes more than {bound:,}",) if over > 0 else ()
    measured = f"{temporary_bytes:,} of {bound:,} bytes"
    return Result("temporaries", temporary_bytes, measured, offences)


def cublas_workspace(module: Module) -> int:
    """Bytes that cuBLAS may use: the most of any call, because one runs at a time."""
    sizes = [
        leaf.bytes
        for computation in module.computations.values()
        for i in computation.instructions.values()
        if i.opcode == "custom-call" and '"__cublas' in i.attributes and isinstance(i.shape, list)
        for leaf in i.shape
        if leaf.dtype == "s8"
    ]
    return max(sizes, default=0)


def no_slice_in_place(module: Module) -> Result:
    """No Mosaic kernel reads a slice where it lies in another array, as XLA may have it.

    A kernel's array must begin at a multiple of 256 bytes, and XLA looks at its length only:
    the program ends with "Input buffer 5 is not 256-byte aligned" when it runs.
    """
    offences = [
        f"{i.name} reads {name}, a slice where it lies in another array"
        for computation in module.computations.values()
        for i in computation.instructions.values()
        if i.opcode == "custom-call" and _MOSAIC.search(i.attributes)
        for name in i.operands
        if name in computation.instructions and computation.instructions[name].opcode in SLICES
    ]
    measured = f"{len(offences)} slices"
    return Result("no slice in place", len(offences), measured, tuple(offences))


def only_gathers(module: Module) -> Result:
    """Devices that share the models gather, and never sum: a sum's order would hang on them."""
    crossing = [
        i
        for computation in module.computations.values()
        for i in computation.instructions.values()
        if i.opcode.removesuffix("-start") in COLLECTIVES
    ]
    others = [i for i in crossing if i.opcode.removesuffix("-start") != GATHER]
    offences = [f"{i.name} is no gather: {i.opcode}" for i in others]
    gathers = len(crossing) - len(others)
    measured = f"{gathers} gathers, {len(others)} other collectives"
    return Result("only gathers", gathers, measured, tuple(offences))


class Kernel(NamedTuple):
    """A Mosaic GPU kernel as ptxas assembled it; its bytes are those of a thread."""

    name: str
    registers: int
    spilled_bytes: int  # stores and loads


def read_kernels(assembler: str) -> list[Kernel]:
    """The kernels in ptxas's verbose output, one for each that was compiled."""
    parts = _KERNEL.split(assembler)[1:]
    kernels = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        spills, registers = _SPILLS.search(text), _REGISTERS.search(text)
        if not spills or not registers:
            raise ValueError(f"ptxas does not report what kernel {name} uses: {text[:200]!r}")
        kernels.append(Kernel(name, int(registers[1]), int(spills[2]) + int(spills[3])))
    return kernels


def no_spills(hlo: str, assembler: str) -> Result:
    """Every Mosaic GPU kernel of the program keeps its values in registers, and wgmma running."""
    kernels = read_kernels(assembler)
    offences = [f"{k.name} spills {k.spilled_bytes} bytes" for k in kernels if k.spilled_bytes]
    offences += [line.strip() for line in assembler.splitlines() if "serialized" in line]
    # Without its report a kernel would pass unchecked.
    expected = len(set(_MOSAIC_KERNEL.findall(hlo))) or len(_MOSAIC.findall(hlo))
    if len(kernels) < expected:
        offences.append(f"ptxas reports {len(kernels)} kernels, the program has {expected}")
    total = sum(k.spilled_bytes for k in kernels)
    most = max((k.registers for k in kernels), default=0)
    measured = f"{total} bytes, {len(kernels)} kernels of up to {most} registers"
    return Result("no spills", total, measured, tuple(offences))


def _moved(move: Move) -> str:
    where = "in the loop" if move.in_loop else "outside the loop"
    return f"{move.instruction} writes {move.bytes:,} bytes of {move.source} {where}"
