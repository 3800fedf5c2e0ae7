"""What every command shares: its parser, exit codes, and mistakes as a line."""

import argparse
import contextlib
import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jflash.cli.interrupts import dropped_ones_come_again
from jflash.cli.jax_setup import configure_jax, platform_options, quiet_libraries

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
READER_GONE = 141  # 128 + SIGPIPE
# What an extra installs, by the module that is imported.
EXTRAS = {
    "datasets": "eval", "math_verify": "eval", "matplotlib": "eval", "gguf": "gguf",
    "optax": "train", "ray": "ray",
    "httpx": "test",
    **dict.fromkeys(("msgspec", "prometheus_client", "starlette", "uvicorn"), "serve"),
    "llguidance": "serve",
}  # fmt: skip


Options = argparse.Namespace  # of a command line


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ValueErrors like any other bad input."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog, None, description, epilog, formatter_class=layout, allow_abbrev=False
        )
        self.register("type", Path, _path)
        self.add_argument("--version", action=_Version, nargs=0, help="print it and exit")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _path(text: str) -> Path:
    """A path. An empty one, as of a variable that is not set, would be the folder we are in, and
    `Path.resolve` fails at a link that leads to itself."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no file and no folder: give a path")
    try:
        Path(text).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = f"{text!r} is a link that leads to itself: give another path"
            raise argparse.ArgumentTypeError(why) from None
    return Path(text)


class _Version(argparse.Action):
    """Looks the version up only when it is needed: that takes longer than to print help."""

    def __call__(self, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"jflash {version('jflash')}")
        except PackageNotFoundError:
            print("jflash (not installed, run from its source)")
        raise SystemExit(0)


@contextlib.contextmanager
def _closed_streams_lead_nowhere() -> Iterator[None]:
    """For those that whoever started the process has closed Python has None, which prints no line
    and is no terminal."""
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for name in closed:
            setattr(sys, name, nowhere)
        try:
            yield
        finally:
            for name in closed:
                setattr(sys, name, None)


@_closed_streams_lead_nowhere()
def run_command(
    parser: Parser,
    body: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> int:
    """Parses, checks, runs and returns the exit code: the one place where errors become a line.

    It adds the options about JAX and applies them before `body` touches a device. `check` refuses
    options before anything slow is imported.
    """
    quiet_libraries()
    platform_options(parser)
    try:
        with dropped_ones_come_again():
            options = parser.parse_args(argv)
            if check is not None:
                check(options)
            configure_jax(options)
            code = body(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: without this Python complains once more while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        return refused(parser.prog, error)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        return refused(parser.prog, _not_installed(module))
    except (AssertionError, RuntimeError) as error:
        if not _is_of_platforms(error):
            raise
        told = str(error) or "no such device is here: unset it, or set it to cpu"
        named = os.environ["JAX_PLATFORMS"]
        return refused(parser.prog, ValueError(f"JAX_PLATFORMS={named}: {told}"))
    return code or 0


def _is_of_platforms(error: BaseException) -> bool:
    """Whether JAX cannot begin on the platforms that the environment names.

    If those are cuda alone and there is no GPU, it is an assertion of JAX's without a text.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace and trace.tb_frame.f_globals["__name__"]
    return where == "jax._src.xla_bridge" and bool(os.environ.get("JAX_PLATFORMS"))


def require(*modules: str) -> None:
    """ValueError for the first of EXTRAS' modules that is not installed, before work is lost."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _not_installed(module)


def _not_installed(module: str) -> ValueError:
    return ValueError(f"{module} is not installed: pip install 'jflash[{EXTRAS[module]}]'")


def refused(prog: str, error: Exception) -> int:
    """Prints what was wrong as one line, and returns the exit code of bad input."""
    print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD_INPUT
