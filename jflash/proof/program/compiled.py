"""What a compilation for an NVIDIA GPU leaves, for `jflash.proof.program.gates`; nothing is timed.

This file knows no model. tests/support/described_gpu.py compiles where there is no GPU.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from jflash.proof.program.gates import Program

Options = Mapping[str, str | bool | int]  # XLA flags without their dashes


def inspect(compile: Callable[[Options], jax.stages.Compiled]) -> Program:
    """What a compilation leaves, for `jflash.proof.program.gates`; `compile` must use the options.

    The device may be described or real. RuntimeError if nothing was compiled, as with a program
    that JAX took from its compilation cache.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "standard_output"
        with _assembler_prints_to(log):
            compiled = compile({"xla_dump_to": str(folder)})
        hlo = compiled.as_text() or ""
        module = hlo.partition(",")[0].removeprefix("HloModule ")
        # The first is there only if grouping launches into command buffers changed something.
        files = list(folder.glob(f"*.{module}.thunk_sequence_after_thunk_passes.txt"))
        files = files or list(folder.glob(f"*.{module}.thunk_sequence.txt"))
        if len(files) != 1:
            raise RuntimeError(
                f"compiling {module} left {len(files)} thunk sequences instead of one: "
                "JAX's compilation cache must be off"
            )
        thunks, assembler = (f.read_text(encoding="utf-8") for f in (files[0], log))
        memory = compiled.memory_analysis()
    assert memory is not None  # of a GPU's program; a CPU's may have none
    return Program(hlo, thunks, memory.temp_size_in_bytes, assembler)


@contextlib.contextmanager
def _assembler_prints_to(log: Path) -> Iterator[None]:
    """Lets ptxas report on Mosaic GPU's kernels, and sends this process's standard output to `log`.

    C++ prints the report, so it has to be caught below Python's standard output.
    """
    variable = "MOSAIC_GPU_DUMP_PTXAS"
    before = os.environ.get(variable)
    sys.stdout.flush()
    kept = os.dup(1)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # C's buffer
        os.dup2(kept, 1)
        os.close(kept)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
