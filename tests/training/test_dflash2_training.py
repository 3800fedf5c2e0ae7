"""DFlash 2 in training: the blocks and choices of decoding, the selector's loss, the command."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.cli import main
from jflash.io import load_drafter
from jflash.models.dflash import Drafter
from jflash.models.dflash2 import DynamicConvolution, best_candidates
from jflash.records.config import Drafter2Config, second_version
from jflash.speculative import apply
from jflash.training.chunked import chunk, sum_over_chunks
from jflash.training.data import Rows
from jflash.training.drafter_loss import (
    Blocks,
    block_hidden,
    block_labels,
    drafter_loss,
    draw_anchors,
    init_drafter,
)
from jflash.training.recipe import Objective
from tests.support import pairs
from tests.support.reference import PYTHON, needs, run_reference
from tests.support.small_checkpoints import make_pair
from tests.training.test_drafter_loss import START, T, make_rows

CONFIG = second_version(
    pairs.drafter_config(num_layers=2, final_logit_softcapping=5.0, output_multiplier=0.7),
    conv_kernel_size=3, conv_group_size=4, selector_rank=6, selector_top_k=5,
)  # fmt: skip
TARGET, DRAFTER = pairs.random_pair().models.target, Drafter(CONFIG)
TARGET_PARAMS, PARAMS = pairs.random_pair().params.target, pairs.random_params(CONFIG, 1, 0.3)
W, K = CONFIG.block_size, CONFIG.block_size - 1
ANCHORS = 6
BLOCK_HIDDEN = jax.jit(partial(block_hidden, TARGET, DRAFTER))


def hidden(rows: Rows, anchors) -> np.ndarray:
    return np.asarray(BLOCK_HIDDEN(PARAMS, TARGET_PARAMS, rows, jnp.asarray(anchors))[0])


def test_taps_cross_neither_blocks_nor_sequences():
    """A block is the same bits beside other blocks; each of its rows hangs on the one before."""
    rows = make_rows()
    together = hidden(rows, [[20, 12, 9], [12, 14, 6]])
    others = hidden(rows, [[20, 30, 12], [12, 5, 14]])
    np.testing.assert_allclose(others[:, 0], together[:, 0], atol=1e-6)
    np.testing.assert_allclose(others[:, 2], together[:, 1], atol=1e-6)
    other = rows._replace(
        tokens=jnp.asarray(rows.tokens).at[0, 21:].set(3)
    )  # what follows the anchor
    np.testing.assert_array_equal(hidden(other, [[20, 12, 9], [12, 14, 6]])[0, 0], together[0, 0])


def test_the_convolution_is_its_formula():
    rng = np.random.default_rng(0)
    width, groups = CONFIG.hidden_size, CONFIG.hidden_size // CONFIG.conv_group_size
    x = rng.normal(size=(2, 2 * W, width)).astype(np.float32)
    params: dict[str, Any] = {
        "base_kernel": rng.normal(size=(2, 3, width)).astype(np.float32),
        "kernel_projection": {
            "kernel": rng.normal(size=(width, 2 * 3 * groups)).astype(np.float32)
        },
    }
    module, given = DynamicConvolution(CONFIG), jax.tree.map(jnp.asarray, params)
    kernels = apply(module, given, jnp.asarray(x), "xla", method="kernels")
    got = apply(module, given, jnp.asarray(x), kernels[1])
    dynamic = (x @ params["kernel_projection"]["kernel"]).reshape(2, 2 * W, 2, 3, groups)[:, :, 1]
    for t in range(2 * W):
        want = np.zeros((2, width), np.float32)
        for tap in range(min(3, t % W + 1)):  # rows of two blocks, side by side
            own = np.repeat(dynamic[:, t, tap], CONFIG.conv_group_size, axis=-1)
            want += (params["base_kernel"][1, tap] + own) * x[:, t - tap]
        np.testing.assert_allclose(got[:, t], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("vocab", "count"), [(67, 5), (5000, 16), (4097, 1), (3000, 7)])
def test_best_candidates_are_the_best(vocab: int, count: int):
    logits = np.random.default_rng(vocab).permutation(2 * 3 * vocab).reshape(2, 3, vocab)
    logits[0, 0] = -np.arange(vocab)  # all in the first group, and in the last
    logits[1, 0] = np.arange(vocab)
    values, ids = jax.jit(best_candidates, static_argnums=1)(jnp.float32(logits), count)
    want = np.argsort(-logits, axis=-1)[..., :count]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, want, axis=-1))


def decoding_scores(rows: Rows, anchors, states) -> tuple[np.ndarray, ...]:
    """Candidates, scores and logits of the blocks at these anchors, as `propose` has them."""
    tokens = jnp.take_along_axis(rows.tokens, anchors, axis=1).ravel()
    logits = apply(TARGET, TARGET_PARAMS, states, method="logits")
    logits = apply(DRAFTER, PARAMS, logits, method="adjust_logits")
    found = apply(DRAFTER, PARAMS, states, tokens, logits, method="candidates")
    return tuple(np.asarray(x) for x in (*found, logits))


def with_foreseen(rows: Rows, anchors) -> Rows:
    """The rows with what decoding drafts after each one's last anchor: no block sees those."""
    states = hidden(rows, anchors)[:, :, 1:].reshape(-1, K, CONFIG.hidden_size)
    candidates, scores, _ = decoding_scores(rows, anchors, jnp.asarray(states))
    tokens = np.array(rows.tokens)
    for b, last in enumerate(np.asarray(anchors).argmax(axis=1)):
        path, n = 0, b * ANCHORS + last
        for k in range(min(4, T - 1 - int(anchors[b, last]))):
            path = scores[n, k, path].argmax()
            tokens[b, anchors[b, last] + 1 + k] = candidates[n, k, path]
    return rows._replace(tokens=jnp.asarray(tokens))


