"""Prompts from the command line, a file or JSON lines, checked before any model is read."""

import argparse
import json
import os
import select
import stat
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from jflash.cli.results import RESULT_KEYS
from jflash.decoding import GREEDY, Sampling
from jflash.io.text import encode_prompt

# A word problem of the kind that the embedded pair was made for, but not trained on.
DEFAULT_PROMPT = (
    "Amina works 7 hours on Saturday and 2 hours more than that on Sunday, delivering papers for "
    "$11 an hour. Then she buys a skateboard for $82. How many dollars does Amina have left?"
)


PATIENCE = 1.0  # seconds in which a pipe has to bring something


class Prompt(NamedTuple):
    """A text or its ids, exactly one of them."""

    text: str | None
    ids: list[int] | None
    where: str = ""  # begins an error about it
    extra: dict[str, Any] | None = None  # what its line of a file held besides
    sampling: Sampling = GREEDY


def read_prompts(options: argparse.Namespace, shared: Sampling = GREEDY) -> list[Prompt]:
    """All prompts asked for; ValueError for one that is empty or unreadable.

    They draw as `shared` says, but for what a line of a file says of its own.
    """
    if options.prompts is not None:
        return _read_lines(options.prompts, shared)
    return [_checked(_one_prompt(options))._replace(sampling=shared)]


def _one_prompt(options: argparse.Namespace) -> Prompt:
    if options.prompt_ids is not None:
        return Prompt(None, options.prompt_ids)
    if options.prompt_file is not None:
        text = _read_text(options.prompt_file).removesuffix("\n").removesuffix("\r")
        return Prompt(text, None, f"{options.prompt_file}: ")
    if options.prompt == "-":
        return Prompt(_read_stdin(), None, "standard input: ")
    if options.prompt is None:
        return Prompt(_piped() or DEFAULT_PROMPT, None)
    return Prompt(options.prompt, None)


def _piped() -> str | None:
    """What comes through a pipe or from a file on standard input; None without one, or if empty.

    A pipe that stays open and silent, which a program may have inherited, is not waited for.
    """
    try:
        file = sys.stdin.fileno()
        mode = os.fstat(file).st_mode
    except (AttributeError, OSError, ValueError):  # there is none
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)):
        return None
    if not select.select([file], [], [], PATIENCE)[0]:
        print(
            "nothing comes on standard input: this is the default prompt; "
            "the prompt - waits for it",
            file=sys.stderr,
        )
        return None
    return _read_stdin() or None


def _read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def encode(prompt: Prompt, tokenizer: Any, options: argparse.Namespace) -> list[int]:
    """The prompt's token ids, through the chat template unless the options say otherwise."""
    if prompt.ids is not None:
        return prompt.ids
    assert prompt.text is not None
    return encode_prompt(
        tokenizer,
        prompt.text,
        system=options.system,
        reasoning=options.reasoning == "on",
        chat_template=not options.no_chat_template,
    )


def _checked(prompt: Prompt) -> Prompt:
    if prompt.ids is not None:
        if not prompt.ids:
            raise ValueError(f"{prompt.where}the prompt [] is empty: give at least one token id")
        return prompt
    assert prompt.text is not None
    checked_text(prompt.text, prompt.where)
    return prompt


def checked_text(text: str, where: str = "") -> str:
    """The text; ValueError for one that is empty or cannot be read."""
    if not text.strip():
        raise ValueError(f"{where}the prompt {text!r} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # how Python passes on bytes that it could not read
        raise ValueError(f"{where}the prompt is not valid UTF-8: {error}") from None
    return text


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _read_lines(file: Path, shared: Sampling) -> list[Prompt]:
    lines = enumerate(_read_text(file).split("\n"), 1)
    prompts = [
        _read_line(line, f"{file} line {number}: ", shared)
        for number, line in lines
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def _read_line(line: str, where: str, shared: Sampling) -> Prompt:
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except ValueError as error:
        raise ValueError(f"{where}not valid JSON: {error}") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("prompt_ids" in value):
        raise ValueError(f'{where}expected an object with either "prompt" or "prompt_ids"')
    if "prompt" in value and not isinstance(value["prompt"], str):
        raise ValueError(f"{where}prompt must be a text, found {value['prompt']!r}")
    text, ids = value.pop("prompt", None), value.pop("prompt_ids", None)
    if text is None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise ValueError(f"{where}prompt_ids must be a list of whole numbers, found {ids!r}")
    taken = sorted(value.keys() & RESULT_KEYS)
    if taken:
        raise ValueError(f"{where}{', '.join(taken)}: keys of the result, rename them")
    own = _own_sampling(value, where, shared)
    return _checked(Prompt(text, ids, where, value, own))


def _own_sampling(value: dict[str, Any], where: str, shared: Sampling) -> Sampling:
    """What the line says of its draws, taken out of it, over what the command says for all.

    A line that sets temperature 0 is greedy, and the command's filters do not reach it.
    """
    own = {f.name: value.pop(f.name) for f in fields(Sampling) if f.name in value}
    for name, number in own.items():
        whole = name == "top_k"
        if type(number) is not int and (whole or type(number) is not float):
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{where}{name} must be {kind}, found {number!r}")
        own[name] = number if whole else float(number)
    base = GREEDY if own.get("temperature") == 0 else shared
    try:
        return Sampling(**(asdict(base) | own))
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
