"""The CPU seconds of every test file, so that the longest files of a whole run begin first.

`pytest --record-durations` measures the files that it runs and writes durations.json, which is
committed; a file that it does not know begins first, as long files do.
"""

import json
import resource
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "durations.json"
KEY = pytest.StashKey[Counter[str]]()


def _cpu_seconds() -> float:
    """Of this process and of those that it started and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(x.ru_utime + x.ru_stime for x in used)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {RECORD.name} of the files run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEY] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known: dict[str, int] = json.loads(RECORD.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -known.get(_name(item), sys.maxsize))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        item.config.stash[KEY][_name(item)] += _cpu_seconds() - before


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """A process of pytest-xdist ended: its seconds come to the one that writes."""
    node.config.stash[KEY].update(getattr(node, "workeroutput", {}).get("durations", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["durations"] = dict(config.stash[KEY])
    elif config.option.record_durations:
        known = json.loads(RECORD.read_text(encoding="utf-8"))
        known |= {name: round(seconds) for name, seconds in config.stash[KEY].items()}
        there = {name: seconds for name, seconds in known.items() if (ROOT / name).exists()}
        ordered = dict(sorted(there.items(), key=lambda x: (-x[1], x[0])))
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()
