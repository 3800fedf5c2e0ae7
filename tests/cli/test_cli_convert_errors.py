"""convert_checkpoint.py's bad input: one line on stderr, exit code 2, nothing written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jflash.cli import main
from tests.support.small_checkpoints import Folders, edit_config, edit_tensors, make_pair

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


def convert_refused(refused, argv: list, *named: str) -> None:
    refused([str(value) for value in argv], *named, command="convert")


def test_convert_sources(pair, refused, tmp_path):
    destination = tmp_path / "converted"
    convert_refused(refused, [tmp_path / "nowhere", destination], "nowhere")
    edit_config(pair.target, architectures=["FalconForCausalLM"])
    convert_refused(refused, [pair.target, destination], "FalconForCausalLM")
    edit_tensors(pair.drafter, drop=("fc.weight",), more=np.zeros(3, np.float32))
    convert_refused(refused, [pair.drafter, destination], "missing: fc.weight", "unknown: more")
    os.truncate(pair.drafter / "model.safetensors", 1000)
    convert_refused(refused, [pair.drafter, destination], "corrupt or truncated")
    convert_refused(refused, [pair.drafter], "DST")


def test_convert_destinations(pair, refused, tmp_path):
    old = tmp_path / "old"
    (old / "orbax").mkdir(parents=True)
    (old / "config.json").write_text("{}")
    convert_refused(refused, [pair.drafter, old], "exists already", "--overwrite")
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter").write_text("1")
    convert_refused(refused, [pair.drafter, other, "--overwrite"], "thesis exists and is no")
    theirs = "drafter holds a checkpoint that is not a converted one"  # maybe its only copy
    convert_refused(refused, [pair.target, pair.drafter, "--overwrite"], theirs)
    below = pair.target / "config.json" / "dst"
    convert_refused(refused, [pair.drafter, below], "cannot write", "dst")
    convert_refused(refused, [pair.drafter, "/proc/dst"], "cannot write /proc/dst")
    convert_refused(refused, [pair.drafter, pair.target / "config.json", "--overwrite"], "no chec")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_convert_without_permission(pair, refused, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    convert_refused(refused, [pair.drafter, closed / "dst"], "closed/dst", "Permission denied")


def test_convert_with_no_space_left(pair, tmp_path):
    """A real full disc, where a test may make one; in a process of its own, as Orbax's threads
    outlive the error."""
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=16k", "none", str(small)]
    if not mount or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        argv = [str(pair.drafter), str(small / "a" / "dst")]
        command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, env=environment, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        assert "small/a/dst" in done.stderr and done.stderr.endswith("No space left on device\n")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


UNBEGUN = """
import asyncio, sys, types
from orbax.checkpoint._src.serialization import serialization

def full(*writes):
    raise OSError(28, "No space left on device")

serialization.asyncio = types.SimpleNamespace(**vars(asyncio) | {"gather": full})
from jflash.cli.main import main
sys.exit(main(["convert", *sys.argv[1:]]))
"""


def test_convert_is_silent_about_writes_that_never_began(pair, tmp_path):
    """Orbax makes its writes before it begins them, and Python warns of those that it never did."""
    argv = [str(pair.drafter), str(tmp_path / "dst")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", UNBEGUN, *argv]
    done = subprocess.run(command, capture_output=True, env=environment, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "No space left on device" in done.stderr


def test_convert_ends_its_line_where_tensorstores_notes_begin(pair, monkeypatch, tmp_path, capsys):
    """Its errors are these, and folders may have brackets in their names."""

    def full(folder: Path, params: object) -> None:
        notes = "[os_error_code='28' tensorstore_spec='{\"context\":{}}']"
        raise ValueError(f'Error writing local file "/a [b=c]/d": No space left on device {notes}')

    monkeypatch.setattr("jflash.io.convert.save_orbax", full)
    assert main.run("convert", [str(pair.target), str(tmp_path / "dst")]) == 2
    err = capsys.readouterr().err
    assert err.endswith('"/a [b=c]/d": No space left on device\n') and err.count("\n") == 1


def test_convert_that_fails_halfway_keeps_the_old_one(pair, refused, monkeypatch, tmp_path):
    def full(folder: Path, params: object) -> None:
        (folder / "orbax").mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jflash.io.convert.save_orbax", full)
    old = tmp_path / "old"
    (old / "orbax").mkdir(parents=True)
    (old / "config.json").write_text("{}")
    argv = [pair.target, old, "--overwrite"]
    convert_refused(refused, argv, "cannot write", "No space left on device")
    convert_refused(refused, [pair.target, tmp_path / "new" / "dst"], "No space left on device")
