"""Leaves are what the modules compute with: nothing else says what a parameter is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.bench.shapes import model_shape
from jflash.compiled.programs import compile_programs
from jflash.compiled.shape import Shape, new_state
from jflash.io import assemble, load_target, save_checkpoint
from jflash.layers.passes import Block
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, with_context_kernel
from jflash.models.params import abstract_params, decoding_params, leaf_paths, random_params
from jflash.pair import Models, Params
from jflash.records.kernels import XLA
from jflash.records.leaves import Leaf, SideBySide
from jflash.records.specs import MoeSpec
from tests.support.pairs import drafter_config, target_config

AXES = {"qkv": ("embed", "kv_heads", "qkv"), "gate_up": ("embed", "gate_up", "mlp")}


@pytest.mark.parametrize("name", ["tiny", "tiny-dflash2"])
def test_a_drafter_decodes_with_exactly_its_leaves(name):
    """Context leaves stand in the tree as with_context_kernel makes them."""
    config = model_shape(name).drafter
    params = random_params(config, 0)
    made = jax.eval_shape(lambda p: with_context_kernel(Drafter(config), p), params)
    leaves = jax.tree.map(lambda leaf: leaf.struct, decoding_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), leaves
    )


def test_fused_leaves_are_sliced_along_their_logical_axes():
    config = target_config()
    mixer = config.mixers[0]
    leaves = abstract_params(config)["layers_0"]
    qkv, gate_up = leaves["attention"]["qkv"]["kernel"], leaves["mlp"]["gate_up"]["kernel"]
    head = mixer.head_dim
    assert qkv.shape == (config.hidden_size, mixer.num_kv_heads, (mixer.groups + 2) * head)
    assert gate_up.shape == (config.hidden_size, 2, config.intermediate_size)
    assert (qkv.axes, gate_up.axes) == (AXES["qkv"], AXES["gate_up"])
    for leaf in (qkv, gate_up):
        assert jnp.prod(jnp.array(leaf.stored)) == leaf.size


MOE = MoeSpec(num_experts=6, experts_per_token=2, intermediate_size=24, renormalise=True)


@pytest.fixture
def turned_round(monkeypatch):
    """Turns SideBySide round. Loading compiles its joins once a process, so they are forgotten
    before and after: any later load would take the turned ones."""

    def join(self, parts, axis=-1):
        return jnp.concatenate(parts[::-1], axis)

    def split(self, x):
        return jnp.split(x, np.cumsum(self.columns[::-1])[:-1], -1)[::-1]

    def firsts(self):
        return tuple(sum(self.columns[i + 1 :]) for i in range(len(self.columns)))

    def turn():
        for compiled in (assemble._join, assemble._join_experts):
            compiled.clear_cache()
        monkeypatch.setattr(SideBySide, "join", join)
        monkeypatch.setattr(SideBySide, "split", split)
        monkeypatch.setattr(SideBySide, "firsts", property(firsts))

    yield turn
    for compiled in (assemble._join, assemble._join_experts):
        compiled.clear_cache()


@pytest.mark.parametrize("experts", [{}, {"moe": MOE, "sparse": (0,)}], ids=["dense", "experts"])
def test_only_the_format_knows_where_parts_lie(experts, tmp_path, turned_round):
    """Turned round, files are read into the other order, and written as they were."""
    config = target_config(**experts)
    params = random_params(config, 0)
    save_checkpoint(tmp_path / "one", config, params, "float32")
    turned_round()
    turned = load_target(tmp_path / "one", "float32")[1]
    gate, up = jnp.split(params["layers_0"]["mlp"]["gate_up"]["kernel"], 2, axis=-1)
    got = turned["layers_0"]["mlp"]["gate_up"]["kernel"]
    np.testing.assert_array_equal(got, jnp.concatenate([up, gate], axis=-1))
    save_checkpoint(tmp_path / "two", config, turned, "float32")
    files = [tmp_path / name / "model.safetensors" for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True, "mlp_bias": True}, {"gated": True, "moe": MOE, "deltas": (1,)}],
    ids=["dense", "hybrid"],
)
def test_a_format_changes_no_result(changes, turned_round):
    """Turned round, models compute what they did: no layer and no kernel knows the order."""
    configs = target_config(**changes), drafter_config(num_layers=2)
    params = [random_params(config, i) for i, config in enumerate(configs)]
    parts = [split_leaves(config, p) for config, p in zip(configs, params, strict=True)]
    want = features_and_context(*configs, *params)
    turned_round()
    turned = [join_leaves(*pair) for pair in zip(configs, parts, strict=True)]
    unequal = jax.tree.map(lambda a, b: not np.array_equal(a, b), params, turned)
    assert sum(jax.tree.leaves(unequal)) > 6
    got = features_and_context(*configs, *turned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def split_leaves(config, params):
    """The parts of each fused leaf by path, the whole of each other."""
    values = dict(zip(leaf_paths(config), jax.tree.leaves(params), strict=True))
    return {
        path: leaf.format.split(values[path]) if leaf.format else values[path]
        for path, leaf in leaf_paths(config).items()
    }


def join_leaves(config, parts):
    formats = {path: leaf.format for path, leaf in leaf_paths(config).items()}
    joined = {p: formats[p].join(x) if formats[p] else x for p, x in parts.items()}
    return assemble.nest(joined)


def features_and_context(target, drafter, target_params, drafter_params):
    """A block through the target, and the keys and values that the drafter takes of it."""
    models = Models(Target(target), Drafter(drafter), 8)
    caches = models.target.empty_states(1, 64, 8, "float32")
    over = Block(jnp.zeros(1, jnp.int32), jnp.full(1, 8), XLA)
    positions = jnp.arange(8)[None]
    hidden, features, _ = models.target.apply(
        {"params": target_params}, positions % 7, positions, caches, over, models.taps
    )
    context = models.drafter.apply(
        {"params": drafter_params}, features, positions, method="context"
    )
    return hidden, [projected.split() for projected in context]


def test_a_later_load_joins_as_before(tmp_path):
    """After the test above: what was compiled while the format was turned is forgotten."""
    config = target_config()
    params = random_params(config, 0)
    save_checkpoint(tmp_path / "one", config, params, "float32")
    again = load_target(tmp_path / "one", "float32")[1]
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_an_array_of_another_shape_or_none_is_refused():
    """By its path, as what it is: it was an assertion, and an error of Flax's."""
    config = target_config()
    params = random_params(config, 0)
    hidden = jnp.zeros((1, 1, config.hidden_size))
    cut, wrong = params["norm"]["scale"][:-1], "the parameters are not the model's: norm/scale is"
    for norm, found in (({"scale": cut}, rf"\({len(cut)},\)"), ({}, "missing")):
        params["norm"] = norm
        with pytest.raises(ValueError, match=rf"{wrong} {found}, expected \({len(cut) + 1},\)"):
            Target(config).apply({"params": params}, hidden, method=lambda m, x: m.norm(x))


def test_a_leaf_names_every_axis():
    with pytest.raises(AssertionError):
        Leaf((2, 3), ("embed",), SideBySide((1, 2)))


def test_the_dtype_is_the_configs_and_weights_of_another_are_refused():
    config = target_config()
    models, params = Models(Target(config)), Params(random_params(config, 0))
    shape = Shape.of(1, 256)
    for dtype in ("float32", "bfloat16"):
        state = jax.eval_shape(lambda dtype=dtype: new_state(models.of_dtype(dtype), shape))
        assert state.target_cache[0].k.dtype == dtype
    with pytest.raises(AssertionError, match=r"\{'float32'\} for models of bfloat16"):
        compile_programs(models.of_dtype("bfloat16"), params, shape)
