"""Options of the commands that measure or check: the kernels, and where the result goes."""

import json
import math
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jflash.cli.command import Options, Parser
from jflash.cli.options.values import option_name, refuse
from jflash.records.kernels import BACKENDS
from jflash.system.lines import check_whole_file, newest_line


def backend_options(parser: Parser) -> None:
    for name in BACKENDS:
        parser.add_argument(option_name(name), metavar="NAME", help="by default jflash chooses")


def chosen_backends(args: Options) -> dict[str, str]:
    """The backends that the command line names."""
    return {name: getattr(args, name) for name in BACKENDS if getattr(args, name) is not None}


def result_options(parser: Parser, kept: str) -> None:
    """--json, whose line of `kept` is printed in any case, and --overwrite."""
    add, text = parser.add_argument, f"the last line, which is printed anyway, {kept}"
    add("--json", type=Path, nargs="?", metavar="FILE", help=text)
    add("--overwrite", action="store_true", help="replace an existing --json")


def check_result(args: Options) -> None:
    """ValueError if the result could not be written."""
    refuse(args.overwrite and args.json is None, "--overwrite without --json")
    if args.json is not None:
        check_whole_file(args.json, args.overwrite)


def keep_newest(
    file: Path | None,
    results: Generator[dict[str, Any], None, int | None],
    overwrite: bool = False,
) -> int | None:
    """Writes each result over the one before, so that a run cut off leaves its newest.

    The file is this run's alone from the beginning, since two would replace each other's results.
    Prints the last as a line, and returns what the generator does: an exit code. The newest is
    printed too where it cannot be written. A number that is not finite becomes null, because JSON
    has none.
    """
    line = ""
    with nullcontext() if file is None else newest_line(file, overwrite) as write:
        while True:
            try:
                line = json.dumps(finite(next(results)), allow_nan=False)
            except StopIteration as end:
                print(line, end="\n" * bool(line))
                return end.value
            if write is not None:
                try:
                    write(line)
                except (OSError, ValueError):  # a full disc
                    print(line)
                    raise


def finite(value: Any) -> Any:
    """The value with None in place of every NaN and infinity, however deep."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
