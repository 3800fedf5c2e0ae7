"""Parts of a run on a local Ray: a lost one is made again, and its errors are the command's."""

import functools
import importlib
import os
import signal
from pathlib import Path

import pytest

from jflash.system.replicas import cluster, made
from tests.support.ray_marks import MARKS

pytestmark = MARKS


def part(folder: Path, lost: tuple[int, int], index: int, of: int) -> str:
    """Dies in the first `lost[1]` tries of part `lost[0]`."""
    tries = folder / str(index)
    with tries.open("a") as file:
        file.write("x")
    if index == lost[0] and len(tries.read_text()) <= lost[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 7:
        raise ValueError("the seventh part is wrong")
    if lost == (index, -1):
        (tries / "below").mkdir()
    if lost == (index, -2):
        importlib.import_module("optax.nothere")
    return f"{index} of {of} in {Path.cwd()}"


def test_a_lost_part_is_made_again_and_an_error_is_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(name: str, lost: tuple[int, int], parts: int) -> list[str]:
        folder = tmp_path / name
        folder.mkdir()
        return made(functools.partial(part, folder, lost), parts, 1)

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # another cluster's, which is not asked
    with cluster(None, 4):
        want = [f"{index} of 3 in {tmp_path}" for index in range(3)]
        assert run("once", (1, 1), 3) == want
        assert "replica 1 of 3 is lost" in capsys.readouterr().err
        assert [len((tmp_path / "once" / str(n)).read_text()) for n in range(3)] == [1, 2, 1]
        with pytest.raises(ValueError, match="replica 0 of 2 ended 3 times"):
            run("always", (0, 9), 2)
        with pytest.raises(ValueError, match="the seventh part is wrong"):
            run("wrong", (9, 0), 8)
        with pytest.raises(NotADirectoryError) as place:
            run("place", (1, -1), 2)
        assert str(place.value).startswith("[Errno 20] Not a directory: ")
        with pytest.raises(ModuleNotFoundError) as module:
            run("module", (1, -2), 2)
        assert module.value.name == "optax.nothere"


def test_a_cluster_that_does_not_answer_is_not_waited_for():
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"):
        why = f"--ray-address {address}: nothing answers there "
        with pytest.raises(ValueError, match=why), cluster(address, 2):
            pass
