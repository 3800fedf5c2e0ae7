"""chat: turns through a pseudo-terminal and through a pipe, Ctrl-C included; prompts by a pipe."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jflash.cli.chat import _lines
from jflash.cli.main import make_parser
from jflash.cli.prompts import DEFAULT_PROMPT, read_prompts

ROOT = Path(__file__).parents[2]
QUESTION = "Tom has 3 apples and buys 4 more apples. How many apples does Tom have now?"
STATISTICS = re.compile(r"(\d+) tokens · τ [\d.–]+ · [\d.–]+ tokens/s")

# Ctrl-C on a terminal reaches those whose terminal it is, but a shell's job in the background
# ignores it, and so do all that it starts.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def start(*argv: str) -> tuple[subprocess.Popen, int]:
    """A chat on a terminal of its own, and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
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
        # input() shows its prompt before it waits, and waits on if the keys are pressed between.
        for _ in range(12):
            os.write(terminal, b"\x03")
            if select.select([terminal], [], [], 5)[0]:
                break
        assert process.poll() is None
        assert "/quit or Ctrl-D ends" in until(terminal, re.compile("ends.*> ", re.DOTALL), 60)

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
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def piped(command: str, text: str, *argv: str) -> subprocess.CompletedProcess:
    """What a command makes of a pipe; a half character of the text stands for a byte of none."""
    script = str(ROOT / "scripts" / f"{command}.py")
    # As in most locales, where Python reads no such byte.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
    return subprocess.run(
        [sys.executable, script, *argv], input=text, capture_output=True, env=environment,
        encoding="utf-8", errors="surrogateescape",
    )  # fmt: skip


LONG = "word " * 3000
TOKENS = re.compile(r"(\d+) prompt tokens")


def test_a_piped_conversation():
    """/reset begins anew; a turn that does not fit, or is no UTF-8, is told and ends nothing."""
    turns = [LONG, QUESTION, "", "\udcff", LONG, "/reset", QUESTION, LONG, "/quit", "never read"]
    done = piped("chat", "\n".join(turns) + "\n")
    assert done.returncode == 0, done.stderr
    first, again = done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :]
    assert first == again and "7" in first and "\x1b" not in first  # and so no colours
    assert len(STATISTICS.findall(done.stderr)) == 2
    assert done.stderr.count("/reset begins anew") == 4
    assert done.stderr.count("the prompt is not valid UTF-8") == 1
    before, after_a_turn, after_reset = map(int, TOKENS.findall(done.stderr))
    assert before < after_a_turn == after_reset


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
def test_refusals(argv, named, refused):
    refused([*argv], "chat.py: ", named, command="chat")


def test_a_closed_input_is_refused_before_a_weight_is_read(refused, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    refused([], "chat.py: ", "standard input is closed", command="chat")


def test_a_mark_before_the_first_line_is_no_part_of_it(monkeypatch):
    given = io.TextIOWrapper(io.BytesIO("\ufeffhé\r\na\ufeffb\n".encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    assert list(_lines(live=False)) == ["hé", "a\ufeffb"]


def test_generate_reads_a_pipe():
    """What was read is counted before a weight is: it is too long."""
    done = piped("generate", LONG)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    count = TOKENS.search(line)
    assert line.startswith("generate.py: ") and count and int(count[1]) > 3000


@pytest.fixture
def prompt_of(monkeypatch):
    """The prompt that generate reads from a pipe, into which `data` was written, if any."""

    def read(data: bytes | None, *argv: str) -> str | None:
        reading, writing = os.pipe()
        if data is not None:
            os.write(writing, data)
            os.close(writing)
        with os.fdopen(reading) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            [prompt] = read_prompts(make_parser("generate").parse_args(argv))
        if data is None:
            os.close(writing)
        return prompt.text

    return read


@pytest.mark.parametrize("argv", [(), ("-",)])
def test_what_a_pipe_may_bring(argv, prompt_of):
    assert prompt_of(b"two\nlines\n", *argv) == "two\nlines"
    assert prompt_of(b"ended by\r\n", *argv) == "ended by"
    with pytest.raises(ValueError, match="standard input is not UTF-8"):
        prompt_of(b"\xff", *argv)
    with pytest.raises(ValueError, match="the prompt ' ' is empty"):
        prompt_of(b" \n", *argv)


def test_a_prompt_needs_no_pipe(prompt_of, capsys):
    """A closed one is as none, a silent one is not waited for, and an argument comes first."""
    assert prompt_of(b"") == DEFAULT_PROMPT and capsys.readouterr().err == ""
    assert prompt_of(b"unread", "typed") == "typed"
    assert prompt_of(None) == DEFAULT_PROMPT
    assert "nothing comes on standard input" in capsys.readouterr().err
