"""The options of eval-gsm8k: those of evaluate, for that data set."""

from jflash.cli.command import Parser
from jflash.cli.options import evaluate
from jflash.cli.options.evaluate import check

__all__ = ["check", "make_parser"]


def make_parser(prog: str = "eval_gsm8k.py") -> Parser:
    return evaluate.make_parser(prog, "gsm8k")
