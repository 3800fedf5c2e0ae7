"""check-logits: the float32 pass is the model's, rounding passes, and faults do not."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jflash.bench.shapes import SHAPES, model_shape
from jflash.bench.shapes.parts import ModelShape
from jflash.cli import main
from jflash.models.decoder import Target
from jflash.models.params import SCALE, random_weights
from jflash.pair import Models
from jflash.proof.forced import PROMPT, Seen, forced
from jflash.proof.right_logits import (
    FACTOR,
    NATS,
    SHARES,
    SURE,
    failures,
    from_float32,
    too_far,
)
from jflash.proof.usual_weights import LEAST, MOST, usual_weights
from jflash.records.config import TargetConfig
from jflash.records.specs import Llama3Scaling, RopeConfig
from tests.support import virtual_devices
from tests.support.refusals import one_line

TINY, MOE = (model_shape(name).target for name in ("tiny", "tiny-moe"))
ROPE = RopeConfig(
    theta=5e5,
    scaling=Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
)
LLAMA = replace(TINY, tie_embeddings=True).attending(
    *[dict(qk_norm=False, qkv_bias=True, rope=ROPE)] * TINY.num_layers
)


def weights(config: TargetConfig, dtype: str) -> dict:
    """Five times the usual scale, so that a tiny model's logits tell its tokens apart."""
    [params] = random_weights([replace(config, dtype=dtype)], experts_scale=SCALE)
    return jax.tree.map(lambda x: x if x.ndim == 1 else 5 * x, params)


def text(rows: int, batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(3), (batch, PROMPT + rows), 0, TINY.vocab_size)


def decoded(config: TargetConfig, params: dict, width: int, rows: int = 16) -> Seen:
    models = Models(Target(config), None, width).of_dtype(str(params["embedding"].dtype))
    return forced(models, params, text(rows))


@pytest.mark.parametrize("config", [TINY, LLAMA, MOE], ids=["qwen3", "llama", "moe"])
def test_the_float32_pass_is_the_models(config):
    """By other code: caches, chunks and blocks of any width give what whole texts give."""
    params = weights(config, "float32")
    for width in (1, 8):
        seen = decoded(config, params, width)
        found = from_float32(config, params, text(16), seen)
        assert jnp.ptp(seen.logits) > 5  # no flat logits, which all passes would have
        assert found["largest_difference"] < 1e-4 and 0 <= found["most_nats"] < 1e-9
        assert found["same_best"] == 1 and found["choice_shortfall"] == 0
        assert found["router_shortfall"] < 1e-5


@pytest.mark.parametrize(
    ("shape", "batches"), [pytest.param("tiny", [2], marks=pytest.mark.long), ("tiny-moe", [1])]
)
def test_the_command_passes_and_its_planted_fault_is_caught(shape, batches, capsys, tmp_path):
    file = tmp_path / "right.json"
    batch = ",".join(map(str, batches))
    options = ["--shape", shape, "--batch", batch, "--json", str(file)]
    assert main.run("check-logits", options) == 0
    report = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["failures"] == [] and report["layers"] == 3
    results = report["right_logits"]
    assert [(r["batch"], r["width"]) for r in results] == [(b, w) for b in batches for w in (1, 8)]
    for result in results:
        least, most = (2, 8) if shape == "tiny-moe" else (0, 0)
        assert least <= result["experts_reached"] <= most
        assert 0 < result["ours"]["mean_nats"] < NATS  # bfloat16 rounds
        assert result["fault"]["most_nats"] > FACTOR * result["xla"]["most_nats"]
    assert all(0 <= wide["against"]["ours"]["mean_nats"] < NATS for wide in results[1::2])


ON_DEVICES = """
import json
from jflash.cli.check_logits import run, targets
from jflash.cli.main import make_parser
argv = ["--shape", "tiny-moe", "--batch", "1"]
found = []
for more in ([], ["--tensor-parallel", "2", "--experts-over", "devices"]):
    options = make_parser("check-logits").parse_args([*argv, *more])
    [report] = run(options)
    sizes = [models.mesh.size if models.mesh else 1 for models in targets(options)]
    found.append([sizes, report])
print(json.dumps(found))
"""


