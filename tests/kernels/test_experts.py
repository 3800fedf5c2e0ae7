"""The mixture of experts: routing, order of sums, and that a token's bits are its own."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash.bench.floors import verify_work
from jflash.bench.shapes import model_shape
from jflash.bench.steps.time import Window, busy_state, experts_read
from jflash.compiled.shape import Shape
from jflash.generate import Pair, generate
from jflash.io import load_target, open_checkpoint, save_checkpoint
from jflash.io.convert import convert_checkpoint
from jflash.io.hf_config import target_config as read_target
from jflash.layers import experts
from jflash.layers.experts import Experts
from jflash.layers.routes import route
from jflash.memory import weight_bytes
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import abstract_params, random_weights
from jflash.pair import Models, Params
from jflash.records.kernels import XLA
from jflash.records.specs import MoeSpec
from pallas_kernels.grouped_matmul import weighted_sum
from tests.support.pairs import (
    drafter_config,
    prompts,
    random_params,
    replayed_lengths,
    target_config,
    unit_head,
)

E, K, D, F = 6, 3, 32, 24
MOE = MoeSpec(num_experts=E, experts_per_token=K, intermediate_size=F, renormalise=True)
SPARSE = (0, 2)


def moe_pair(drafter_seed: int = 1, moe: MoeSpec = MOE):
    """A target with experts in two of its three layers, and a drafter that agrees on little."""
    target = target_config(num_layers=3, moe=moe, sparse=SPARSE)
    drafter = drafter_config(num_target_layers=3, target_layer_ids=(0, 2))
    models = Models(Target(target), Drafter(drafter), drafter.block_size)
    return Pair(models, Params(random_params(target, 0), random_params(drafter, drafter_seed)))


def expert_params(seed: int = 0) -> dict:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"router": (D, E), "gate_up": (E, D, 2 * F), "down": (E, F, D)}
    return {
        name: {"kernel": jax.random.normal(key, shape) * shape[-2] ** -0.5}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def forward(params, x, residual, renormalise=True):
    module = Experts(D, replace(MOE, renormalise=renormalise))
    return module.apply({"params": params}, x, residual, XLA)


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_layer_is_its_formula(renormalise):
    """By float64, a token and an expert at a time."""
    params = expert_params()
    x, residual = jax.random.normal(jax.random.key(9), (2, 2, 5, D))
    router, gate_up, down = (
        np.asarray(params[n]["kernel"], np.float64) for n in ("router", "gate_up", "down")
    )
    want = np.asarray(residual, np.float64).copy()
    for at in np.ndindex(2, 5):
        token = np.asarray(x[at], np.float64)
        odds = np.exp(token @ router)
        odds /= odds.sum()
        best = np.argsort(-odds)[:K]
        total = odds[best].sum() if renormalise else 1.0
        for e in best:
            gate, up = np.split(token @ gate_up[e], 2)
            want[at] += odds[e] / total * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    got = forward(params, x, residual, renormalise)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lowest_expert():
    logits = jnp.array([[0, 2, 1, 2, 1, 1], [0, 0, 0, 0, 0, 0], [5, 1, 1, 1, 5, 5]], jnp.float32)
    weights, ids = route(logits, MOE)
    np.testing.assert_array_equal(ids, [[1, 3, 2], [0, 1, 2], [0, 4, 5]])
    np.testing.assert_allclose(np.sum(weights, axis=1), 1, rtol=1e-6)
    assert np.sum(route(logits, replace(MOE, renormalise=False))[0], axis=1)[1] == pytest.approx(
        0.5
    )


def test_experts_are_added_in_the_tokens_own_ranking():
    """Numbers whose sum in float32 depends on the order."""
    outputs = jnp.array([[[1e8], [-1e8], [1.0]], [[1.0], [1e8], [-1e8]]])
    np.testing.assert_array_equal(
        weighted_sum(outputs, jnp.ones((2, 3)), backend="xla"), [[1.0], [0.0]]
    )


def test_a_tokens_bits_are_its_own():
    """At every place of the block, whoever the neighbours are and wherever they are routed."""
    params, run = expert_params(), jax.jit(forward)
    own, zero = jax.random.normal(jax.random.key(1), (D,)), jnp.zeros((4, 16, D))
    seen, sizes = set(), set()
    for seed in range(6):
        others = jax.random.normal(jax.random.key(10 + seed), (4, 16, D)) * 10.0**seed
        if seed == 5:  # all go where one goes
            others = jnp.broadcast_to(own, others.shape)
        for place in np.ndindex(4, 16):
            x = others.at[place].set(own)
            seen.add(np.asarray(run(params, x, zero)[place]).tobytes())
        ids = route(others.reshape(-1, D) @ params["router"]["kernel"], MOE)[1]
        sizes.add(tuple(np.bincount(np.ravel(ids), minlength=E)))
    assert len(seen) == 1
    assert len(sizes) > 4  # the rows were sorted to other places


def test_any_drafter_any_neighbours_and_plain_decoding_give_the_same_tokens():
    batch = prompts(3, seed=3)
    pairs = [moe_pair(s) for s in (1, 2)]
    oracle = [g.token_ids for g in generate(pairs[0], batch, max_new_tokens=40, oracle=True)]
    assert len({token for text in oracle for token in text}) > 20
    for pair in pairs:
        assert [g.token_ids for g in generate(pair, batch, max_new_tokens=40)] == oracle
    moved = generate(pairs[0], [batch[2], batch[2], batch[0]], max_new_tokens=40)
    assert [g.token_ids for g in moved] == [oracle[2], oracle[2], oracle[0]]
    plain = replace(pairs[0], models=replace(pairs[0].models, drafter=None, block_size=1))
    assert [g.token_ids for g in generate(plain, batch, max_new_tokens=40)] == oracle


def test_a_corrupted_replay_gives_the_oracles_tokens_at_every_acceptance_length():
    pair, rng, seen = unit_head(moe_pair()), np.random.default_rng(0), set()
    for prompt in prompts(4, seed=5):
        seen |= set(replayed_lengths(pair, prompt, rng))
    assert seen == set(range(1, 9))


def stacked(folder):
    """Rewrites per-expert tensors as transformers 5 holds them: one for all experts of a layer."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in SPARSE:
        prefix = f"model.layers.{layer}.mlp.experts."
        each = {x: [tensors.pop(f"{prefix}{e}.{x}_proj.weight") for e in range(E)]
                for x in ("gate", "up", "down")}  # fmt: skip
        both = [np.concatenate(pair) for pair in zip(each["gate"], each["up"], strict=True)]
        tensors |= {f"{prefix}gate_up_proj": np.stack(both)}
        tensors |= {f"{prefix}down_proj": np.stack(each["down"])}
    save_file(tensors, path)


