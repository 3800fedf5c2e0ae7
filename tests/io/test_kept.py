"""Weights that stay quantised in memory have the bits of those that are dequantised when read."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jflash import Pair, generate, load_pair
from jflash.bench.floors import verify_work
from jflash.bench.shapes import model_shape, quantised
from jflash.compiled.shape import Shape
from jflash.devices.kept import in_fragments
from jflash.devices.mesh import over
from jflash.io import configure_pair, keeping, load, load_weights, open_checkpoint, save_checkpoint
from jflash.io.keeping import QUANTISED
from jflash.io.load import pair_models
from jflash.layers.gather import AXIS
from jflash.memory import memory_budget
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import abstract_params, leaf_paths, random_params
from jflash.pair import Models
from jflash.records.kernels import AUTO, XLA, Kernels
from jflash.records.specs import Kept
from pallas_kernels.matmul.kept.fragments import Fragments, fragments
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised
from tests.support.described_gpu import H200, device_mesh
from tests.support.quantised_files import CASES, quantise
from tests.support.small_checkpoints import make_pair

TESTS = Path(__file__).parents[1]
NEXT, MOE = (TESTS / "reference" / "cases" / name for name in ("pair07", "pair03/target"))
PACKED = TESTS / "golden" / "mxfp4" / "target"
KEPT = [name for name in CASES if "int8" not in name and name != "gptq-act-order"]


def same_numbers(kept: dict, whole: dict, dtype: str) -> int:
    """Compares parameters, bit for bit; the number of kept leaves.

    XLA takes numbers below 2^-126 as zeros on a CPU, and tests/golden/mxfp4 has some.
    """
    leaves = jax.tree.flatten_with_path(kept, is_leaf=lambda x: isinstance(x, Quantised))[0]
    count = 0
    for (path, leaf), array in zip(leaves, jax.tree.leaves(whole), strict=True):
        if isinstance(leaf, Quantised):
            count += 1
            leaf = dequantised(leaf, dtype)
            array = np.where(np.abs(np.asarray(array, np.float32)) < 2.0**-126, 0, array)
        np.testing.assert_array_equal(leaf, array, err_msg=str(path))
    return count


@pytest.mark.parametrize("case", KEPT)
def test_a_kept_leaf_stands_for_the_dequantised_one(tmp_path, case):
    """In codes of one byte or four bits, fused as the array is; the declared leaves are true."""
    target = make_pair(tmp_path).target
    quantise(target, CASES[case])
    kept = load_pair(target, dtype="bfloat16", quantised="kept")
    whole = load_pair(target, dtype="bfloat16")
    config = kept.models.target.config
    assert same_numbers(kept.params.target, whole.params.target, "bfloat16") == 8
    declared = jax.tree.map(lambda leaf: leaf.struct, abstract_params(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), kept.params.target) == jax.tree.map(
        lambda x: (x.shape, x.dtype), declared
    )


def abstracted(pair: Pair) -> list[dict]:
    return [abstract_params(config) for config in pair.models.configs]


def held(pair: Pair) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(pair.params.target))


def check_counts(kept: Pair, whole: Pair) -> None:
    """Memory and floors count codes and scales; all experts are read here."""
    budgets = [memory_budget(pair.models, Shape.of(1, 256)).weights for pair in (kept, whole)]
    assert budgets == [held(kept), held(whole)] and budgets[0] < budgets[1]
    configs = [pair.models.target.config for pair in (kept, whole)]
    every = float(configs[0].experts[0].num_experts) if configs[0].experts else None
    read = [verify_work(config, 1, 1, 8.0, every).weight_bytes for config in configs]
    assert read[1] - read[0] == held(whole) - held(kept)


def test_memory_and_floors_count_codes(tmp_path):
    target = make_pair(tmp_path).target
    quantise(target, CASES["fp8-block"])
    check_counts(*(load_pair(target, dtype="bfloat16", quantised=x) for x in QUANTISED[1:]))


def test_a_request_to_keep_what_cannot_be_kept_is_refused(tmp_path):
    target = make_pair(tmp_path).target
    with pytest.raises(ValueError, match="has no quantised weights that may be kept"):
        configure_pair(target, quantised="kept")
    quantise(target, CASES["gptq-act-order"])
    with pytest.raises(ValueError, match="has no quantised weights that may be kept"):
        configure_pair(target, quantised="kept")
    with pytest.raises(ValueError, match="quantised 'yes' is not one of auto, kept, dequantised"):
        configure_pair(target, quantised="yes")
    assert load_weights(configure_pair(target)).models.target.config.layers[0].kept == ()


@pytest.mark.parametrize(
    ("ending", "number", "problem"),
    [
        (".weight_scale", 256, "has a scale of 256, and FP8 is kept with bfloat16's scales below"),
        (".weight", np.nan, "has a NaN"),
    ],
)
def test_codes_that_the_kept_form_would_take_for_others_are_refused(
    tmp_path, ending, number, problem
):
    """With scales of bfloat16, of which the file has one a row."""
    target, other = (make_pair(tmp_path / name).target for name in ("pair", "other"))
    quantise(other, CASES["ct-fp8-channel"])
    name = f"model.layers.1.mlp.down_proj{ending}"
    with safe_open(other / "model.safetensors", "numpy") as file:
        shape = file.get_slice(name).get_shape()
    dtype = jnp.float8_e4m3fn if ending == ".weight" else jnp.bfloat16
    changed = np.ones(shape, dtype)
    changed[3] = number
    quantise(target, CASES["ct-fp8-channel"], **{name: changed})
    with pytest.raises(ValueError, match=f"{name} {problem}"):
        load_pair(target, dtype="bfloat16", quantised="kept")
    load_pair(target, dtype="bfloat16", quantised="dequantised")


EXPERTS = {"mxfp4": PACKED, "fp8-block": MOE, "ct-int4-zeros": MOE}


@pytest.mark.parametrize(
    "case",
    ["fp8-block", *(pytest.param(x, marks=pytest.mark.long) for x in ("mxfp4", "ct-int4-zeros"))],
)
def test_kept_experts_stand_for_the_dequantised_ones(tmp_path, case):
    """gpt-oss's in one tensor with gate and up in turns, and Qwen3-MoE's expert by expert."""
    target = shutil.copytree(EXPERTS[case], tmp_path / "target")
    if case in CASES:
        quantise(target, CASES[case])
    kept = load_pair(target, dtype="bfloat16", quantised="kept")
    whole = load_pair(target, dtype="bfloat16")
    config = kept.models.target.config
    sparse = [dict(config.layers[i].kept) for i in config.sparse_layers]
    assert all({"mlp/gate_up/kernel", "mlp/down/kernel"} <= set(layer) for layer in sparse)
    assert same_numbers(kept.params.target, whole.params.target, "bfloat16") >= 2 * len(sparse)
    texts = [
        [result.token_ids for result in generate(pair, [[5, 6, 7], [9, 2]], max_new_tokens=12)]
        for pair in (kept, whole)
    ]
    assert texts[0] == texts[1]
    check_counts(kept, whole)


def test_experts_of_a_form_that_is_not_kept_are_refused_by_name(tmp_path):
    target = shutil.copytree(MOE, tmp_path / "target")
    quantise(target, CASES["gptq"], endings=("o_proj.weight",))
    projections = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))
    quantise(target, CASES["gptq-act-order"], endings=projections)
    with pytest.raises(ValueError, match="has experts in a quantised form that may not be kept"):
        configure_pair(target, quantised="kept")
    assert configure_pair(target).models.target.config.layers[0].kept == ()


def as_on_hopper(monkeypatch, memory: int | None, experts: str = "canonical") -> None:
    """Kernels that read codes, on a device of so many bytes."""
    kernels = XLA._replace(matmul="canonical", experts=experts)
    chosen = lambda models, *_, **__: replace(models, kernels=kernels)  # noqa: E731
    monkeypatch.setattr(load, "with_backends", chosen)
    monkeypatch.setattr(keeping, "device_memory", lambda: memory)


@pytest.mark.parametrize(("backend", "kept"), [("canonical", 3), ("xla", 1)])
def test_experts_are_kept_by_themselves_where_their_kernel_reads_codes(
    tmp_path, monkeypatch, backend, kept
):
    target = shutil.copytree(MOE, tmp_path / "target")
    endings = ("o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    quantise(target, CASES["fp8-block"], endings=endings)
    as_on_hopper(monkeypatch, None, backend)
    assert len(configure_pair(target).models.target.config.layers[0].kept) == kept


def test_codes_are_kept_by_themselves_where_arrays_would_crowd_the_device(tmp_path, monkeypatch):
    """FP8 in codes is slower at many rows, so it gets arrays where memory has room for both."""
    pair = make_pair(tmp_path)
    quantise(pair.target, CASES["fp8-block"])
    whole = load_pair(pair.target, pair.drafter)
    arrays = sum(x.nbytes for x in jax.tree.leaves(abstracted(whole)))
    for room, kept in ((arrays * 3 // 2 + 1, False), (arrays * 3 // 2 - 2, True)):
        as_on_hopper(monkeypatch, room)
        models = configure_pair(pair.target, pair.drafter).models
        assert bool(models.target.config.layers[0].kept) == kept
        asked = configure_pair(pair.target, pair.drafter, quantised="kept").models
        assert asked.target.config.layers[0].kept
    # Each of two devices has room for its part.
    two = over(pair_models(pair.target, pair.drafter), device_mesh(H200, 2, AXIS))
    two, checkpoint = replace(two, kernels=models.kernels), open_checkpoint(pair.target)
    for room, kept in ((arrays * 3 // 2 - 2, False), (arrays // 2, True)):
        as_on_hopper(monkeypatch, room)
        config = keeping.keeping(two, checkpoint, AUTO, None).target.config
        assert bool(config.layers[0].kept) == kept


def test_int4_is_kept_by_itself_where_it_lies_in_fragments(tmp_path, monkeypatch):
    """The pair's sizes are too small for fragments; those of Qwen3-8B fit."""
    pair = make_pair(tmp_path)
    quantise(pair.target, CASES["ct-int4-group"])
    as_on_hopper(monkeypatch, 2**40)
    assert configure_pair(pair.target, pair.drafter).models.target.config.layers[0].kept == ()
    monkeypatch.setattr(keeping, "fragment_paths", lambda models, forms: set(forms))
    assert configure_pair(pair.target, pair.drafter).models.target.config.layers[0].kept
    asked = configure_pair(pair.target, pair.drafter, quantised="dequantised").models
    assert asked.target.config.layers[0].kept == ()


