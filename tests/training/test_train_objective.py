"""Each option of a drafter's loss equals its formula in NumPy, and its attention the plain one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.layers.cache import LayerCache
from jflash.speculative import apply
from jflash.training import attention
from jflash.training.attention import (
    blocks_attend,
    causal_attend,
    grouped,
    training_backend,
)
from jflash.training.chunked import chunk, sum_over_chunks, unchunk
from jflash.training.drafter_loss import Blocks, chunks_for, drafter_loss, draw_anchors
from jflash.training.objective import (
    counted,
    dpace_weights,
    kl_divergence,
    place_losses,
    total_variation,
)
from jflash.training.recipe import Objective
from tests.support.pairs import target_config
from tests.training.test_drafter_loss import (
    DRAFTER,
    PAIR,
    TARGET,
    W,
    block_labels,
    hidden,
    make_rows,
)

RNG = np.random.default_rng(0)
TARGETS, DRAFTS = RNG.normal(size=(2, 5, 7, 11)).astype(np.float32) * 2
LABELS = RNG.integers(0, 11, (5, 7))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


P, Q = softmax(TARGETS.astype(np.float64)), softmax(DRAFTS.astype(np.float64))


def test_losses_are_their_formulas():
    kl = (P * np.log(P / Q)).sum(-1)
    tv = 0.5 * np.abs(P - Q).sum(-1)
    ce = -np.log(np.take_along_axis(Q, LABELS[..., None], -1))[..., 0]
    rows = (jnp.asarray(TARGETS), jnp.asarray(DRAFTS))
    np.testing.assert_allclose(kl_divergence(*rows), kl, rtol=1e-5)
    np.testing.assert_allclose(total_variation(*rows), tv, rtol=1e-5)
    for objective, expected in [
        (Objective(), ce),
        (Objective(loss="kl"), kl),
        (Objective(loss="tv"), 0.1 * ce + 0.9 * tv),
        (Objective(loss="tv", ce_share=0.4), 0.4 * ce + 0.6 * tv),
    ]:
        soft = jnp.asarray(TARGETS) if objective.soft else None
        losses, own = place_losses(objective, jnp.asarray(DRAFTS), soft, jnp.asarray(LABELS))
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        np.testing.assert_allclose(own, ce, rtol=1e-5)


def test_dpace_weights_are_the_papers():
    confidence = RNG.uniform(size=(6, 7)).astype(np.float32)
    live = np.arange(7) < RNG.integers(0, 8, (6, 1))
    live[0], live[1] = True, False
    for alpha in (0.0, 0.5, 1.0):
        expected = np.zeros((6, 7))
        for b in range(6):
            for j in range(live[b].sum()):
                for m in range(j, live[b].sum()):
                    smooth = (1 - alpha) * confidence[b, : m + 1].astype(float) + alpha
                    expected[b, j] += smooth.prod()
        weights = dpace_weights(jnp.asarray(confidence), jnp.asarray(live), alpha)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
    gradient = jax.grad(lambda c: dpace_weights(c, jnp.asarray(live), 0.5).sum())
    assert not np.asarray(gradient(jnp.asarray(confidence))).any()


def test_curriculum_lets_places_in_one_by_one():
    objective = Objective(curriculum=0.5)
    count = partial(counted, objective, 7)
    np.testing.assert_allclose(count(jnp.float32(0)), [1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(count(jnp.float32(0.125)), [1, 1, 0.5, 0, 0, 0, 0])
    np.testing.assert_allclose(count(jnp.float32(0.25)), [1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(count(jnp.float32(0.5)), np.ones(7))
    np.testing.assert_allclose(count(jnp.float32(1)), np.ones(7))
    np.testing.assert_allclose(counted(Objective(), 7, jnp.float32(0)), np.ones(7))


@pytest.mark.parametrize(
    "objective",
    [
        Objective(loss="kl"),
        Objective(loss="tv", decay=2.0, curriculum=0.5),
        Objective(weights="dpace", dpace_alpha=0.3),
    ],
    ids=str,
)
def test_loss_follows_its_objective(objective):
    """The whole loss against sums over blocks and places, the target's logits at their rows."""
    rows, key, progress = make_rows(), jax.random.key(4), 0.2
    blocks = Blocks(anchors=6, objective=objective, chunks=2)
    loss, _ = jax.jit(partial(drafter_loss, TARGET, DRAFTER, blocks))(
        PAIR.params.drafter, PAIR.params.target, rows, key, jnp.float32(progress)
    )
    anchors, exist = draw_anchors(rows, 6, key)
    labels, live = (np.asarray(x) for x in block_labels(rows, anchors, exist, W))
    head = np.asarray(PAIR.params.target["head"], np.float64)
    logits = np.tanh(0.7 * (hidden(rows, anchors)[:, :, 1:] @ head.T) / 5) * 5
    own = np.asarray(target_hidden(rows), np.float64) @ head.T
    index = np.minimum(np.asarray(anchors)[..., None] + np.arange(W - 1), own.shape[1] - 1)
    p, q = softmax(np.stack([own[b][index[b]] for b in range(2)])), softmax(logits)
    ce = -np.log(np.take_along_axis(q, labels[..., None], -1))[..., 0]
    kl = (p * np.log(p / q)).sum(-1)
    tv = 0.5 * np.abs(p - q).sum(-1)
    if objective.weights == "dpace":
        reach = np.cumprod(np.where(live, 0.7 * np.exp(-ce) + 0.3, 0), axis=-1)
        weights = live * reach[..., ::-1].cumsum(-1)[..., ::-1]
        expected = (weights * ce).sum() / (np.asarray(exist).sum() * (W - 1))
    else:
        decay = np.exp(-np.arange(W - 1) / (objective.decay or 4))
        if objective.curriculum:
            decay *= np.clip(1 + (W - 2) * progress / 0.5 - np.arange(W - 1), 0, 1)
        values = kl if objective.loss == "kl" else 0.1 * ce + 0.9 * tv
        expected = (decay * live * values).sum() / (decay * live).sum()
    assert live.any() and not live.all()
    assert loss == pytest.approx(expected, rel=1e-5)


