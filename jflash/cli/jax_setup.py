"""What commands decide about JAX before it touches a device, and which libraries are quiet."""

import argparse
import io
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path

from jflash.cli.late_callbacks import drop_late_callbacks
from jflash.system.platform import configure
from jflash.system.program_cache import cache_folder

GPU_TRACES = ("/dev/nvidia0", "/proc/driver/nvidia/gpus")


def note_idle_gpu() -> None:
    """Prints a line on stderr if a GPU lies idle because JAX was installed without it."""
    import jax

    if not _gpu_present() or jax.default_backend() != "cpu":
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        why = "JAX_PLATFORMS=cpu keeps JAX on the CPU"
    else:
        why = (
            "JAX sees only the CPU: install its CUDA build with "
            "pip install -e '.[cuda12]' (or '.[cuda13]' for a CUDA 13 driver)"
        )
    print(f"an NVIDIA GPU is present, but {why}", file=sys.stderr)


def _gpu_present() -> bool:
    return bool(shutil.which("nvidia-smi")) or any(Path(trace).exists() for trace in GPU_TRACES)


def platform_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("JAX (what the environment sets is kept)").add_argument
    cache = f"compile anew; else programs are kept in {_cache_name()}"
    add("--no-compilation-cache", action="store_true", help=cache)
    add("--no-cuda-graphs", action="store_true", help="launch GPU kernels one by one: slower")
    tiles = "time the tiles of products at first use, and keep them; else a rule gives them"
    add("--autotune", action=argparse.BooleanOptionalAction, help=tiles)
    part = "of a GPU's memory that JAX may take, default 0.75"
    add("--memory-fraction", type=float, metavar="F", help=part)
    add("--no-preallocation", action="store_true", help="take GPU memory as needed, not at once")


def _cache_name() -> str:
    try:
        return str(cache_folder()).replace("%", "%%")
    except RuntimeError:
        return "the user's cache folder"


def configure_jax(options: argparse.Namespace) -> None:
    """Applies the options about JAX, before a device is touched, in whatever process it is."""
    quiet_libraries()
    notices = configure(
        cuda_graphs=not options.no_cuda_graphs,
        autotune=options.autotune,
        memory_fraction=options.memory_fraction,
        preallocate=not options.no_preallocation,
        compilation_cache=not options.no_compilation_cache,
    )
    for notice in notices:
        print(notice, file=sys.stderr)


def quiet_libraries() -> None:
    """Silences what libraries would print as a second line beside ours."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # a long prompt is ours to refuse
    # note_idle_gpu says it better; without a GPU a CUDA plugin that cannot start is no news.
    silent = logging.ERROR if _gpu_present() else logging.CRITICAL
    logging.getLogger("jax._src.xla_bridge").setLevel(silent)
    # When a write fails, Orbax's other tasks and threads fail too, after the error that it
    # raises, or never begin.
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    unbegun = "coroutine 'async_serialize_from_host"
    warnings.filterwarnings("ignore", unbegun, RuntimeWarning)
    drop_late_callbacks()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot write τ still works
            stream.reconfigure(errors="replace")
