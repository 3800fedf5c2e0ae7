"""Runs a program that a model wrote with its tests, in separate processes, with limits.

The limits of time, memory, processes and files in its folder hold for a program and all that it
starts together, and all of that ends with it. This is no sandbox: the program runs as this user,
may read and write what the user may, kill what the user runs (its supervisor too) and use the
network. Run it only where that does no harm.
"""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jflash.evals import program_supervisor
from jflash.evals.fenced import fenced_blocks
from jflash.evals.program_supervisor import PASSED, TIMEOUT, Limits
from jflash.io.text import before_stop

LIMITS = Limits()
END_SECONDS = 10.0  # for the supervisor, after a program's time, to end what there is
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # of HumanEval's completions, by its paper


def program(dataset: str, record: dict[str, Any], text: str) -> str:
    """The program to run: the answer's code, then the data set's tests of it."""
    if dataset == "humaneval":
        name, prompt = record["entry_point"], record["prompt"]
        definition = re.compile(rf"^(?:async +)?def +{re.escape(name)}\b", re.MULTILINE)
        code = _code(text, definition)
        goes_on = code.strip("\r\n")[:1].isspace()  # where the prompt ended
        if goes_on and not fenced_blocks(text):
            code = before_stop(code, STOPS)
        if goes_on or not definition.search(code):
            code = prompt + code
        elif begin := definition.search(prompt):  # imports and helpers of the prompt stay known
            code = prompt[: begin.start()] + "\n" + code
        return f"{code}\n{record['test']}\ncheck({name})\n"
    tests = "\n".join(record["test_list"])
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    return f"{_code(text, re.compile('def '))}\n{setup}\n{tests}\n"


def passes(source: str, limits: Limits = LIMITS) -> str:
    """'passed', 'failed' or 'timeout'; a program passes only if its last line ran.

    ValueError on a system without /proc, where what a program starts cannot be ended.
    """
    if not Path("/proc/self/stat").exists():
        raise ValueError(f"programs run only on Linux, this is {sys.platform}: leave out --execute")
    end = secrets.token_hex(16)  # a program that leaves early cannot print it
    # The output goes to a file, because a pipe's content has no limit, and to one that the program
    # cannot remove.
    with tempfile.TemporaryFile() as printed, _folder() as folder:
        file = folder / "program.py"
        # Python refuses a text that is no Unicode when it reads the program.
        file.write_bytes(f"{source}\nprint({end!r})\n".encode("utf-8", "surrogatepass"))
        supervisor = subprocess.Popen(
            [sys.executable, "-I", program_supervisor.__file__, str(file), json.dumps(limits)],
            cwd=folder, start_new_session=True,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = supervisor.wait(limits.wall_seconds + END_SECONDS)
        except subprocess.TimeoutExpired:  # the program has stopped its supervisor
            supervisor.kill()
            code = TIMEOUT
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.terminate()  # if it is Ctrl-C that ends the waiting
                supervisor.wait(END_SECONDS)
        printed.seek(0)
        ended = printed.read().endswith(f"{end}\n".encode())
    if code == TIMEOUT:
        return "timeout"
    return "passed" if code == PASSED and ended else "failed"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder, gone afterwards whatever a program made of it."""
    folder = tempfile.mkdtemp(prefix="jflash-run-")
    try:
        yield Path(folder)
    finally:
        # shutil.rmtree stops at folders a thousand deep.
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _code(text: str, wanted: re.Pattern[str]) -> str:
    """The first fenced block that holds `wanted`, else the first block, else the text itself."""
    blocks = fenced_blocks(text)
    return next((block for block in blocks if wanted.search(block)), blocks[0] if blocks else text)
