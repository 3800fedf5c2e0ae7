"""Compiled programs of files that are over are dropped before a process has too many of them.

XLA maps the code of each program into memory by itself. Linux allows a process 65,530 mappings, and
without another one the next compilation ends it. The largest process of a run of three had 58,000.
"""

import gc
from pathlib import Path

import jax
import pytest

MAPPINGS = Path("/proc/self/maps")
ENOUGH = 50_000


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    over = nextitem is None or nextitem.path != item.path
    if over and MAPPINGS.exists() and _mappings() > ENOUGH:
        jax.clear_caches()
        gc.unfreeze()  # each test has frozen what was there
        gc.collect()


def _mappings() -> int:
    with MAPPINGS.open("rb") as lines:
        return sum(1 for _ in lines)