@jax.jit
def target_hidden(rows):
    out, _, _ = apply(
        TARGET,
        PAIR.params.target,
        rows.tokens,
        rows.positions,
        (None,) * TARGET.config.num_layers,
        causal_attend(rows),
    )
    return out


def test_chunks_change_neither_sum_nor_gradient():
    hidden = jnp.asarray(RNG.normal(size=(4, 6, 3)), jnp.float32)
    scale = jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)

    def plain(x):
        return jnp.sum(scale[..., None] * jnp.sin(x) * 2.0)

    def chunked(x):
        def fn(h, s, shared):
            return jnp.sum(s[..., None] * jnp.sin(h) * shared), h[..., 0]

        return sum_over_chunks(fn, chunk(x, 3), chunk(scale, 3), jnp.float32(2))

    (value, extras), gradient = jax.value_and_grad(chunked, has_aux=True)(hidden)
    assert value == pytest.approx(float(plain(hidden)), rel=1e-6)
    np.testing.assert_array_equal(unchunk(extras), hidden[..., 0])
    np.testing.assert_allclose(gradient, jax.grad(plain)(hidden), rtol=1e-6)
    assert chunks_for(64, 32, 16, 49152) == 4  # 16 anchors: 1.5 GB of logits
    assert chunks_for(64, 1, 16, 1000) == 1 and chunks_for(7, 10**6, 16, 10**6) == 7


class Heads:
    """Stands for a projection whose heads are made already."""

    def __init__(self, *heads):
        self.heads = heads

    def split(self):
        return self.heads


@pytest.mark.parametrize("sight", [{}, {"window": 5, "causal": True}, {"window": 6}])
def test_grouped_attention_is_the_plain_one(sight, monkeypatch):
    """What cuDNN is asked for, done by XLA, against the scores of all blocks written out."""
    B, A, T, N, K, H, width = 2, 6, 40, 4, 2, 8, 8
    monkeypatch.setattr(attention, "QUERIES", 3 * width - 1)  # so that 2 blocks make a group
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    q, k, v = normal(B, A * width, N, H), normal(B, A * width, K, H), normal(B, A * width, K, H)
    cache = LayerCache(normal(B, T, K, H), normal(B, T, K, H))
    anchors = jnp.asarray(RNG.integers(0, T, (B, A)))
    context = jnp.arange(T) < anchors[..., None]
    context = context.at[0, 0].set(False)  # the first token of a conversation
    pull = normal(B, A * width, N, H)

    spec = replace(target_config(head_dim=H).mixers[0], **{"causal": False, **sight})

    def value(over, heads, cache):
        out, _ = over.attend(spec, Heads(*heads), cache)
        return jnp.sum(pull * out)

    fused = grouped(context, anchors, width, "xla")
    assert fused.mask.shape == (B * A // 2, 1, 2 * width, T + 2 * width)
    plain = blocks_attend(context, anchors, width, "xla")
    first, second = (
        jax.jit(jax.value_and_grad(partial(value, a), (0, 1)))((q, k, v), cache)
        for a in (plain, fused)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), first, second)


def test_attention_backend_is_refused_by_reason():
    configs = [target_config(head_dim=64)]
    assert training_backend(None, configs, "bfloat16", "gpu") == "cudnn"
    assert training_backend("xla", configs, "bfloat16", "gpu") == "xla"
    assert training_backend(None, configs, "float32", "gpu") == "xla"
    assert training_backend(None, [target_config(head_dim=20)], "bfloat16", "gpu") == "xla"
    for name, given, complaint in [
        ("cudnn", (configs, "bfloat16", "cpu"), "needs an NVIDIA GPU, the device is a cpu"),
        ("cudnn", (configs, "float32", "gpu"), "needs bfloat16"),
        ("flash", (configs, "bfloat16", "gpu"), "one of xla, cudnn, got 'flash'"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            training_backend(name, *given)


def test_bad_objectives_are_named():
    for changes, complaint in [
        ({"loss": "mse"}, "loss must be one of ce, kl, tv, got 'mse'"),
        ({"weights": "flat"}, "weights must be one of decay, dpace, got 'flat'"),
        ({"decay": 0.0}, "decay must be positive, got 0.0"),
        ({"curriculum": 1.5}, "curriculum must be within 0 … 1, got 1.5"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            Objective(**changes)
    with pytest.raises(ValueError, match="6 anchors do not divide into 4 chunks"):
        Blocks(anchors=6, chunks=4)