@pytest.mark.long
def test_two_devices_that_share_the_target_have_one_devices_logits():
    """To the last number, also with the planted fault; the rest is one device's in both runs."""
    (alone, one), (shared, two) = virtual_devices.result(virtual_devices.start(ON_DEVICES))
    assert (alone, shared) == ([1, 1], [2, 2])
    assert "tensor_parallel" not in one
    assert (two["tensor_parallel"], two["experts_over"]) == (2, "devices")
    assert two["failures"] == [] and two["judge"] == "float32_pass"
    assert two["right_logits"] == one["right_logits"]
    assert 0 < two["right_logits"][0]["ours"]["mean_nats"] < NATS


def gemma_like() -> ModelShape:
    """The tiny shape with sandwich norms, a gate, windows, a cap and scaled embeddings."""
    target, drafter = model_shape("tiny")
    layers = [replace(layer, sandwich=True) for layer in target.layers]
    target = replace(
        target, layers=tuple(layers), embedding_scale=4.0, logit_softcap=30.0, norm_dtype="float32"
    )
    return ModelShape(target.attending({"window": 48, "gated": True}, {}, {"window": 24}), drafter)


def sure_of_its_token() -> ModelShape:
    """Gemma's head and scales: the residual begins with the embedding, which is the head too."""
    target, drafter = gemma_like()
    target = target.attending(*[{"scale": 1.0, "gated": False}] * target.num_layers)
    return ModelShape(replace(target, tie_embeddings=True, embedding_scale=200.0), drafter)


def muse_like() -> ModelShape:
    """The tiny shape with Muse-Glimmer's norms, peaked attention and a small multiplier."""
    target, drafter = gemma_like()
    target = replace(target, embedding_scale=1.0, embedding_norm=True, logit_multiplier=0.2)
    peaked = {"weightless": True, "scale": 4 * target.layers[0].mixer.head_dim ** -0.5}
    return ModelShape(target.attending(*[peaked] * target.num_layers), drafter)


def test_a_target_that_is_sure_of_its_tokens_does_not_pass(monkeypatch, capsys):
    """No difference would show there, and usual weights are not so."""
    monkeypatch.setitem(SHAPES, "tiny-sure", sure_of_its_token())
    argv = ["--shape", "tiny-sure", "--batch", "1"]
    assert main.run("check-logits", argv) == 0
    wide = lambda _, params: params | {"embedding": params["embedding"] * jnp.bfloat16(40)}  # noqa: E731
    monkeypatch.setattr("jflash.cli.check_logits.usual_weights", wide)
    assert main.run("check-logits", argv) == 1
    assert "the right pass is sure of its tokens" in capsys.readouterr().out


