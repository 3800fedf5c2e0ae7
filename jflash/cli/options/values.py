"""What the value of an option may be: lists, seeds and counts, each read in one place."""

import argparse
from collections.abc import Sequence

from jflash.kernels import AUTO


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 up out of "1,8,32": each once, ascending."""
    try:
        found = tuple(sorted({int(piece) for piece in text.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers from 1 up, such as 1,8,32"
        )
    return found


def decimals(text: str) -> tuple[float, ...]:
    """Numbers out of "0,0.7", in their order."""
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0,0.7") from None


def ids(text: str) -> list[int]:
    """Ids out of "1,2,3", in their order; whether they exist is the model's to say."""
    try:
        return [int(piece) for piece in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ids such as 1,2,3") from None


def block_size(text: str) -> int | str:
    """A width or 'auto'; the drafter says which widths it can run."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def check_seed(value: int) -> int:
    """A seed that JAX's keys can hold."""
    if not 0 <= value < 2**32:
        raise ValueError(f"seed {value} must be within 0 … {2**32 - 1}")
    return value


def at_least_1(options: argparse.Namespace, names: Sequence[str]) -> None:
    """ValueError for the first of these options that is 0 or less."""
    for name in names:
        value = getattr(options, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: at least 1")


def refuse(cases: Sequence[tuple[object, str]]) -> None:
    """ValueError with the reason of the first case that is true."""
    for wrong, why in cases:
        if wrong:
            raise ValueError(why)
