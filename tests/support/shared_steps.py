"""A step on several devices against one device's: layers of each kind, and DFlash 2."""

import functools
import operator
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec

from jflash import load_pair
from jflash.bench.shapes import model_shape
from jflash.cli.training_run import Prepared, target_files
from jflash.compiled.shape import Shape, new_state, state_specs
from jflash.devices.distribute import place, placed
from jflash.devices.kept import in_fragments
from jflash.devices.mesh import (
    EVERYWHERE,
    local,
    over,
    param_specs,
    spread,
    tensor_mesh,
    with_context,
)
from jflash.devices.structs import param_structs
from jflash.generate import Pair
from jflash.io import (
    configure_pair,
    convert_checkpoint,
    load_weights,
    open_checkpoint,
    save_checkpoint,
)
from jflash.layers.gather import AXIS
from jflash.layers.head import best_and_probability
from jflash.layers.projections import Output
from jflash.memory import memory_budget
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import leaf_paths, random_weights
from jflash.pair import Models, Params
from jflash.proof import devices as devices_module
from jflash.proof.cases import Case
from jflash.proof.devices import added_over_devices, shared_pair
from jflash.proof.kept_forms import as_codes
from jflash.proof.program.step_program import cut, models_of
from jflash.records import parts as parts_module
from jflash.records.config import second_version
from jflash.records.kernels import XLA, Kernels
from jflash.records.leaves import Leaf
from jflash.records.specs import DeltaSpec, Kept, MoeSpec
from jflash.speculative import commit, draft, verify
from jflash.system.embedded import EMBEDDED_PAIR as TINY
from pallas_kernels.matmul.float8.rounded import Rounded
from pallas_kernels.matmul.kept.quantised import Quantised
from tests.support.pairs import HYBRID, drafter_config, random_params, target_config
from tests.support.quantised_files import CASES, quantise
from tests.support.small_checkpoints import make_pair

TRUNK = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_heads": 8,
    "num_kv_heads": 2, "qkv_bias": True,
}  # fmt: skip
DELTA = DeltaSpec(num_key_heads=4, num_value_heads=8, key_dim=8, value_dim=8, taps=4)
MOE = MoeSpec(
    num_experts=4, experts_per_token=2, intermediate_size=64, renormalise=True, shared_size=64
)
BESIDE = replace(MOE, shared_size=None, activation="gelu_tanh")
MOE_TARGET = Path(__file__).parents[1] / "reference" / "cases" / "pair03" / "target"
FP8 = Kept("fp8", 16, "float32", zeros=False)
KEPT = [  # of the last layer
    f"layers_2/{path}/kernel"
    for path in ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")
]
SHAPE = Shape.of(1, 64, chunk=32)


def pair() -> tuple[Models, Params]:
    config = target_config(
        **TRUNK | HYBRID | {"deltas": ()}, num_layers=3, tie_embeddings=True, moe=MOE, sparse=(1,)
    )
    delta, sparse, dense = config.layers
    delta = replace(delta, mixer=DELTA)
    # Gemma's norms after attention and MLP, experts beside it, and MiniMax-M2's norm of all heads.
    sandwich = replace(dense, sandwich=True, scaled=True, beside=BESIDE)
    sandwich = sandwich.attending(num_kv_heads=4, gated=False, norm_all_heads=True)
    config = replace(config, layers=(delta, sparse, sandwich))
    drafter = drafter_config(
        **TRUNK, num_layers=1, mask_token_id=100, target_layer_ids=(0, 2), num_target_layers=3
    )
    drafter = second_version(drafter, selector_rank=16, selector_top_k=4)
    params = random_params(config, 0)
    config = config.keeping({path: FP8 for path in KEPT})
    for module, name, kernel in (path.split("/")[1:] for path in KEPT):
        layer = params["layers_2"][module]
        layer[name] = layer[name] | {kernel: codes_of(layer[name][kernel])}
    models = Models(Target(config), Drafter(drafter), 8, Kernels(*["cpu"] * len(XLA)))
    return models, Params(params, random_params(drafter, 1))


