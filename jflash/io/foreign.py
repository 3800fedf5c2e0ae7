"""Errors of libraries that interpret a checkpoint: tokenizers, chat templates, Orbax metadata."""

import contextlib
from collections.abc import Iterator

MOST_SHOWN = 300  # characters of a library's message


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Turns any exception of the block into a ValueError of one line that begins with `what`.

    A template may divide by zero, and a tokenizer's file may make its Rust code panic: foreign data
    decides which exception comes. A MemoryError passes through.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{what}: {one_line(error)}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's derives from BaseException
            raise
        raise ValueError(f"{what}: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """An error's text in one line, with its type if the text is short."""
    text = " ".join(str(error).split())[:MOST_SHOWN]
    return text if " " in text else f"{type(error).__name__} {text}".strip()
