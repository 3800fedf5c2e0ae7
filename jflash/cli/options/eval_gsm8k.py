"""Evaluate a pair on gsm8k: accuracy, τ, speed."""

import functools

from jflash.cli.options import evaluate
from jflash.cli.options.evaluate import check

__all__ = ["check", "declare"]

declare = functools.partial(evaluate.declare, dataset="gsm8k")
