"""What every command shares: its exit codes, one line for a user's mistake, and quiet libraries."""

import argparse
import io
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import jax

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
READER_GONE = 141  # 128 + SIGPIPE
GPU_TRACES = ("/dev/nvidia0", "/proc/driver/nvidia/gpus")


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ValueErrors like any other bad input."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"jflash {_version()}")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def run_command(
    parser: Parser, body: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Parses, runs and returns the exit code: the one place where errors become a line."""
    _quiet_libraries()
    try:
        body(parser.parse_args(argv))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: without this Python complains once more while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return 0


def gpu_notice() -> str | None:
    """A line for somebody whose GPU lies idle because JAX was installed without it."""
    present = shutil.which("nvidia-smi") or any(Path(trace).exists() for trace in GPU_TRACES)
    if not present or jax.default_backend() != "cpu":
        return None
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "an NVIDIA GPU is present, but JAX_PLATFORMS=cpu keeps JAX on the CPU"
    return (
        "an NVIDIA GPU is present, but JAX sees only the CPU: install its CUDA build with "
        "pip install -e '.[cuda12]' (or '.[cuda13]' for a CUDA 13 driver)"
    )


def _version() -> str:
    try:
        return version("jflash")
    except PackageNotFoundError:
        return "(not installed, run from its source)"


def _quiet_libraries() -> None:
    """What libraries say unasked would be a second line beside ours."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # gpu_notice says it better
    # When a write fails, Orbax's other tasks fail too, after the error that it raises.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot write τ still works
            stream.reconfigure(errors="replace")