def surprise(scores, index) -> float:
    """-log softmax(scores)[index]."""
    return float(np.log(np.exp(np.asarray(scores, np.float64)).sum()) - scores[index])


def test_loss_and_metrics_are_those_of_decoding():
    """The loss summed by hand, and the acceptance of the path that decoding takes."""
    rows, key = make_rows(), jax.random.key(3)
    anchors, exist = draw_anchors(rows, ANCHORS, key)
    rows = with_foreseen(rows, anchors)
    how = Blocks(anchors=ANCHORS, chunks=3, objective=Objective(selector_weight=0.5))
    loss = jax.jit(partial(drafter_loss, TARGET, DRAFTER, how))
    value, metrics = loss(PARAMS, TARGET_PARAMS, rows, key, START)
    places = [np.asarray(x).reshape(-1, K) for x in block_labels(rows, anchors, exist, W)]
    states = hidden(rows, anchors)[:, :, 1:].reshape(-1, K, CONFIG.hidden_size)
    candidates, scores, logits = decoding_scores(rows, anchors, jnp.asarray(states))
    selector = jax.tree.map(np.asarray, PARAMS["candidate_selector"])
    newest = np.take_along_axis(np.asarray(rows.tokens), np.asarray(anchors), axis=1).ravel()
    total, weight, lengths, missing = 0.0, 0.0, [], 0
    for n in np.flatnonzero(np.asarray(exist)):
        previous, path, agree, length = newest[n], 0, True, 1
        for k, label in enumerate(places[0][n][places[1][n]]):
            projected = states[n, k] @ selector["hidden_projection"]["kernel"]
            left = selector["predecessor_codebook"][previous] * projected
            ids = list(dict.fromkeys([*candidates[n, k], label]))
            missing += len(ids) > CONFIG.selector_top_k
            given = logits[n, k, ids] + selector["successor_codebook"][ids] @ left
            w = np.exp(-k / 4)
            chosen = surprise(given, ids.index(label))
            total += w * (surprise(logits[n, k], label) + 0.5 * chosen)
            weight, previous = weight + w, label
            path = scores[n, k, path].argmax()
            agree = agree and candidates[n, k, path] == label
            length += agree
        lengths.append(length)
    assert missing > 0 and max(lengths) > 1
    assert value == pytest.approx(total / weight, rel=1e-5)
    assert metrics["acceptance_length"] == pytest.approx(np.mean(lengths), abs=1e-6)