@pytest.mark.parametrize(
    ("shape", "form", "scales", "most"),
    [
        ("qwen3-8b", "int4", "bfloat16", 512), ("qwen3-8b", "fp8", "bfloat16", 128),
        ("qwen3-8b", "fp8", "float32", 16),
        ("qwen3-coder-30b", "int4", "bfloat16", 512), ("qwen3-coder-30b", "fp8", "float32", 512),
    ],
)  # fmt: skip
def test_dense_fp8_alone_is_slower_in_codes_at_many_rows(shape, form, scales, most):
    config = model_shape(shape)[0]
    leaf = leaf_paths(config)["layers_0/mlp/gate_up/kernel"]
    wins = [
        rows
        for rows in (1, 16, 128, 512, None)
        if keeping._wins(leaf, Kept(form, 128, scales, False), rows)
    ]
    known = [rows for rows in (1, 16, 128, 512) if rows <= most]
    assert wins == (known if most < 512 else [*known, None])


def test_steps_of_few_rows_keep_fp8_by_themselves(tmp_path, monkeypatch):
    pair = make_pair(tmp_path)
    quantise(pair.target, CASES["ct-fp8-channel"])
    as_on_hopper(monkeypatch, 2**40)
    monkeypatch.setattr(keeping, "fragment_paths", lambda models, forms: set(forms))

    def kept(batch: int | None) -> bool:
        models = configure_pair(pair.target, pair.drafter, batch=batch).models
        return bool(models.target.config.layers[0].kept)

    most = 128 // configure_pair(pair.target, pair.drafter).models.block_size
    assert [kept(n) for n in (1, most, most + 1, None)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("shape", "form", "lies"),
    [
        ("qwen3-coder-30b", "fp8", True), ("qwen3-coder-30b", "int4", True),
        ("qwen3.5-35b-a3b", "fp8", True), ("glm-4.5-air", "int4", True),
        ("minimax-m2", "int4", True),
        ("gpt-oss-20b", "mxfp4", False), ("gemma-4-26b-a4b", "fp8", False),
    ],
)  # fmt: skip
def test_experts_lie_in_fragments_if_their_activation_is_swiglus(shape, form, lies):
    """gpt-oss's are clamped and have biases, and Gemma's have another activation."""
    target, drafter = model_shape(shape)
    models = Models(Target(quantised(target, form)), Drafter(drafter), 8)
    canonical = Kernels(**dict.fromkeys(XLA._fields, "canonical"))
    lying = in_fragments(replace(models, kernels=canonical))
    assert in_fragments(replace(lying, kernels=XLA)) == models  # for other kernels as before
    leaves = leaf_paths(lying.target.config)
    experts = [leaf for leaf in leaves.values() if leaf.kept and leaf.experts]
    assert experts and {leaf.kept.fragments for leaf in experts if leaf.kept} == {lies}
    by_triton = replace(models, kernels=canonical._replace(experts="triton"))
    others = leaf_paths(in_fragments(by_triton).target.config)
    assert not any(leaf.kept.fragments for leaf in others.values() if leaf.kept and leaf.experts)


