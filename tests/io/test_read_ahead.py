"""Reading ahead: the same bits however a file is cut, and no more held than was said."""

import functools
import gc
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash.io import assemble, load_target, open_checkpoint, read_ahead
from jflash.io.families import dflash
from jflash.io.names import leaf_sources
from tests.support.small_checkpoints import (
    DRAFTER,
    TARGET,
    Folders,
    make_pair,
)


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


def extreme(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Every kind of float32, subnormal ones, both zeros and both infinities among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-44, 30, shape)
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 65504.0, 3.4e38]
    flat = values.astype(np.float32).ravel()
    flat[: min(len(special), flat.size)] = special[: flat.size]
    return flat.reshape(shape)


@pytest.mark.parametrize("turning", [True, False])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_pieces_make_the_same_bits(pair, monkeypatch, stored, turning):
    """However a tensor is cut, and whoever transposes it: what numpy makes of the whole file."""
    file = pair.drafter / "model.safetensors"
    with np.errstate(over="ignore"):
        tensors = {
            name: extreme(tensor.shape, i).astype(jnp.dtype(stored))
            for i, (name, tensor) in enumerate(load_file(file).items())
        }
    save_file(tensors, file)
    monkeypatch.setattr(read_ahead, "PIECE", 700)  # some rows of a tensor, less than one of others
    monkeypatch.setattr(read_ahead, "AHEAD", 5)
    monkeypatch.setattr("jflash.io.assemble._device_turns", lambda: turning)
    for dtype in (None, "float32", "bfloat16"):
        want = jnp.dtype(dtype or (stored if stored != "float64" else "float32"))
        params = open_checkpoint(pair.drafter).check(DRAFTER)(dtype, False)
        for leaf, parts in leaf_sources(DRAFTER, dflash.NAMES).items():
            got = functools.reduce(lambda tree, key: tree[key], leaf.split("/"), params)
            whole = np.concatenate([tensors[part.name] for part in parts])
            whole = whole.T if leaf.endswith("/kernel") else whole
            with np.errstate(over="ignore"):
                whole = whole.astype(want)
            assert got.dtype == want and np.asarray(got).tobytes() == whole.tobytes(), leaf


def test_no_more_is_read_than_may_be_under_way(pair, monkeypatch):
    started = []
    honest = read_ahead.read

    def counted(piece):
        started.append(piece)
        return honest(piece)

    monkeypatch.setattr(read_ahead, "AHEAD", 4)
    monkeypatch.setattr(read_ahead, "read", counted)
    tensors = read_ahead.find_tensors(pair.target / "model.safetensors")
    pieces = list(tensors.values())
    assert len(pieces) > 9
    arrivals = read_ahead.read_ahead(pieces)
    for i in range(5):
        piece, rows = next(arrivals)
        assert piece == pieces[i] and rows.shape == piece.shape
        assert len(started) <= i + 4
    arrivals.close()
    assert len(started) <= 8  # what was not begun is not read


def test_no_weight_is_held_twice_beside_one_leaf(pair, monkeypatch):
    """All bytes on the device, each time that a leaf is put together: its parts and itself too."""
    held, before = [], 0
    honest = assemble._join

    def counted(parts, *rest):
        leaf = jax.block_until_ready(honest(parts, *rest))
        held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        return leaf

    monkeypatch.setattr(assemble, "_join", counted)
    monkeypatch.setattr(assemble, "_device_turns", lambda: True)
    monkeypatch.setattr(read_ahead, "PIECE", 700)
    open_checkpoint(pair.target).check(TARGET)("float32", False)  # constants of its own are made
    held.clear()
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    params = open_checkpoint(pair.target).check(TARGET)("float32", False)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # Embedding and head, the largest, come while the rest is missing: no more than a layer's leaf
    # comes on top of all the parameters.
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params["layers_0"]))
    assert len(held) > 8 and total < max(held) <= total + largest
    assert largest < params["embedding"].nbytes / 3


def test_a_file_that_shrinks_while_it_is_read(pair):
    file = pair.target / "model.safetensors"
    tensors = list(read_ahead.find_tensors(file).values())
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated at "):
        list(read_ahead.read_ahead(tensors))
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read at"):
        list(read_ahead.read_ahead(tensors))


def test_progress_counts_bytes(pair, capsys):
    load_target(pair.target, progress=True)
    size = sum(x.nbytes for x in load_file(pair.target / "model.safetensors").values())
    last = capsys.readouterr().err.rstrip().split("\r")[-1]
    assert "loading target: 100%" in last and f"{size / 1000:.0f}k/{size / 1000:.0f}k" in last
