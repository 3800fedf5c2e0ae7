"""chat: turns through a pseudo-terminal and through a pipe, Ctrl-C included; prompts by a pipe."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jflash.cli.prompts import DEFAULT_PROMPT

ROOT = Path(__file__).parents[2]
QUESTION = "Tom has 3 apples and buys 4 more apples. How many apples does Tom have now?"
STATISTICS = re.compile(r"(\d+) tokens · τ [\d.–]+ · [\d.–]+ tokens/s")

# Ctrl-C on a terminal reaches those whose terminal it is.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def start(*argv: str, **variables: str) -> tuple[subprocess.Popen, int]:
    """A chat on a terminal of its own, and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, str(ROOT / "scripts" / "chat.py"), *argv],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def until(terminal: int, text: str | re.Pattern, seconds: float = 240) -> str:
    """What the terminal shows up to where `text` is seen."""
    shown, end = b"", time.monotonic() + seconds
    pattern = re.compile(re.escape(text)) if isinstance(text, str) else text
    while not pattern.search(shown.decode(errors="replace")):
        left = end - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], shown.decode()
        shown += os.read(terminal, 4096)
    return shown.decode(errors="replace")


def test_turns_on_a_terminal_with_ctrl_c():
    process, terminal = start("--no-compilation-cache")
    try:
        assert "/reset" in until(terminal, "> ")
        os.write(terminal, b"/unheard\n")
        assert "no command '/unheard'" in until(terminal, "> ")
        time.sleep(0.3)  # input() shows its prompt before it waits, and waits on if pressed between
        os.write(terminal, b"\x03")
        assert "/quit or Ctrl-D ends" in until(terminal, re.compile("ends.*> ", re.DOTALL))

        os.write(terminal, f"{QUESTION}\n".encode())
        until(terminal, "now?")
        time.sleep(0.3)  # it compiles for longer than that
        os.write(terminal, b"\x03")
        stopped = until(terminal, re.compile("stopped.*> ", re.DOTALL))
        assert process.poll() is None and "Traceback" not in stopped

        os.write(terminal, b"/reset\n")
        until(terminal, "> ")
        os.write(terminal, f"{QUESTION}\n".encode())
        answer = until(terminal, re.compile("tokens/s.*> ", re.DOTALL))
        assert "stopped" not in answer and "7" in answer
        assert "\x1b[36m" in answer and "\x1b[33m" in answer  # the steps' two colours
        found = STATISTICS.search(answer)
        assert found and int(found[1]) > 10
        os.write(terminal, b"/quit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_a_terminal_without_colours():
    process, terminal = start(TERM="dumb")
    try:
        until(terminal, "> ")
        os.write(terminal, f"{QUESTION}\n".encode())
        # The next prompt too: an end of file that comes sooner may be lost with its mode.
        answer = until(terminal, re.compile("tokens/s.*> ", re.DOTALL))
        assert (
            STATISTICS.search(answer)
            and "7" in answer
            and "\x1b[3" not in answer
            and "Traceback" not in answer
        )
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def piped(command: str, text: str | bytes, *argv: str) -> subprocess.CompletedProcess:
    data = text if isinstance(text, bytes) else text.encode()
    script = str(ROOT / "scripts" / f"{command}.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, script, *argv], input=data, capture_output=True, env=environment
    )


LONG = "word " * 3000
TOKENS = re.compile(r"(\d+) prompt tokens")


def test_a_piped_conversation():
    """/reset begins anew; a turn that does not fit is told and ends nothing."""
    turns = [LONG, QUESTION, "", LONG, "/reset", QUESTION, LONG, "/quit", "never read"]
    done = piped("chat", "\n".join(turns) + "\n")
    assert done.returncode == 0, done.stderr
    alone = piped("chat", f"{QUESTION}\n").stdout
    assert b"7" in alone and done.stdout == alone + alone
    told = done.stderr.decode()
    assert len(STATISTICS.findall(told)) == 2 and told.count("/reset begins anew") == 3
    first, after_a_turn, after_reset = map(int, TOKENS.findall(told))
    assert first < after_a_turn == after_reset


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens 0: at least 1"),
        (("--max-new-tokens", "999999"), "positions"),
        (("--temperature", "-1"), "--temperature -1"),
        (("--draft-rule", "sampled"), "needs a --temperature"),
        (("--drafter", "none", "--verify-rows", "16"), "--verify-rows 16 without a drafter"),
        (("--target", "/nowhere", "--drafter", "none"), "/nowhere"),
        (("--system", "x", "--no-chat-template"), "--system with"),
        (("hello",), "hello"),
    ],
)
def test_refusals(argv, named):
    done = piped("chat", "", *argv)
    assert done.returncode == 2 and done.stdout == b""
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("chat.py: ") and named in line


@pytest.mark.parametrize("argv", [(), ("-",)])
def test_generate_reads_a_pipe(argv):
    few = ("--json", "--max-new-tokens", "8")
    through = piped("generate", f"{QUESTION}\n", *argv, *few)
    assert through.returncode == 0, through.stderr
    told = piped("generate", b"", QUESTION, *few)
    assert json.loads(through.stdout)["token_ids"] == json.loads(told.stdout)["token_ids"]


def test_what_a_pipe_may_bring():
    few = ("--json", "--max-new-tokens", "8")
    default = piped("generate", b"", *few)  # closed and empty: as without a pipe
    same = piped("generate", b"", DEFAULT_PROMPT, *few)
    assert json.loads(default.stdout)["token_ids"] == json.loads(same.stdout)["token_ids"]
    for data, argv, named in (
        (b"\xff", (), "standard input is not UTF-8"),
        (b" \n", ("-",), "standard input: the prompt ' ' is empty"),
    ):
        done = piped("generate", data, *argv)
        assert done.returncode == 2 and done.stdout == b""
        assert done.stderr.decode().count("\n") == 1 and named in done.stderr.decode()


def test_a_pipe_that_stays_silent_is_not_waited_for():
    reading, writing = os.pipe()
    script = str(ROOT / "scripts" / "generate.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, "--max-new-tokens", "8"],
        stdin=reading, capture_output=True, env=environment, timeout=240,
    )  # fmt: skip
    os.close(reading)
    os.close(writing)
    assert done.returncode == 0 and done.stdout
    assert b"nothing comes on standard input" in done.stderr
