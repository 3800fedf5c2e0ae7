"""Loading the Orbax form: in groups, a bar that counts bytes, and only damage called damage."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jflash.io import load_target, orbax_checkpoint
from jflash.io.convert import convert_checkpoint
from tests.support.small_checkpoints import Folders, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Folders:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def converted(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "target"
    convert_checkpoint(pair.target, folder)
    return folder


def test_groups_fill_every_leaf_and_the_bar_counts_bytes(pair, converted, monkeypatch, capsys):
    wanted = load_target(pair.target, "float32")[1]
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(wanted))
    calls = []
    restore = ocp.PyTreeCheckpointer.restore

    def counted(self, path, args):
        calls.append(set(args.item))
        return restore(self, path, args=args)

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", counted)
    monkeypatch.setattr(orbax_checkpoint, "GROUP", total // 3)
    got = load_target(converted, "float32", progress=True)[1]
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(calls) > 1 and sum(map(len, calls)) == len(set().union(*calls)) == len(wanted)
    err = capsys.readouterr().err
    assert "loading target: 100%" in err and f"{total / 1000:.0f}k/{total / 1000:.0f}k " in err
    load_target(converted, "float32")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "failure", [MemoryError("no room"), RuntimeError("RESOURCE_EXHAUSTED"), KeyError("a bug")]
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_what_is_no_damage_is_not_called_damage(converted, monkeypatch, failure, wrapped):
    def failing(self, path, args):
        if wrapped:  # as Orbax does with what it meets while it reads an array
            raise Exception("Encountered error while reading array") from failure
        raise failure

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", failing)
    with pytest.raises(Exception) as error:
        load_target(converted)
    assert not isinstance(error.value, ValueError)
    assert failure in (error.value, error.value.__cause__)
