"""Python programs in processes of their own, on several virtual CPU devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEVICES = 4


def start(program: str, *arguments: str) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {
        "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def result(run: subprocess.Popen) -> Any:
    """What the last line that a program prints says, as JSON."""
    out, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])
