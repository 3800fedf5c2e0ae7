"""Does a program that a model wrote pass its tests: run in a process of its own, with limits.

The limits are on time, memory, processor time and written files. It is no sandbox: the program
runs as this user, may read what the user may read and use the network. Run it only where that is
no harm.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WALL_SECONDS, CPU_SECONDS = 10.0, 10
MEMORY_BYTES, FILE_BYTES = 2 * 2**30, 2**20
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)

# The child limits itself before it reads a line of the program.
LIMITED = """
import resource, runpy, sys
for name, value in zip(("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_CORE"), sys.argv[2:]):
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def program(dataset: str, record: dict[str, Any], text: str) -> str:
    """The whole of what is run: the answer's code, then the data set's tests of it."""
    if dataset == "humaneval":
        name = record["entry_point"]
        code = _code(text, f"def {name}")
        if f"def {name}" not in code:  # the answer goes on where the prompt ended
            code = record["prompt"] + code
        else:  # imports and helpers of the prompt stay known
            code = record["prompt"].rpartition("def ")[0] + "\n" + code
        return f"{code}\n{record['test']}\ncheck({name})\n"
    tests = "\n".join(record["test_list"])
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    return f"{_code(text, 'def ')}\n{setup}\n{tests}\n"


def passes(source: str, wall_seconds: float = WALL_SECONDS) -> str:
    """'passed', 'failed' or 'timeout'. Passed is only what reaches its own end."""
    end = secrets.token_hex(16)  # a program that leaves early cannot say it
    with tempfile.TemporaryDirectory(prefix="jflash-run-") as folder:
        file = Path(folder) / "program.py"
        file.write_text(f"{source}\nprint({end!r})\n", encoding="utf-8")
        limits = map(str, (CPU_SECONDS, MEMORY_BYTES, FILE_BYTES, 0))
        printed = Path(folder) / "printed"  # a file, because a pipe's content has no limit
        with printed.open("wb") as stdout:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", LIMITED, str(file), *limits],
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = child.wait(wall_seconds)
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # and whatever it started
                child.wait()
        ended = printed.read_bytes().endswith(f"{end}\n".encode())
    return "passed" if code == 0 and ended else "failed"


def _code(text: str, wanted: str) -> str:
    """The first fenced block that holds `wanted`, else the first block, else the text itself."""
    blocks = FENCE.findall(text)
    return next((block for block in blocks if wanted in block), blocks[0] if blocks else text)
