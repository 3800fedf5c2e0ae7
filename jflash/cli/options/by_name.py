"""Options that are given by name in place of a command line, as Ray Serve gives them."""

import argparse
from pathlib import Path
from typing import Any

from jflash.cli.options.values import option_name, refuse

FLAG = {"true": True, "false": False}
OF_RAY = ("host", "port")  # where its proxy listens
PLACES = ("target", "drafter", "api_key_file")  # what may be a file or a folder


def refuse_of_ray(given: dict[str, Any]) -> None:
    """ValueError for an option that Ray Serve's own stand for: nothing would read it."""
    for name in OF_RAY:
        why = f"{option_name(name)} {given.get(name)}: Ray Serve listens as its http_options say"
        refuse(name in given, why)


def argv_of(parser: argparse.ArgumentParser, given: dict[str, Any]) -> list[str]:
    """The command line of options by their names without dashes; a list repeats its option.

    A flag, which has no value there, is true or false here. ValueError if it is neither.
    """
    flags = {
        option: action
        for action in parser._actions
        for option in action.option_strings
        if action.nargs == 0
    }
    argv: list[str] = []
    for name, value in given.items():
        option = option_name(name)
        if option in flags:
            argv += _flag(flags[option], option, value)
            continue
        for each in value if isinstance(value, list) else [value]:
            argv += [option, str(each)]
    return argv


def _flag(action: argparse.Action, option: str, value: Any) -> list[str]:
    chosen = FLAG.get(str(value).lower())
    refuse(chosen is None, f"{option} {value}: true or false")
    if chosen:
        return [option]
    if not isinstance(action, argparse.BooleanOptionalAction):
        return []  # the default is false
    return [other for other in action.option_strings if other != option]


def with_absolute_places(given: dict[str, Any]) -> dict[str, Any]:
    """The options with absolute paths, for processes that run in other folders.

    What is no file here stays, because it may be a hub id.
    """
    return given | {name: _absolute(str(given[name])) for name in PLACES if name in given}


def _absolute(text: str) -> str:
    """A place, or the place at the end of a drafter's random:SEED:SOURCE."""
    parts = text.split(":", 2) if text.startswith("random:") else [text]
    place = Path(parts[-1])
    return ":".join([*parts[:-1], str(place.absolute())]) if place.exists() else text