def test_gradient_reaches_every_weight():
    loss = partial(drafter_loss, TARGET, DRAFTER, Blocks(anchors=ANCHORS, chunks=3))
    gradients, _ = jax.jit(jax.grad(loss, has_aux=True))(
        PARAMS, TARGET_PARAMS, make_rows(), jax.random.key(0), START
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_what_chunks_share_is_learnt():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 6, 3)), jnp.float32)
    weights = {"a": jnp.asarray(rng.normal(size=3), jnp.float32), "b": jnp.float32(0.3)}

    def fn(h, rest, shared, weights):
        return jnp.sum(jnp.sin(h * weights["a"]) * shared + weights["b"] * h), None

    def chunked(x, w):
        return sum_over_chunks(fn, chunk(x, 3), chunk(x, 3), jnp.float32(2), w)[0]

    def plain(x, w):
        return fn(x, None, 2.0, w)[0]

    want = jax.grad(plain, (0, 1))(x, weights)
    got = jax.grad(lambda *a: 3 * chunked(*a), (0, 1))(x, weights)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, 3 * a, rtol=1e-4, atol=1e-5)


def test_an_untrained_drafter_begins_as_version_1():
    """Convolutions that hand each row on, nearly: what they add of their own is small."""
    params = init_drafter(CONFIG, 0)
    for layer in ("layers_0", "layers_1"):
        for conv in ("attention_conv", "mlp_conv"):
            base = np.asarray(params[layer][conv]["base_kernel"])
            assert (base[:, 0] == 1).all() and not base[:, 1:].any()
            assert 0 < np.abs(params[layer][conv]["kernel_projection"]["kernel"]).max() < 0.2


JUDGE = """
import json, sys, torch
from dflash.model import DFlash2DraftModel
from safetensors.torch import load_file
model, info = DFlash2DraftModel.from_pretrained(
    sys.argv[1], dtype=torch.float32, output_loading_info=True)
stored = load_file(sys.argv[1] + "/model.safetensors")
own = {n.removesuffix(".weight") if "codebook" in n else n: p for n, p in model.named_parameters()}
assert own.keys() == stored.keys(), own.keys() ^ stored.keys()
assert all(torch.equal(own[n], stored[n].float()) for n in own)
c = model.candidate_selector
print(json.dumps({"block": model.block_size, "mask": model.mask_token_id, "top_k": c.top_k,
                  "taps": model.target_layer_ids, "missing": sorted(info["missing_keys"])}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a target and prompts, below which the command writes."""
    path = tmp_path_factory.mktemp("command")
    make_pair(path)
    lines = [json.dumps({"prompt": f"{what} {i}?"}) for i in range(20) for what in ("why", "how")]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def train(folder: Path, **changes) -> int:
    """Runs `jflash train` for a few steps, with some options changed."""
    given = {
        "target": folder / "target", "data": folder / "prompts.jsonl", "drafter": "dflash2",
        "output": folder / "made", "num-layers": 1, "block-size": 4, "anchors": 6, "batch": 2,
        "row-length": 96, "max-new-tokens": 24, "answer-batch": 8, "steps": 12, "held-out": 2,
        "checkpoint-every": 6, "eval-every": 6, "conv-group-size": 4, "selector-rank": 8,
    }  # fmt: skip
    options = given | {name.replace("_", "-"): value for name, value in changes.items()}
    words = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    return main.run("train", words)


@pytest.fixture(scope="module")
def made(folder) -> Path:
    """A drafter that the command has trained."""
    assert train(folder) == 0
    return folder / "made"


def test_the_command_refuses_what_no_drafter_can_be(folder, capsys):
    assert train(folder, conv_group_size=7) == 2
    assert "is not a multiple of conv_group_size 7" in capsys.readouterr().err
    assert train(folder, selector_weight=-1) == 2
    assert "selector_weight must be at least 0" in capsys.readouterr().err


def own_config(made: Path) -> Drafter2Config:
    own = load_drafter(made, "float32")[0].config
    assert isinstance(own, Drafter2Config)
    return own


def trained(made: Path) -> None:
    curve = json.loads(made.with_name("made-work").joinpath("training/curve.json").read_text())
    assert curve[-1]["loss"] < curve[0]["loss"] and curve[-1]["tau"] >= 1
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert own_config(made).selector_top_k == 16


@pytest.mark.long
def test_the_command_trains_one(made):
    trained(made)


@needs(PYTHON)
def test_the_reference_loads_what_was_trained(made):
    trained(made)
    judge = run_reference("-c", JUDGE, made)
    own = own_config(made)
    assert json.loads(judge.stdout.splitlines()[-1]) == {
        "block": 4, "mask": own.mask_token_id, "top_k": 16, "missing": [],
        "taps": list(own.target_layer_ids),
    }  # fmt: skip
