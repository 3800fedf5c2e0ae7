"""Prompts from the command line, a file or JSON lines, checked before any model is read."""

import os
import select
import stat
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from jflash.cli.command import Options
from jflash.cli.options.pair import EFFORTS
from jflash.cli.results import RESULT_KEYS
from jflash.io.text import encode_prompt
from jflash.records.decoding import GREEDY, Sampling
from jflash.system.files import UTF_8
from jflash.system.json_lines import json_lines

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


def read_prompts(options: Options, shared: Sampling = GREEDY) -> list[Prompt]:
    """The prompts that the options name; ValueError for one that is empty or unreadable.

    Each uses `shared` sampling unless its line of a file overrides it.
    """
    if options.prompts is not None:
        return _read_lines(options.prompts, shared)
    return [_checked(_one_prompt(options))._replace(sampling=shared)]


def _one_prompt(options: Options) -> Prompt:
    if options.prompt_ids is not None:
        return Prompt(None, options.prompt_ids)
    if options.prompt_file is not None:
        return Prompt(
            _without_end(_read_text(options.prompt_file)), None, f"{options.prompt_file}: "
        )
    if options.prompt == "-":
        return Prompt(_read_stdin(), None, "standard input: ")
    if options.prompt is None:
        return Prompt(_piped() or DEFAULT_PROMPT, None)
    return Prompt(options.prompt, None)


def _piped() -> str | None:
    """The text of a pipe or file on standard input; None without one, or if it is empty.

    It does not wait for a silent open pipe, which the process may have inherited.
    """
    try:
        file = sys.stdin.fileno()
        mode = os.fstat(file).st_mode
    except (AttributeError, OSError, ValueError):  # there is none
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)):
        return None
    if not select.select([file], [], [], PATIENCE)[0]:
        why = (
            "nothing comes on standard input: this is the default prompt; the prompt - waits for it"
        )
        print(why, file=sys.stderr)
        return None
    return _read_stdin() or None


def _read_stdin() -> str:
    try:
        return _without_end(sys.stdin.buffer.read().decode(UTF_8))
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def _without_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def encode(prompt: Prompt, tokenizer: Any, options: Options) -> list[int]:
    """The prompt's token ids, through the chat template unless the options say otherwise."""
    if prompt.ids is not None:
        return prompt.ids
    assert prompt.text is not None
    return encode_prompt(tokenizer, prompt.text, **template_options(options))


def template_options(options: Options) -> dict[str, Any]:
    """What encode_prompt takes of the options that every command has for the chat template."""
    return {
        "system": options.system,
        "reasoning": options.reasoning != "off",
        "effort": options.reasoning if options.reasoning in EFFORTS else None,
        "chat_template": not options.no_chat_template,
    }


def _checked(prompt: Prompt) -> Prompt:
    if prompt.text is not None:
        checked_text(prompt.text, prompt.where)
    elif not prompt.ids:
        raise ValueError(f"{prompt.where}the prompt [] is empty: give at least one token id")
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
        return file.read_text(encoding=UTF_8)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _read_lines(file: Path, shared: Sampling) -> list[Prompt]:
    prompts = [_from_record(value, f"{where}: ", shared) for where, value in json_lines(file)]
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def _from_record(value: dict[str, Any], where: str, shared: Sampling) -> Prompt:
    if ("prompt" in value) == ("prompt_ids" in value):
        raise ValueError(f'{where}expected an object with either "prompt" or "prompt_ids"')
    if "prompt" in value and not isinstance(value["prompt"], str):
        raise ValueError(f"{where}prompt must be a text, not {value['prompt']!r}")
    text, ids = value.pop("prompt", None), value.pop("prompt_ids", None)
    if text is None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise ValueError(f"{where}prompt_ids must be a list of whole numbers, not {ids!r}")
    taken = sorted(value.keys() & RESULT_KEYS)
    if taken:
        raise ValueError(f"{where}{', '.join(taken)}: keys of the result, rename them")
    sampling = _line_sampling(value, where, shared)
    return _checked(Prompt(text, ids, where, value, sampling))


def _line_sampling(value: dict[str, Any], where: str, shared: Sampling) -> Sampling:
    """`shared` with the sampling options of a line, which are taken out of it.

    A line that sets temperature 0 is greedy, and the command's filters do not reach it.
    """
    given = {f.name: value.pop(f.name) for f in fields(Sampling) if f.name in value}
    for name, number in given.items():
        whole = name == "top_k"
        if type(number) is not int and (whole or type(number) is not float):
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{where}{name} must be {kind}, not {number!r}")
        try:
            given[name] = number if whole else float(number)
        except OverflowError:
            raise ValueError(f"{where}{name} is too large a number") from None
    base = GREEDY if given.get("temperature") == 0 else shared
    try:
        return replace(base, **given)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