@pytest.fixture
def saved(tmp_path):
    pair = moe_pair()
    config, params = pair.models.target.config, pair.params.target
    save_checkpoint(tmp_path / "moe", config, params, "float32")
    return tmp_path / "moe", config, params


def test_both_layouts_and_orbax_give_the_same_bits(saved, tmp_path):
    folder, config, params = saved
    assert open_checkpoint(folder).config(read_target) == config
    names = load_file(folder / "model.safetensors")
    up = names["model.layers.2.mlp.experts.4.up_proj.weight"]
    np.testing.assert_array_equal(params["layers_2"]["mlp"]["gate_up"]["kernel"][4, :, F:], up.T)
    jax.tree.map(np.testing.assert_array_equal, params, load_target(folder, "float32")[1])
    convert_checkpoint(folder, tmp_path / "orbax")
    jax.tree.map(
        np.testing.assert_array_equal, params, load_target(tmp_path / "orbax", "float32")[1]
    )
    stacked(folder)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, load_target(folder, "float32")[1])


def test_experts_that_do_not_fit_are_named(saved):
    folder, _, _ = saved
    path, lost = folder / "model.safetensors", "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors = load_file(path)
    extra = {"model.layers.1.mlp.gate.weight": np.ones((E, D), np.float32)}  # a dense layer's
    save_file({k: v for k, v in tensors.items() if k != lost} | extra, path)
    with pytest.raises(ValueError) as error:
        load_target(folder)
    assert f"missing: {lost}" in str(error.value)
    assert "unknown: model.layers.1.mlp.gate.weight" in str(error.value)
    save_file(tensors, path)
    stacked(folder)
    tensors = load_file(path)
    turned = {
        k: v.swapaxes(1, 2).copy() for k, v in tensors.items() if k.endswith("experts.down_proj")
    }
    save_file(tensors | turned, path)
    with pytest.raises(
        ValueError, match=r"experts\.down_proj is \(6, 24, 32\), expected \(6, 32, 24\)"
    ):
        load_target(folder)


PUBLISHED = {  # rope_theta, max_position_embeddings
    "Qwen3-30B-A3B": (1000000.0, 40960),
    "Qwen3-Coder-30B-A3B-Instruct": (10000000, 262144),
}


def published(name: str) -> dict:
    theta, positions = PUBLISHED[name]
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": positions,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": theta,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """30.5 billion parameters, of which a token uses 3.3, as the model cards say."""
    config = read_target(published(name))
    assert config.experts == model_shape("qwen3-coder-30b").target.experts
    assert weight_bytes([config]) // 4 == 30_532_122_624
    expert = (
        sum(
            abstract_params(config)["layers_0"]["mlp"][x]["kernel"].size
            for x in ("gate_up", "down")
        )
        // 128
    )
    assert weight_bytes([config]) // 4 - 48 * 120 * expert == pytest.approx(3.35e9, rel=0.01)