@pytest.mark.parametrize("case", ["fp8-block", "ct-int4-zeros"])
def test_experts_are_brought_into_fragments_as_they_are_read(tmp_path, case):
    """The loader's words are those of the codes that it reads without that order."""
    target = model_shape("tiny-moe").target
    moe = replace(target.experts[0], num_experts=3, intermediate_size=128)
    target = target.with_experts(moe, (0, 2))
    save_checkpoint(tmp_path, target, random_params(target, 0), "bfloat16")
    endings = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    quantise(tmp_path, CASES[case], endings=endings)
    files = configure_pair(tmp_path, quantised="kept", dtype="bfloat16")
    canonical = Kernels(**dict.fromkeys(XLA._fields, "canonical"))
    models = in_fragments(replace(files.models, kernels=canonical))
    got = load_weights(replace(files, models=models)).params.target
    codes = load_weights(files).params.target
    for i in (0, 2):
        for name in ("gate_up", "down"):
            word, code = (x[f"layers_{i}"]["mlp"][name]["kernel"] for x in (got, codes))
            want = [fragments(code.of_expert(jnp.int32(e))).words for e in range(3)]
            assert isinstance(word, Fragments) and word.shape == code.shape
            np.testing.assert_array_equal(word.words, np.stack(want))


def test_experts_beside_a_shared_one_are_kept_and_gates_of_one_column_are_not(tmp_path):
    """Columns of the attention lie in another order than the file's rows."""
    target = tmp_path / "target"
    shutil.copytree(NEXT / "target", target)
    weights = quantise(target, CASES["fbgemm"], endings=("_proj.weight", "expert_gate.weight"))
    assert any("shared_expert_gate" in name for name in weights)
    pair = load_pair(target, dtype="float32", quantised="kept")
    layers = pair.models.target.config.layers
    kept = {leaf.rsplit("/", 1)[0] for leaf, _ in layers[0].kept}
    assert {f"mlp/{name}" for name in ("gate_up", "down", "shared_gate_up", "shared_down")} <= kept
    assert "mlp/shared_gate" not in kept
    assert any(leaf == "attention/qkv/kernel" for x in layers for leaf, _ in x.kept)
    whole = load_pair(target, dtype="float32")
    assert same_numbers(pair.params.target, whole.params.target, "float32")
