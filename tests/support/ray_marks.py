"""What tests on a local Ray need, and the file that keeps what they count."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jflash.device import describe_device

RESULT = "JFLASH_RAY"  # names a JSON file; without it the tests are left out
MARKS = [
    pytest.mark.ray,
    pytest.mark.skipif(RESULT not in os.environ, reason=f"no {RESULT}"),
    # Ray leaves sockets and files to the end of its processes.
    pytest.mark.filterwarnings("ignore"),
]


def keep(name: str, **figures: Any) -> None:
    """Adds the figures of a test to the file."""
    import ray  # pyright: ignore[reportMissingImports]

    file = Path(os.environ[RESULT])
    before = json.loads(file.read_text()) if file.exists() else {}
    found = before | {name: figures} | describe_device() | {"ray": ray.__version__}
    file.write_text(json.dumps(found, indent=1) + "\n")
