"""What the long tests gave: `JFLASH_LONG=FILE pytest -m long` keeps it, and the file is committed.

Runs of some of them add to the file what they ran.
"""

import json
import os
from pathlib import Path

import pytest

RESULT = "JFLASH_LONG"  # names a JSON file


class Kept:
    """Outcome and seconds of every long test, in the one process that hears of all."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and "long" in report.keywords:
            seconds = round(report.duration, 1)
            self.found[report.nodeid] = {"outcome": report.outcome, "seconds": seconds}

    def pytest_sessionfinish(self) -> None:
        from jflash.system.device import describe_device

        there = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        tests = dict(sorted((there.get("tests", {}) | self.found).items()))
        text = json.dumps(describe_device() | {"tests": tests}, indent=1)
        self.file.write_text(text + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if RESULT in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Kept(Path(os.environ[RESULT])))