def test_usual_weights_spread_attention_and_logits():
    config = sure_of_its_token().target
    [params] = random_weights([config], experts_scale=SCALE)
    found = usual_weights(config, params)
    heads = config.layers[0].mixer.head_dim
    queries = found["layers_0"]["attention"]["q_norm"]["scale"]
    assert jnp.allclose(queries, heads**-0.5)
    last = found["norm"]["scale"]
    spread = SCALE * config.hidden_size**0.5
    assert jnp.allclose(jnp.abs(last), LEAST / spread) and 0.3 < jnp.mean(last < 0) < 0.7
    assert params["norm"]["scale"].min() == 1  # what was given stays

    wide = replace(TINY, hidden_size=4096)  # as Qwen3-8B: nothing is to be changed
    params = {"norm": {"scale": jnp.ones(4096)}}
    assert (usual_weights(wide, params)["norm"]["scale"] == 1).all()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "shape",
    [pytest.param(name, marks=LONG) for name in ("tiny-hybrid", "tiny-gemma", "tiny-muse")],
)
def test_other_families_are_judged_by_our_modules_in_float32(shape, monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "tiny-gemma", gemma_like())
    monkeypatch.setitem(SHAPES, "tiny-muse", muse_like())
    file = tmp_path / "right.json"
    assert main.run("check-logits", ["--shape", shape, "--batch", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["judge"] == "our modules" and report["failures"] == []
    for result in report["right_logits"]:
        assert 0 < result["ours"]["mean_nats"] < NATS
        assert result["fault"]["most_nats"] > FACTOR * result["xla"]["most_nats"]
        assert result["fault"]["one_in"] in SHARES
        assert LEAST / 2 < result["xla"]["spread"] < MOST and result["xla"]["sure"] < SURE


def test_experts_without_a_float32_pass_are_refused(monkeypatch, capsys):
    target, drafter = model_shape("tiny-moe")
    odd = target.with_experts(replace(target.experts[0], clamped=True), target.sparse_layers)
    monkeypatch.setitem(SHAPES, "tiny-odd", ModelShape(odd, drafter))
    assert main.run("check-logits", ["--shape", "tiny-odd"]) == 2
    assert "these experts have no float32 pass" in capsys.readouterr().err


def test_faults_of_the_program_are_caught():
    """Experts that are not weighted as they should be, and others than the router's best."""
    params = weights(MOE, "bfloat16")
    xla = from_float32(MOE, params, text(16), decoded(MOE, params, 8))
    near = xla["router_shortfall"]
    assert too_far(xla, xla, near) == []
    raw = MOE.with_experts(replace(MOE.experts[0], renormalise=False), MOE.sparse_layers)
    found = from_float32(MOE, params, text(16), decoded(raw, params, 8))
    assert any("mean_nats" in line for line in too_far(found, xla, near))

    layer = params["layers_2"]
    router = {"kernel": jnp.roll(layer["mlp"]["router"]["kernel"], 1, axis=1)}
    other = params | {"layers_2": layer | {"mlp": layer["mlp"] | {"router": router}}}
    found = from_float32(MOE, params, text(16), decoded(MOE, other, 8))
    assert any("router_shortfall" in line for line in too_far(found, xla, near))


def test_a_wrong_choice_and_a_nan_are_caught():
    params = weights(TINY, "bfloat16")
    seen = decoded(TINY, params, 8)
    xla = from_float32(TINY, params, text(16), seen)
    worst = seen._replace(choices=seen.choices.at[1, 3].set(jnp.argmin(seen.logits[1, 3])))
    [line] = too_far(from_float32(TINY, params, text(16), worst), xla, 0.0)
    assert line.startswith("choice_shortfall")
    empty = seen._replace(logits=seen.logits.at[0, 0, 0].set(math.nan))
    assert too_far(from_float32(TINY, params, text(16), empty), xla, 0.0)


def test_what_is_no_pass():
    fine = dict.fromkeys(("largest_difference", "mean_nats", "most_nats"), 1e-3)
    fine |= {"choice_shortfall": 0.0, "router_shortfall": 0.0, "sure": 0.1}
    fault = fine | {"most_nats": 1.0}
    result = {"batch": 1, "width": 1, "ours": fine, "xla": fine, "fault": fault}
    assert failures([result]) == []
    assert failures([result | {"fault": fine}]) == [
        "batch 1, width 1: the planted fault was not caught"
    ]
    [line] = failures([result | {"ours": fine | {"mean_nats": 4e-3}}])
    assert line == "batch 1, width 1: mean_nats 0.004, more than 3 times 0.001"
    [line] = failures([result | {"xla": fine | {"sure": 0.9}}])
    assert line == "batch 1, width 1: the right pass is sure of its tokens, so nothing would show"
    far = dict.fromkeys(fine, 2 * NATS)
    [line] = failures([result | {"ours": far, "xla": far}])
    assert "even XLA's pass is 0.02 nats" in line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--shape qwen3-8b", "--shape qwen3-8b takes hours on a CPU"),
        ("--layers 0", "--layers 0: at least 1"),
        ("--tensor-parallel 0", "--tensor-parallel 0: at least 1"),
        ("--shape tiny --tensor-parallel 99", "over 99 devices: this host has"),
        ("--experts-over devices", "--experts-over devices needs --tensor-parallel of 2 or more"),
        (
            "--tensor-parallel 2 --gather-backend push",
            "--gather-backend push: devices gather by xla here",
        ),
        ("--embedding-scale 0", "--embedding-scale 0.0: a number above 0"),
        ("--shape qwen3-4b --embedding-scale 1", "the head of qwen3-4b is its embedding"),
        (
            "--shape tiny --matmul-backend canonical",
            "matmul backend 'canonical' needs",
        ),
    ],
)
def test_refusals(options, named, capsys):
    assert main.run("check-logits", options.split()) == 2
    one_line(capsys, named)
