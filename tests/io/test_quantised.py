"""Quantised checkpoints against their formats' definitions, written out in numpy, bit for bit."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash.io import convert_checkpoint, load_target, open_checkpoint, read_ahead
from jflash.io.hf_config import target_config
from jflash.io.quantised.scheme import quantisation, scheme_of
from jflash.io.quantised.tensors import Header, find_weights
from tests.support.quantised_files import CASES, of_compressed, of_gptq, quantise
from tests.support.small_checkpoints import edit_config, edit_tensors, make_pair

Q = "model.layers.0.self_attn.q_proj"
INT4 = CASES["ct-int4-group"]
SMALL_HYBRID, SMALL_MOE = (
    Path(__file__).parents[1] / "reference" / "cases" / name / "target"
    for name in ("pair05", "pair03")
)


@pytest.fixture
def target(tmp_path):
    return make_pair(tmp_path).target


def as_leaves(weights: dict, layer: int) -> dict[str, np.ndarray]:
    """The kernels of a layer: transposes, side by side."""
    prefix = f"model.layers.{layer}."
    parts = {
        "qkv": [f"self_attn.{x}_proj" for x in "qkv"],
        "out": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    return {
        leaf: np.concatenate([weights[f"{prefix}{name}.weight"].T for name in names], axis=1)
        for leaf, names in parts.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_every_format_gives_the_numbers_of_its_definition(target, monkeypatch, case):
    """In pieces that are smaller than the tensors; other tensors stay."""
    plain = load_file(target / "model.safetensors")
    weights = quantise(target, CASES[case])
    monkeypatch.setattr(read_ahead, "PIECE", 16 * 4 * 32)  # 16 rows of float32
    params = load_target(target, "float32")[1]
    for layer in (0, 1):
        mine = params[f"layers_{layer}"]
        for leaf, expected in as_leaves(weights, layer).items():
            part = mine["attention" if leaf in ("qkv", "out") else "mlp"][leaf]["kernel"]
            np.testing.assert_array_equal(part, expected, err_msg=leaf)
    np.testing.assert_array_equal(params["embedding"], plain["model.embed_tokens.weight"])


def test_modelopt_may_say_it_in_a_file_of_its_own(target):
    weights = quantise(target, CASES["modelopt"])
    edit_config(target, quantization_config=None)
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file = target / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    kernel = load_target(target, "float32")[1]["layers_1"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(kernel, as_leaves(weights, 1)["down"])
    file.write_text(json.dumps({"quantization": own | {"quant_algo": "NVFP4"}}))
    with pytest.raises(ValueError, match="quant_algo 'NVFP4' is not supported"):
        load_target(target)
    file.write_text(json.dumps({"quantization": own | {"quant_algo": None}}))
    assert "unsupported dtype" in problem(target)  # no weight is quantised, it says
    file.write_text(json.dumps({"quantization": 5}))
    with pytest.raises(ValueError, match=r"hf_quant_config.json: quantization must be an object"):
        load_target(target)


def test_bfloat16_is_rounded_once(target):
    weights = quantise(target, CASES["fp8-block"])
    kernel = load_target(target, "bfloat16")[1]["layers_1"]["mlp"]["down"]["kernel"]
    exact = as_leaves(weights, 1)["down"]
    assert (exact != exact.astype(kernel.dtype).astype(np.float32)).any(), "nothing to round"
    np.testing.assert_array_equal(kernel, exact.astype(kernel.dtype))


def test_scales_of_activations_under_transformers_name_are_not_read(target):
    """Its `fp8` with activation_scheme static has one a module, beside `weight_scale_inv`."""
    scale = {f"{Q}.activation_scale": np.ones((), np.float32)}
    weights = quantise(target, CASES["fp8-tensor"], **scale)
    kernel = load_target(target, "float32")[1]["layers_0"]["attention"]["qkv"]["kernel"]
    np.testing.assert_array_equal(kernel, as_leaves(weights, 0)["qkv"])


def test_a_checkpoint_of_which_caches_alone_are_quantised(target):
    """As compressed-tensors 0.20.0 writes it, and modelopt in a file of its own."""
    scales = [f"model.layers.{i}.self_attn.{x}_scale" for i in (0, 1) for x in "kv"]
    edit_tensors(target, **{name: np.ones(1, np.float32) for name in scales})
    assert f"unknown: {scales[0]}" in problem(target)
    plain = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    edit_config(target, quantization_config=config | {"kv_cache_scheme": cache})
    np.testing.assert_array_equal(load_target(target, "float32")[1]["embedding"], plain)
    edit_config(target, quantization_config=None)
    own = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    np.testing.assert_array_equal(load_target(target, "float32")[1]["embedding"], plain)


def problem(folder) -> str:
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ValueError) as error:
        checkpoint.check(checkpoint.config(target_config))
    assert "\n" not in str(error.value)
    return str(error.value)


SCALE = f"{Q}.weight_scale_inv"
DAMAGE = [
    ("fp8-block", {"drop": (SCALE,)}, f"missing: {SCALE}"),
    ("fp8-block", {SCALE: np.ones((2, 2), np.float32)}, f"wrong shape: {SCALE} is (2, 2)"),
    ("fp8-block", {SCALE: np.ones((2, 1), np.int32)}, f"unsupported dtype: {SCALE} is I32"),
    ("fp8-block", {f"{Q}.weight_scale_3": np.ones(1, np.float32)}, "unknown: "),
    ("awq", {"drop": (f"{Q}.qzeros",)}, f"missing: {Q}.qzeros"),
    ("gptq-act-order", {"drop": (f"{Q}.g_idx",)}, f"missing: {Q}.g_idx"),
    ("gptq", {f"{Q}.bias": np.ones(32, np.float16)}, f"unknown: {Q}.bias, and not zero"),
    ("ct-int4-group", {f"{Q}.weight_packed": np.ones((32, 3), np.int32)}, "wrong shape: "),
]


@pytest.mark.parametrize("case, damage, message", DAMAGE)
def test_what_does_not_fit_is_named_before_weights_are_read(target, case, damage, message):
    quantise(target, CASES[case], **damage)
    assert message in problem(target)


def test_groups_out_of_range_are_no_index_error(target):
    quantise(target, CASES["gptq-act-order"], **{f"{Q}.g_idx": np.full(32, 9, np.int32)})
    with pytest.raises(ValueError, match="g_idx names groups outside the 2"):
        load_target(target)


def test_a_module_that_the_config_leaves_out_is_not_quantised(target):
    quantise(target, CASES["fp8-block"])
    edit_config(target, quantization_config=CASES["fp8-block"].config | {"ignored_layers": [Q]})
    assert f"{Q} is quantised, and quantization_config leaves it out" in problem(target)


def test_modules_that_gptqmodel_leaves_out(target):
    """By patterns with "-:"; an entry without settings changes nothing."""
    query = quantise(target, CASES["gptq"], endings=("self_attn.q_proj.weight",))
    dynamic = {r"-:.*mlp\..*": {}, "-:.*visual.*": {}, "lm_head": {}}
    edit_config(target, quantization_config=of_gptq(dynamic=dynamic))
    params = load_target(target, "float32")[1]
    got = params["layers_0"]["attention"]["qkv"]["kernel"][:, :32]
    np.testing.assert_array_equal(got, query[f"{Q}.weight"].T)
    edit_config(target, quantization_config=of_gptq(dynamic=dynamic | {"-:.*attn.*": {}}))
    assert f"{Q} is quantised, and quantization_config leaves it out" in problem(target)


def test_modules_outside_all_groups_and_named_by_a_pattern(target):
    config = of_compressed("pack-quantized", num_bits=4, type="int", group_size=16)
    quantise(target, CASES["ct-int4-group"])
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    edit_config(target, quantization_config=config)
    assert "self_attn" in problem(target)
    config["config_groups"]["group_0"]["targets"].append("re:.*self_attn.*")
    edit_config(target, quantization_config=config)
    load_target(target)


def test_a_module_of_several_groups_has_that_of_the_closest_target():
    """A name, then patterns in the order of their letters, then the class, as the library does."""
    int4 = {"num_bits": 4, "type": "int", "strategy": "group"}
    targets = [["Linear"], ["re:.*proj"], ["re:.*down.*"], [Q]]
    groups = {
        f"group_{i}": {"targets": names, "weights": int4 | {"group_size": 8 << i}}
        for i, names in enumerate(targets)
    }
    config = of_compressed("pack-quantized") | {"config_groups": groups}
    modules = ["lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", Q]
    scheme = scheme_of(config | {"ignore": []})
    found = [scheme.layout([module], (64, 64), {}).group for module in modules]
    assert found == [8, 16, 32, 64]
    config["config_groups"]["group_4"] = groups["group_0"] | {"weights": int4 | {"group_size": 16}}
    assert scheme_of(config | {"ignore": []}).layout(["lm_head"], (64, 64), {}).group == 16


@pytest.fixture
def seeing(tmp_path) -> Path:
    """A Qwen3.5 in the names of its vision model, whose projections are INT4."""
    folder = shutil.copytree(SMALL_HYBRID, tmp_path / "seeing")
    quantise(folder, INT4, endings=("gate_proj.weight", "up_proj.weight"))
    tensors = load_file(folder / "model.safetensors")
    renamed = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": raw}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_targets_name_modules_as_the_file_does(seeing):
    """Or as the text model does: by patterns of the whole name, and by the name itself."""
    config = of_compressed("pack-quantized", num_bits=4, type="int", group_size=16)
    ups = [r"re:model\.layers\.\d+\.mlp\.up_proj"]
    one = "model.language_model.layers.{}.mlp.gate_proj"
    every = [one.format(i) for i in range(3)]
    for gates in ([r"re:model\.language_model\.layers\..*gate_proj"], every):
        config["config_groups"]["group_0"]["targets"] = gates + ups
        edit_config(seeing, quantization_config=config)
        load_target(seeing)
    config["config_groups"]["group_0"]["targets"] = every[:2] + ups
    edit_config(seeing, quantization_config=config)
    assert "model.layers.2.mlp.gate_proj is quantised, and quantization_" in problem(seeing)


def test_lists_leave_out_modules_by_the_names_of_the_file(seeing):
    name = "model.language_model.layers.0.mlp.gate_proj"
    for ignored in (name, f"re:{name}", "model.language_model.layers.0", "model.*.gate_proj"):
        edit_config(seeing, quantization_config=INT4.config | {"ignore": [ignored]})
        said = "model.layers.0.mlp.gate_proj is quantised, and quantization_config leaves it out"
        assert said in problem(seeing)
    edit_config(seeing, quantization_config=INT4.config | {"ignore": [name.replace("0", "9")]})
    load_target(seeing)


def test_an_order_of_groups_needs_its_tensor(target):
    """Files without act-order need none: `weight` only changes how numbers were chosen."""
    int4 = dict(num_bits=4, type="int", group_size=16)
    quantise(target, CASES["ct-int4-group"])
    for order in ("group", True):
        config = of_compressed("pack-quantized", **int4, actorder=order)
        edit_config(target, quantization_config=config)
        assert f"missing: {Q}.weight_g_idx" in problem(target)
    config = of_compressed("pack-quantized", **int4, actorder="weight")
    edit_config(target, quantization_config=config)
    load_target(target)


REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quantization_config (bitsandbytes): not supported"),
    ({"quant_method": ["fp8"]}, "not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "scales to divide by"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
    ({"quant_method": "awq", "group_size": 0}, "group_size must be -1 or a multiple of 8, got 0"),
    (of_gptq(bits=3), "bits 3 is not supported"),
    (of_gptq(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    (of_gptq(checkpoint_format=["gptq"]), "checkpoint_format ['gptq']"),
    (of_gptq(rotation="hadamard"), "rotation 'hadamard' is not supported"),
    (of_gptq(dynamic={r"+:.*\.down_proj": {"bits": 8}}), "other settings by module"),
    (of_gptq(dynamic={"-:(": {}}), "is not a pattern"),
    (of_gptq(dynamic=["-:.*"]), "dynamic must be an object"),
    (of_compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4-pack-quantized"),
    (of_compressed("pack-quantized", num_bits=3, type="int"), "3 bits"),
    (of_compressed("dense", type="int") | {"transform_config": {"a": 1}}, "transform_config"),
    (
        of_compressed("dense", type="int") | {"sparsity_config": {"format": "sparse-bitmask"}},
        "sparsity_config {'format': 'sparse-bitmask'}",
    ),
    (of_compressed("dense", type="int") | {"ignore": ["re:("]}, "is not a pattern"),
    (of_compressed("dense", type="int") | {"ignore": [r"re:(\w+\.?)+x"]}, "repeats no group"),
    (of_compressed("dense", type="int") | {"ignore": ["re:.*.*.*.*.*x"]}, "no more than 4"),
]


@pytest.mark.parametrize("config, message", REFUSED)
def test_what_is_not_read_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=r"^quantization_config") as error:
        scheme_of(config)
    assert message in str(error.value)


def test_a_count_of_zeros_is_no_sparse_file():
    """Older files of llm-compressor say how many weights are 0, of which all are stored."""
    counted = {"format": "dense", "global_sparsity": 0.14, "ignore": [], "targets": []}
    counted |= {"registry_requires_subclass": False, "sparsity_structure": "unstructured"}
    scheme_of(CASES["ct-int8"].config | {"sparsity_config": counted})


def test_patterns_of_published_lists_are_read():
    published = (
        r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$",
        "re:model.layers.[0-9]+.mlp.*",
        "*mlp*",
    )
    scheme = scheme_of({"quant_method": "fp8", "ignored_layers": [*published]})
    assert scheme.ignored == published


def test_a_config_of_another_type_is_refused():
    for raw in ({"compression_config": 5}, {"text_config": {"quantization_config": "fp8"}}):
        with pytest.raises(
            ValueError, match=r"(compression|quantization)_config must be an object"
        ):
            quantisation(raw)


def test_a_block_past_the_weight_takes_no_memory():
    """Its scales would be repeated two thousand million times, for 8 TB."""
    block = {"quant_method": "fp8", "weight_block_size": [2**31 - 1, 2**31 - 1]}
    layout = scheme_of(block).layout(["q_proj"], (4, 8), {"weight_scale_inv": (1, 1)})
    rows = layout.scales.decode(np.full((1, 1024), 2, np.float32), 4)
    np.testing.assert_array_equal(rows, np.full((4, 1024), 2))


def test_experts_in_one_tensor_have_their_blocks_each(tmp_path, monkeypatch):
    name, shape, rng = "mlp.experts.gate_up_proj", (3, 40, 48), np.random.default_rng(4)
    made = [CASES["fp8-block"].make(shape[1:], rng) for _ in range(shape[0])]
    stacks = {s: np.stack([tensors[s] for tensors, _ in made]) for s in made[0][0]}
    tensors = {name: stacks["weight"], f"{name}_scale_inv": stacks["weight_scale_inv"]}
    save_file(tensors, tmp_path / "file")
    headers = {name: Header(shape, "F8_E4M3"), f"{name}_scale_inv": Header((3, 3, 2), "F32")}
    scheme = scheme_of(CASES["fp8-block"].config)
    weight = find_weights(scheme, {name: shape}, headers)[name]
    assert {n: stored.shape for n, stored in weight.tensors} == {
        n: h[0] for n, h in headers.items()
    }
    monkeypatch.setattr(read_ahead, "PIECE", 16 * 4 * 48)
    pieces = weight.pieces(read_ahead.find_tensors(tmp_path / "file"))
    numbers = np.concatenate([read_ahead.read(piece) for piece in pieces])
    np.testing.assert_array_equal(numbers.reshape(shape), [weight for _, weight in made])


def test_packed_experts_in_one_tensor_are_found(tmp_path):
    """No tensor has the stack's own name then."""
    folder, rng, want = shutil.copytree(SMALL_MOE, tmp_path / "moe"), np.random.default_rng(5), {}
    stored = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in stored.items() if ".experts." not in name}
    for layer in {name.split(".")[2] for name in stored if ".experts." in name}:
        for stack, shape in (("gate_up", (48, 40)), ("down", (40, 24))):
            made = [INT4.make(shape, rng) for _ in range(8)]
            name = f"model.layers.{layer}.mlp.experts.{stack}_proj"
            for form in ("packed", "scale"):
                parts = [expert[f"weight_{form}"] for expert, _ in made]
                tensors[f"{name}_{form}"] = np.stack(parts)
            want[layer, stack] = np.stack([weight.T for _, weight in made])
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=INT4.config)
    params = load_target(folder, "float32")[1]
    for (layer, stack), weights in want.items():
        np.testing.assert_array_equal(params[f"layers_{layer}"]["mlp"][stack]["kernel"], weights)


def test_a_converted_checkpoint_is_no_longer_quantised(target, tmp_path):
    quantise(target, CASES["awq"])
    convert_checkpoint(target, tmp_path / "orbax")
    ours, theirs = load_target(target)[1], load_target(tmp_path / "orbax")[1]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert "quantization_config" not in (tmp_path / "orbax" / "config.json").read_text()