def codes_of(kernel: jax.Array) -> Quantised:
    scales = jnp.linspace(0.5, 1.5, kernel.shape[0] // FP8.group * kernel.shape[1])
    codes, scales = kernel.astype(jnp.float8_e4m3fn), scales.reshape(-1, kernel.shape[1])
    return Quantised(codes=codes, scales=scales, zeros=None, group=FP8.group)


def outcome(models: Models, whole: Params) -> dict[str, Any]:
    """A step from a text's beginning: its logits, and the tokens and states that it leaves."""
    part = local(models)

    def program(params, state):
        tokens = jnp.arange(SHAPE.capacity)[None] % 100
        state = state.with_sequences(
            tokens=tokens, limit=jnp.full(1, 60), done=jnp.zeros(1, bool), max_accept=jnp.full(1, 7)
        )
        proposal, state = draft(part, params, state)
        verdict, state = verify(part, params, state, proposal)
        return commit(part, params, state, verdict), verdict.logits

    given = zip((models.target, models.drafter), whole, strict=True)
    params = Params(*(placed(models.mesh, model.config, own) for model, own in given))
    params = with_context(models, params)
    where = state_specs(models)
    takes = (param_specs(models, params), where)
    run = spread(models.mesh, program, takes, (where, EVERYWHERE))
    state, logits = run(params, new_state(models, SHAPE))
    caches = (state.target_cache, state.drafter_cache)
    return {
        "tokens": np.asarray(state.sequences.tokens),
        "logits": np.asarray(logits),
        "states": [_in_order(np.asarray(x)) for x in jax.tree.leaves(caches)],
    }


def _in_order(x: np.ndarray) -> np.ndarray:
    """A convolution's rows have each device's queries, keys and values side by side."""
    return np.sort(x, axis=-1) if x.shape[-1] == DELTA.mixed_width else x


def largest_differences(devices: int, experts_over: str = "columns") -> dict[str, float]:
    """Between several devices' step and one device's, in float32."""
    models, whole = pair()
    several = over(models, tensor_mesh(devices), experts_over)
    one, other = outcome(models, whole), outcome(several, whole)
    assert np.isfinite(one["logits"]).all() and len(np.unique(one["logits"].argmax(-1))) > 2
    return {
        kind: max(
            float(np.abs(_one_of_each(a, b) - b).max())
            for a, b in zip(_listed(other[kind]), _listed(one[kind]), strict=True)
        )
        for kind in one
    }


def output_differences(
    devices: int, psum: bool = False, whole: bool = False, bias: bool = False
) -> int:
    """How many numbers of a layer's last product differ from one device's.

    `whole`: every device has all of its kernel.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (1, 8, 256), (256, 64), (1, 8, 64), (64,)
    x, kernel, residual, added = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    params = {"kernel": kernel} | ({"bias": added} if bias else {})

    def product(shards: int) -> Callable:
        leaf = Leaf((256, 64 if whole else 64 // shards), ("mlp", "embed"), whole=64)
        module = Output(leaf, bias, shards=shards, whole=whole)
        return lambda x, w, residual: module.apply({"params": w}, x, "cpu", residual)

    def faulty(*args):
        with nn.intercept_methods(added_over_devices):
            return product(devices)(*args)

    columns = {"kernel": PartitionSpec(None, AXIS), "bias": PartitionSpec(AXIS)}
    kernels = {name: EVERYWHERE if whole else columns[name] for name in params}
    takes = PartitionSpec(None, None, AXIS), kernels, EVERYWHERE
    several = faulty if psum else product(devices)
    shared = spread(tensor_mesh(devices), several, takes, EVERYWHERE)(x, params, residual)
    return int((np.asarray(shared) != np.asarray(product(1)(x, params, residual))).sum())


def random_parts(devices: int) -> dict[str, Any]:
    """Of weights drawn for devices that share them: what differs from whole ones, and the largest
    part of them that a device has."""
    models, _ = pair()
    mesh = tensor_mesh(devices)
    drawn = random_weights(models.configs, place=functools.partial(place, mesh))
    whole = map(functools.partial(placed, mesh), models.configs, random_weights(models.configs))
    found = jax.tree.leaves(drawn)
    pairs = zip(found, jax.tree.leaves(list(whole)), strict=True)
    most = max(
        sum(x.addressable_shards[i].data.nbytes for x in found) / sum(x.nbytes for x in found)
        for i in range(devices)
    )
    return {"differ": sum(bool((a != b).any()) for a, b in pairs), "most": most}


def rounding(pair: Pair) -> tuple[int, float, int, int]:
    """Of a float8 drafter of several devices: its rounded kernels, how far their parts lie from
    the exact ones, by each column's largest number, and bytes of one device, estimated and seen."""
    files = configure_pair(TINY / "target", TINY / "drafter", dtype=pair.models.dtype)
    exact = load_weights(replace(files, models=pair.models.drafting_in(""))).params
    heads = {"draft_head": exact.target.get("head", exact.target["embedding"]).T}
    found, worst = (
        jax.tree_util.tree_flatten_with_path(
            pair.params.drafter, is_leaf=lambda leaf: isinstance(leaf, Rounded)
        )[0],
        [],
    )
    for path, leaf in found:
        if isinstance(leaf, Rounded):
            whole = functools.reduce(lambda node, key: node[key.key], path, exact.drafter | heads)
            for own, *given in zip(*map(_on_devices, (whole, *leaf)), strict=True):
                made = given[0].astype(np.float32).T * given[1]
                worst.append(np.max(np.abs(made - own) / np.abs(own).max(axis=0)))
    bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(pair.params))
    estimated = memory_budget(pair.models, SHAPE).weights
    return sum(isinstance(x, Rounded) for _, x in found), float(max(worst)), estimated, bytes


