"""A checkpoint's digest: another model at the same path has another one, a copy has the same."""

import shutil
import struct

import pytest

from jflash.io import digest
from jflash.io.digest import checkpoint_digest
from tests.support.small_checkpoints import edit_config, make_pair


def test_a_copy_is_the_same_and_every_change_another(tmp_path):
    target = make_pair(tmp_path).target
    want = checkpoint_digest(target)
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    (copy / "notes.txt").write_text("no part of the model")
    assert checkpoint_digest(copy) == want
    configured = checkpoint_digest(copy, weights=False)
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    assert checkpoint_digest(copy) != want
    assert checkpoint_digest(copy, weights=False) == configured
    shutil.copy(target / "model.safetensors", file)
    edit_config(copy, rms_norm_eps=1e-3)
    assert checkpoint_digest(copy) != want
    assert checkpoint_digest(copy, weights=False) != configured


@pytest.mark.parametrize("place", ["a.gguf", "orbax/d/a", "model.safetensors"])
def test_large_files_are_sampled_over_their_whole_length(tmp_path, monkeypatch, place):
    """Header, length and weights anywhere count, at a bounded number of bytes read."""
    for name, value in {"WHOLE_BYTES": 4096, "HEAD_BYTES": 512, "PIECE_BYTES": 16}.items():
        monkeypatch.setattr(digest, name, value)
    file = tmp_path / "checkpoint" / place
    file.parent.mkdir(parents=True)
    source = file if place == "a.gguf" else tmp_path / "checkpoint"
    whole = struct.pack("<20000I", *range(20_000))
    file.write_bytes(whole)
    want = checkpoint_digest(source)
    trained = bytes(len(whole) // 2)  # one half of the weights is another
    for other in (
        b"x" + whole[1:],
        whole[:-1] + b"x",
        whole + b"x",
        whole[: -len(trained)] + trained,
        whole[:512] + trained + whole[512 + len(trained) :],
    ):
        file.write_bytes(other)
        assert checkpoint_digest(source) != want
    file.write_bytes(whole)
    assert checkpoint_digest(source) == want
