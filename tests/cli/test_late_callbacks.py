"""What still calls back after a failed write adds nothing to the line of its error."""

import asyncio
import sys
from typing import Any

from jflash.cli.command import BAD_INPUT, Parser, run_command


class Late:
    """Calls a function where nobody can catch what it raises."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __del__(self) -> None:
        function, arguments = self.call
        function(*arguments)


def test_a_call_into_a_closed_loop_is_dropped_after_the_command_too(monkeypatch, capsys):
    seen: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: seen.append(str(dropped.exc_value)))
    closed = asyncio.new_event_loop()
    closed.close()

    def body(_: Any) -> None:
        Late(closed.call_soon_threadsafe, print)
        raise ValueError("a write failed")

    for _ in range(2):
        assert run_command(Parser("a command", "It writes."), body, []) == BAD_INPUT
        Late(closed.call_soon_threadsafe, print)
    assert not seen
    Late(int, "another error")
    assert seen == ["invalid literal for int() with base 10: 'another error'"]
    assert capsys.readouterr().err == "a command: a write failed\n" * 2