def whole_again(devices: int) -> bool:
    """Whether a training's target, of which several devices had parts, is whole on one, and the
    parts are gone."""
    with tempfile.TemporaryDirectory() as folder:
        source = open_checkpoint(make_pair(Path(folder)).target)
        files = target_files(source, tensor_parallel=devices)
        parts = load_weights(files)
        [first, *others] = files.models.mesh.devices.flat
        config = drafter_config(**TRUNK, mask_token_id=100)
        made = Prepared(source, parts, config, [], [], []).whole(free=True)
        want = jax.tree.leaves(load_weights(target_files(source)).params)
    found = zip(jax.tree.leaves(made.params), want, strict=True)
    there = all(x.devices() == {first} and bool((x == y).all()) for x, y in found)
    return there and bool(others) and all(x.is_deleted() for x in jax.tree.leaves(parts.params))


def _on_devices(x: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def kept_from_files(devices: int) -> int:
    """How many arrays of kept kernels, read for several devices, differ from those of one."""
    with tempfile.TemporaryDirectory() as folder:
        dense, sparse = make_pair(Path(folder)).target, Path(folder) / "experts"
        shutil.copytree(MOE_TARGET, sparse)
        quantise(dense, CASES["awq"])
        quantise(sparse, CASES["ct-int4-zeros"])
        return _kept_from(dense, devices) + _kept_from(sparse, devices)


def fragments_from_files(devices: int) -> list[int]:
    """Of leaves in fragments, read for several devices, how many there are, whole ones among them;
    and how many device's parts differ from the fragments of the codes that it has."""
    target = model_shape("tiny-moe").target
    moe, found = replace(target.experts[0], num_experts=2, intermediate_size=256), [0, 0, 0]
    target = target.with_experts(moe, (0, 2))
    canonical = Kernels(**dict.fromkeys(XLA._fields, "canonical"))
    usual = mock.patch.object(parts_module, "READ_RATHER", 2**24)
    with usual, tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, target, random_params(target, 0), "bfloat16")
        quantise(Path(folder), CASES["fp8-block"])
        for over in ("columns", "devices"):
            shared: dict[str, Any] = dict(tensor_parallel=devices, experts_over=over)
            files = configure_pair(folder, quantised="kept", dtype="bfloat16", **shared)
            models = in_fragments(replace(files.models, kernels=canonical))
            words = load_weights(replace(files, models=models)).params.target
            codes, part = load_weights(files).params.target, local(models).target.config
            for path, leaf in leaf_paths(part).items():
                if leaf.fragmented:
                    arrays = _at(words, path).words, _at(codes, path)
                    found[0] += 1
                    found[1] += arrays[0].sharding.is_fully_replicated
                    found[2] += _others(leaf, *arrays)
    return found


def _at(params: Any, path: str) -> Any:
    return functools.reduce(operator.getitem, path.split("/"), params)


def _others(leaf: Leaf, words: Any, codes: Quantised) -> int:
    """Devices whose words are not those of their codes."""
    arrays, tree = jax.tree.flatten(codes)
    own = zip(*map(_on_devices, arrays), strict=True)
    want = [leaf.in_fragments(jax.tree.unflatten(tree, map(jnp.asarray, x))).words for x in own]
    pairs = zip(_on_devices(words), want, strict=True)
    return sum(bool((a != np.asarray(b)).any()) for a, b in pairs)