def test_the_shape_to_time_is_the_published_one():
    assert model_shape("qwen3-coder-30b").target == read_target(
        published("Qwen3-Coder-30B-A3B-Instruct")
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 must be within 1 … 128"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number"),
        ({"num_experts": "x"}, "num_experts must be a whole number from 0 to 1024, got 'x'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of whole numbers, got 3"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob must be true or false, got 'no'"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size must be a whole number"),
    ],
)
def test_bad_configs_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        read_target(published("Qwen3-30B-A3B") | change)


def test_which_layers_have_experts():
    def layers(**change):
        config = read_target(published("Qwen3-30B-A3B") | {"num_hidden_layers": 6} | change)
        return config.sparse_layers

    assert layers() == (0, 1, 2, 3, 4, 5)
    assert layers(decoder_sparse_step=2) == (1, 3, 5)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3, 4]) == (1, 5)
    assert layers(mlp_only_layers=list(range(6))) == layers(num_experts=0) == ()
    saved_by_5 = {k: v for k, v in published("Qwen3-30B-A3B").items() if k != "num_experts"}
    config = read_target(saved_by_5 | {"num_local_experts": 16})
    assert [moe.num_experts for moe in config.experts] == [16] * 48


def test_floors_count_the_experts_that_are_read():
    target = model_shape("qwen3-coder-30b").target
    target = replace(target, dtype="bfloat16")
    one, all_of_them = (verify_work(target, 1, rows, 0.0) for rows in (1, 4096))
    head = 2 * 151936 * 2048  # read once; the embedding's rows do not count
    assert all_of_them.weight_bytes == pytest.approx(2 * 30_532_122_624 - head, rel=1e-3)
    expert = 2 * 3 * 2048 * 768
    assert all_of_them.weight_bytes - one.weight_bytes == pytest.approx(48 * 120 * expert, rel=1e-6)
    # A token's operations are two for every weight that it uses.
    assert one.weight_operations == pytest.approx(one.weight_bytes, rel=1e-6)


def test_the_experts_of_a_step_are_counted(monkeypatch):
    """By the very choices of the target's routers; and what was counted is what the floor reads."""
    shape = model_shape("tiny-moe")
    moe, sparse = shape.target.experts[0], len(shape.target.experts)
    # Without a drafter a block is its anchor over and over; the rows differ by place and by text.
    models = Models(Target(shape.target), None, 4)
    params = Params(random_weights([shape.target])[0], None)
    state = busy_state(models, Shape(2, 128, 64, 16), Window(60, 4, 1))
    chosen, choose = [], experts.route

    def listening(*args):
        weights, ids = choose(*args)
        chosen.append(np.asarray(ids))
        return weights, ids

    monkeypatch.setattr(experts, "route", listening)
    read = experts_read(models, params, state)
    assert [ids.shape for ids in chosen] == [(8, moe.experts_per_token)] * sparse
    assert read == np.mean([len({*ids.flat}) for ids in chosen])
    assert moe.experts_per_token < read <= moe.num_experts
    expert = 4 * 3 * shape.target.hidden_size * moe.intermediate_size * sparse
    few, more = (verify_work(shape.target, 2, 4, 60.0, n).weight_bytes for n in (2.0, 2.5))
    assert more - few == pytest.approx(expert / 2)


@pytest.mark.long
def test_random_experts_do_not_make_all_tokens_one():
    """What the lossless check and the benchmark decode: text that wanders."""
    shape = model_shape("qwen3-coder-30b").target
    few = replace(shape.experts[0], num_experts=16, intermediate_size=192)
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "scale": 64**-0.5}
    small = replace(shape, hidden_size=512, vocab_size=512, layers=shape.layers[:6])
    small = small.attending(*[heads] * 6).with_experts(few, range(6))
    weights = random_weights([small])[0]
    # A quarter of the width: twice the weights give the same sums.
    doubled = jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, weights)
    pair = Pair(Models(Target(small), None, 1), Params(doubled, None))
    texts = [r.token_ids for r in generate(pair, prompts(2), max_new_tokens=24)]
    assert all(len(set(text)) > 18 for text in texts)


def test_the_table_of_a_saved_config_names_the_dense_layers(saved):
    raw = json.loads((saved[0] / "config.json").read_text())
    assert (raw["model_type"], raw["mlp_only_layers"]) == ("qwen3_moe", [1])
