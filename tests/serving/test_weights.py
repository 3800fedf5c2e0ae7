"""New parameters: what stays where it is, and what is refused by the leaf's name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.io import load_drafter, load_pair
from jflash.serving.weights import replacing, replacing_drafter
from jflash.system.embedded import EMBEDDED_PAIR
from tests.support.virtual_devices import result, start

SHARED = """
import jax, json, jflash
import numpy as np
from jflash.devices.distribute import placed
from jflash.io import load_drafter
from jflash.serving.weights import replacing, replacing_drafter

folders = [f"checkpoints/tiny-math/{x}" for x in ("target", "drafter")]
one, two = (jflash.load_pair(*folders, dtype="float32", tensor_parallel=n) for n in (1, 2))
old, whole = two.params.target, one.params.target
brought = placed(two.models.mesh, two.models.target.config, whole)
found = {}
for name, new in {
    "whole": whole, "NumPy's": jax.tree.map(np.asarray, whole), "own": old, "brought": brought,
    "computed": jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree))(old),
}.items():
    try:
        got = replacing(old, new, "target")
    except ValueError as error:
        found[name] = str(error)
    else:
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(new))
        found[name] = all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)
drafters = two.params.drafter
new = load_drafter(folders[1], "float32")[1]
got = replacing_drafter(
    two.models, drafters, placed(two.models.mesh, two.models.drafter.config, new)
)
found["drafter's"] = jax.tree.structure(got) == jax.tree.structure(drafters) and all(
    a.sharding == b.sharding and (np.asarray(a) == np.asarray(b)).all()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(drafters))
)
print(json.dumps(found))
"""


def deleted() -> jax.Array:
    array = jnp.zeros(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (np.zeros(3), r"is float64\[3\], not float32\[3\]"),
        (jnp.zeros(4), r"is float32\[4\], not float32\[3\]"),
        (jax.ShapeDtypeStruct((3,), jnp.float32), "is no array but ShapeDtypeStruct"),
        (deleted(), "was deleted, or donated"),
        (None, "is missing"),
        ({"more": jnp.zeros(3)}, "is missing"),
    ],
)
def test_a_leaf_that_does_not_fit_is_refused_by_its_name(leaf, why):
    """The device would only find out in the engine's thread, and end the engine for all."""
    old = {"layer": {"kernel": jnp.zeros(3), "bias": jnp.zeros(2)}}
    with pytest.raises(ValueError, match=rf"of the target: \['layer'\]\['kernel'\] {why}"):
        replacing(old, {"layer": {"kernel": leaf, "bias": jnp.ones(2)}}, "target")


def test_another_tree_is_refused():
    array = jnp.zeros(3)
    with pytest.raises(ValueError, match="of the drafter: the engine's pair has none"):
        replacing(None, {"kernel": array}, "drafter")
    with pytest.raises(ValueError, match=r"\['more'\] is none of the engine's"):
        replacing({"kernel": array}, {"kernel": array, "more": array}, "target")
    with pytest.raises(ValueError, match="list'> is not the engine's tree"):
        replacing((array,), [array], "target")


def test_arrays_stay_where_they_are_and_those_of_numpy_are_copied():
    old, new = {"a": jnp.zeros(4096), "b": jnp.zeros(4096)}, jnp.ones(4096)
    theirs = np.ones(4096, np.float32)
    old["a"].delete()  # its memory may be the new array's by now
    got = replacing(old, {"a": new, "b": theirs}, "target")
    theirs[:] = 7
    assert got["a"] is new and isinstance(got["b"], jax.Array)
    assert got["b"].tolist() == [1.0] * 4096


def test_whole_weights_are_no_parts_of_several_devices():
    """They have the parts' shapes and not their columns' order: the texts would be others."""
    found = result(start(SHARED))
    refusals = [found.pop(name) for name in ("whole", "NumPy's")]
    assert found == {"own": True, "brought": True, "computed": True, "drafter's": True}
    for refusal in refusals:
        assert "does not lie in parts on the engine's 2 devices" in str(refusal)


@pytest.mark.parametrize("stale", [False, True])
def test_a_drafters_context_kernel_is_made_of_its_new_layers(stale):
    """Files and trained trees have none, or that of the old kernels, with which fewer drafts are
    accepted and nobody knows why."""
    pair = load_pair(EMBEDDED_PAIR / "target", EMBEDDED_PAIR / "drafter", dtype="float32")
    old, given = pair.params.drafter, load_drafter(EMBEDDED_PAIR / "drafter", "float32")[1]
    given = jax.tree.map(lambda leaf: leaf * 2, given)
    if stale:
        given["context_kernel"] = old["context_kernel"]
    new = replacing_drafter(pair.models, old, given)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    np.testing.assert_array_equal(new["context_kernel"], 2 * old["context_kernel"])
    del given["fc"]
    with pytest.raises(ValueError, match=r"of the drafter: \['fc'\]\['kernel'\] is missing"):
        replacing_drafter(pair.models, old, given)