def codes_shared(devices: int) -> tuple[int, int, bool]:
    """Of a target of random codes the leaves in fragments on one device, and on several that share
    it; and whether these have what a step is lowered for."""
    canonical = Kernels(**dict.fromkeys(XLA._fields, "canonical"))
    models = replace(models_of(cut(model_shape("tiny"), 1, 1)).plain(), kernels=canonical)
    params = Params(None)
    case = as_codes(Case("tiny", ("", ""), models, params, params, lambda *_: [], [], 1), "fp8", 0)

    def suited(models: Models, *_, **named: str) -> Models:
        return in_fragments(models)

    usual = mock.patch.object(parts_module, "READ_RATHER", 2**24)
    with usual, mock.patch.object(devices_module, "with_backends", suited):
        parts, given = shared_pair(case.models, case.params, devices)
        want = param_structs(parts).target
    alone = in_fragments(case.models)
    counts = (
        sum(x.fragmented for x in leaf_paths(m.target.config).values()) for m in (alone, parts)
    )
    same = jax.tree.map(lambda x, y: x.shape == y.shape, given.target, want)
    return *counts, all(jax.tree.leaves(same))


def from_orbax(devices: int) -> tuple[int, float]:
    """How many arrays of an Orbax folder, read for several devices, are not the whole file's,
    placed; and the least share of an array that a device holds."""
    with tempfile.TemporaryDirectory() as folder:
        source, orbax = make_pair(Path(folder)).target, Path(folder) / "orbax"
        convert_checkpoint(source, orbax)
        whole = load_pair(source, dtype="float32").params.target
        parts = load_pair(orbax, dtype="float32", tensor_parallel=devices)
    again = jax.tree.leaves(placed(parts.models.mesh, parts.models.target.config, whole))
    pairs = list(zip(jax.tree.leaves(parts.params.target), again, strict=True))
    least = min(x.addressable_shards[0].data.size / x.size for x, _ in pairs)
    return sum(x.sharding != y.sharding or bool((x != y).any()) for x, y in pairs), least


def _kept_from(target: Path, devices: int) -> int:
    whole = load_pair(target, dtype="float32", quantised="kept")
    with mock.patch.object(parts_module, "READ_RATHER", 0):
        parts = load_pair(target, dtype="float32", quantised="kept", tensor_parallel=devices)
        config, mesh = parts.models.target.config, parts.models.mesh
        again = placed(mesh, config, whole.params.target)
    pairs = zip(jax.tree.leaves(parts.params.target), jax.tree.leaves(again), strict=True)
    shared = [(a, b) for a, b in pairs if a.dtype == jnp.uint8]
    assert shared and not any(a.sharding.is_fully_replicated for a, _ in shared)
    return sum(a.sharding != b.sharding or bool((a != b).any()) for a, b in shared)


def _listed(x: Any) -> list:
    return x if isinstance(x, list) else [x]


def _one_of_each(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The array without copies of KV heads."""
    for axis, (size, wanted) in enumerate(zip(x.shape, like.shape, strict=True)):
        if size != wanted:
            x = np.take(x, np.arange(wanted) * (size // wanted), axis=axis)
    return x


def surest(devices: int) -> tuple[bool, float, float]:
    """Whether so many devices choose one's drafts by their parts of a head; the most by which they
    are surer or less sure of them; and the most by which one is that sees its own part alone."""
    hidden, head = (
        jax.random.normal(jax.random.key(i), x) for i, x in enumerate([(3, 5, 32), (96, 32)])
    )
    best = best_and_probability(hidden, head, "xla", 1)[0][0, 0]
    head = head.at[jnp.array([7, 50, 95])].set(head[best])  # equal ones, in several parts
    ids, sure = best_and_probability(hidden, head, "xla", 1)
    split = functools.partial(best_and_probability, backend="xla", shards=devices)
    takes = PartitionSpec(), PartitionSpec(AXIS)
    got = jax.jit(spread(tensor_mesh(devices), split, takes, EVERYWHERE))(hidden, head)
    part = best_and_probability(hidden, head[: len(head) // devices], "xla", 1)[1]
    differ = [float(jnp.abs(other - sure).max()) for other in (got[1], part)]
    return bool(jnp.array_equal(got[0], ids)), differ[0], differ[1]
