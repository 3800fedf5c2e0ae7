"""`jflash COMMAND …`, and the scripts, each of which is one command under its older name.

A command is two modules of one name. jflash.cli.options.NAME declares its options, and `check`
raises a ValueError for values that nothing could serve; help, which its docstring begins and ends,
and refusals import nothing else. jflash.cli.NAME does the work, and imports JAX: `run(args)` may
return an exit code. A command that measures or checks names by KEPT how its result is kept, and
its `run` yields that result, as often as it grows.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from jflash.cli.command import Options, Parser, refused, run_command
from jflash.cli.options.results import check_result, keep_newest, result_options

COMMANDS = {
    "generate": "decode a prompt, or a file of prompts",
    "chat": "talk to a model, turn by turn",
    "serve": "answer over HTTP, in the form of OpenAI's API",
    "soak": "load a server for minutes, and compare every text",
    "evaluate": "a data set: accuracy, acceptance, speed",
    "eval-gsm8k": "evaluate, for GSM8K",
    "convert": "write a checkpoint in Orbax form",
    "make-prompts": "collect prompts to train a drafter on",
    "train": "train a drafter for a target",
    "benchmark": "step times of a pair",
    "bench-devices": "step times on one device and on several that share the pair",
    "bench-kernels": "times of kernels by themselves",
    "bench-loading": "the memory of the host while a checkpoint is loaded",
    "bench-rows": "tokens a second by the rows that a step verifies",
    "bench-steps": "step times of several shapes and batches, compiled side by side",
    "bench-serving": "tokens a second and first tokens of the engine and the server",
    "check-lossless": "compare speculative decoding with plain decoding, bit for bit",
    "check-load": "compare texts under load with those of an idle engine, bit for bit",
    "check-logits": "compare the logits of a pass with float32's",
    "same-answers": "count a real pair's answers that are plain decoding's",
    "check-program": "compile the step for this GPU and look at it",
}
BODIES = {"eval-gsm8k": "evaluate"}  # a command that shares the work of another
SCRIPTS = {"convert": "convert_checkpoint", "train": "train_drafter"}  # of other names


def main(argv: Sequence[str] | None = None) -> int:
    """The console command: the first argument names the command, the others are its arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run(argv[0], argv[1:], f"jflash {argv[0]}")
    parser = _parser()
    try:
        parser.parse_args(argv)
        raise ValueError(f"give a command: {', '.join(COMMANDS)}")
    except ValueError as error:
        return refused("jflash", error)


def run(name: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Runs one command and returns its exit code; argv None means the process's arguments."""
    options = _module(f"options.{name}")
    measures = hasattr(options, "KEPT")

    def check(args: Options) -> None:
        options.check(args)
        if measures:  # last, because it looks at the disk
            check_result(args)

    def body(args: Options) -> int | None:
        done = _module(BODIES.get(name, name)).run(args)
        return keep_newest(args.json, done, args.overwrite) if measures else done

    return run_command(make_parser(name, prog), body, argv, check)


def make_parser(name: str, prog: str | None = None) -> Parser:
    """The command line of a command; `prog` is the name of its script by default."""
    options = _module(f"options.{name}")
    what, _, more = (options.__doc__ or "").partition("\n\n")
    parser = Parser(prog or f"{SCRIPTS.get(name, name)}.py".replace("-", "_"), what, more)
    options.declare(parser)
    if hasattr(options, "KEPT"):
        result_options(parser, options.KEPT)
    _tell_defaults(parser)
    return parser


def _tell_defaults(parser: Parser) -> None:
    """Adds a number or a word that an option has by default to help which does not say it."""
    for action in parser._actions:
        value, text = parser.get_default(action.dest), action.help or ""
        told = "default" in text or text == argparse.SUPPRESS or not action.option_strings
        if (
            isinstance(value, int | float | str)
            and value not in (False, "", argparse.SUPPRESS)
            and not told
        ):
            action.help = f"{text}; default {value}" if text else f"default {value}"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"jflash.cli.{name.replace('-', '_')}")


def _parser() -> Parser:
    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {name:<{width}}{what}" for name, what in COMMANDS.items())
    epilog = f"commands:\n{listed}\n\nOptions of one: jflash COMMAND --help"
    parser = Parser("jflash", "DFlash speculative decoding in JAX.", epilog)
    parser.add_argument("command", metavar="COMMAND", choices=tuple(COMMANDS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
