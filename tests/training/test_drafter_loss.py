"""The training forward of the drafter is the decoding forward, and its loss is the paper's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.layers.cache import LayerCache, empty_cache
from jflash.layers.passes import Block
from jflash.models.dflash import Drafter
from jflash.records.kernels import XLA
from jflash.speculative import apply
from jflash.training.attention import causal_attend
from jflash.training.data import Conversation, Rows, pack
from jflash.training.drafter import make_lesson
from jflash.training.drafter_loss import (
    Blocks,
    block_hidden,
    block_labels,
    drafter_loss,
    draw_anchors,
)
from jflash.training.objective import loss_decay
from jflash.training.recipe import PAPERS, TrainConfig
from tests.support.pairs import random_pair

T = 48
PAIR = random_pair(num_layers=2, final_logit_softcapping=5.0, output_multiplier=0.7)
TARGET, DRAFTER = PAIR.models.target, PAIR.models.drafter
W = DRAFTER.config.block_size


def make_rows(seed: int = 0) -> Rows:
    """Two rows, the first with two conversations."""
    rng = np.random.default_rng(seed)
    sizes = [(9, 30), (5, 18), (4, 14)]
    texts = [
        Conversation(rng.integers(0, 60, p).tolist(), rng.integers(0, 60, a).tolist())
        for p, a in sizes
    ]
    rows, dropped = pack(texts, T)
    assert dropped == 0 and rows.tokens.shape == (2, T)
    return Rows(*map(jnp.asarray, rows))


BLOCK_HIDDEN = jax.jit(partial(block_hidden, TARGET, DRAFTER))
LOSS = jax.jit(partial(drafter_loss, TARGET, DRAFTER, Blocks(anchors=6, chunks=3)))
START = jnp.float32(0)  # of the training: nothing depends on progress without a curriculum


def hidden(rows: Rows, anchors) -> np.ndarray:
    out = BLOCK_HIDDEN(PAIR.params.drafter, PAIR.params.target, rows, jnp.asarray(anchors))
    return np.asarray(out[0])


@partial(jax.jit, static_argnums=2)
def decoding_hidden(tokens, anchor, drafter):
    """The block's hidden states as speculative.draft computes them, on a cache of one sequence."""
    config, params = drafter.config, PAIR.params
    ids, positions = tokens[None], jnp.arange(T)[None]
    alone = Rows(ids, positions, jnp.ones_like(ids), jnp.ones_like(ids, bool))
    taps, none = config.target_layer_ids, (None,) * TARGET.config.num_layers
    _, features, _ = apply(TARGET, params.target, ids, positions, none, causal_attend(alone), taps)
    context = apply(drafter, params.drafter, features, positions, method="context")
    # What lies past the length is garbage by definition.
    garbage = [
        LayerCache(c.k + 7.0, c.v - 3.0)
        for c in (empty_cache(mixer, 1, 64, W, "float32") for mixer in config.mixers)
    ]
    slots = jnp.where(positions < anchor, positions, 64 + positions)
    caches = tuple(p.write(c, slots, "xla")[1] for c, p in zip(garbage, context, strict=True))
    mask = jnp.full(W - 1, config.mask_token_id)
    block = jnp.concatenate([tokens[anchor][None], mask])[None]
    embeddings = apply(TARGET, params.target, block, method="embed")
    attend = Block(anchor[None], jnp.asarray([W]), XLA)
    place = anchor + jnp.arange(W)[None]
    out, _ = apply(drafter, params.drafter, embeddings, place, caches, attend)
    return out[0]


NEAR = dict(window=5, causal=True)
SIGHTS = {
    "full": (),
    "causal windows": (NEAR, dict()),
    "two-sided windows": (dict(window=3), dict(window=11)),
    "causal": (dict(causal=True),) * 2,
}


@pytest.mark.parametrize("sights", SIGHTS.values(), ids=SIGHTS)
def test_blocks_are_those_of_decoding(sights):
    rows, drafter = make_rows(), Drafter(DRAFTER.config.attending(*(sights or ({}, {}))))
    segments = np.asarray(rows.segments)
    anchors = np.array([[8, 20, 37, 0], [3, 10, int(np.argmax(segments[1] == 2)) + 6, 30]])
    params = PAIR.params
    trained = np.asarray(
        jax.jit(partial(block_hidden, TARGET, drafter))(
            params.drafter, params.target, rows, jnp.asarray(anchors)
        )[0]
    )
    if sights:
        assert np.abs(trained - hidden(rows, anchors)).max() > 1e-2
    for b, row in enumerate(anchors):
        for a, anchor in enumerate(row):
            own = np.flatnonzero(segments[b] == segments[b, anchor])
            tokens = np.zeros(T, np.int32)  # alone in its row, whatever follows
            tokens[: len(own)] = np.asarray(rows.tokens)[b, own]
            decoded = decoding_hidden(tokens, jnp.int32(anchor - own[0]), drafter)
            np.testing.assert_allclose(trained[b, a], decoded, atol=1e-5)


def test_block_ignores_what_follows_and_other_conversations():
    rows = make_rows()
    before = hidden(rows, [[20, 12], [12, 14]])
    later = rows._replace(tokens=rows.tokens.at[0, 21:].set(3).at[1, 15:].set(5))
    np.testing.assert_array_equal(hidden(later, [[20, 12], [12, 14]]), before)
    start = int(np.argmax(np.asarray(rows.segments)[1] == 2))
    second = hidden(rows, [[1, 2], [start + 5, start + 9]])[1]
    first_changed = rows._replace(tokens=rows.tokens.at[1, :start].set(3))
    changed = hidden(first_changed, [[1, 2], [start + 5, start + 9]])[1]
    np.testing.assert_array_equal(changed, second)
    context_changed = rows._replace(tokens=rows.tokens.at[0, 11].add(1))
    assert np.abs(hidden(context_changed, [[20, 12], [12, 14]])[0] - before[0]).max() > 1e-3


def test_blocks_do_not_see_each_other():
    rows = make_rows()
    together = hidden(rows, [[20, 12, 9], [12, 14, 6]])
    others = hidden(rows, [[20, 30, 36], [12, 5, 16]])
    np.testing.assert_allclose(others[:, 0], together[:, 0], atol=1e-6)


def test_anchors_are_distinct_answer_tokens_that_another_follows():
    rows = make_rows()
    drawn, supervised = set(), np.asarray(rows.supervised)
    followed = (supervised[:, :-1] & supervised[:, 1:]).sum(-1)
    assert followed.tolist() == [29, 17 + 13]
    for seed in range(20):
        anchors, exist = draw_anchors(rows, 34, jax.random.key(seed))
        for b in range(2):
            chosen = np.asarray(anchors[b])[np.asarray(exist[b])]
            assert len(set(chosen.tolist())) == len(chosen)
            assert supervised[b, chosen].all() and supervised[b, chosen + 1].all()
            assert len(chosen) == followed[b]
        few, _ = draw_anchors(rows, 3, jax.random.key(seed))
        drawn.add(tuple(np.asarray(few).ravel().tolist()))
    assert len(drawn) == 20
    with pytest.raises(ValueError, match="49 anchors"):
        draw_anchors(rows, 49, jax.random.key(0))


def test_answers_of_one_token_are_named_before_anything_runs():
    """They hold no block: the loss would stay 0."""
    given = dict(anchors=2, training=TrainConfig(steps=1, batch_size=1), objective=PAPERS)
    rows = pack([Conversation([1, 2], [3]), Conversation([4], [5])], T)[0]
    with pytest.raises(ValueError, match="no answer has two tokens or more"):
        make_lesson(TARGET, DRAFTER.config, rows, **given)
    rows = pack([Conversation([1, 2], [3]), Conversation([4], [5, 6])], T)[0]
    assert make_lesson(TARGET, DRAFTER.config, rows, **given).identity["anchors"] == 2


def test_labels_stop_at_the_end_of_the_conversation():
    rows = make_rows()
    labels, live = block_labels(
        rows, jnp.asarray([[36, 5], [20, 2]]), jnp.asarray([[True, True], [True, False]]), W
    )
    assert live[0, 0].tolist() == [True, True] + [False] * (W - 3)  # 39 tokens in row 0
    assert not live[0, 1].any()  # the next token is of the prompt
    assert live[1, 0].tolist() == [True, True] + [False] * (W - 3)  # the other conversation's
    assert not live[1, 1].any()
    assert labels[0, 0, 0] == rows.tokens[0, 37]


def test_loss_is_the_papers():
    rows, key, count = make_rows(), jax.random.key(3), 6
    loss, metrics = LOSS(PAIR.params.drafter, PAIR.params.target, rows, key, START)
    anchors, exist = (np.asarray(x) for x in draw_anchors(rows, count, key))
    states = hidden(rows, anchors)
    head = np.asarray(PAIR.params.target["head"], np.float64)
    tokens, segments, supervised = (
        np.asarray(x) for x in (rows.tokens, rows.segments, rows.supervised)
    )
    total = weight = 0.0
    lengths, hits, tries = [], np.zeros(W - 1), np.zeros(W - 1)
    for b in range(2):
        for a in range(count):
            if not exist[b, a]:
                continue
            length, agree = 1, True
            for k in range(1, W):
                i = anchors[b, a] + k
                if i >= T or not supervised[b, i] or segments[b, i] != segments[b, anchors[b, a]]:
                    break
                logits = 0.7 * (head @ states[b, a, k].astype(np.float64))
                logits = np.tanh(logits / 5.0) * 5.0
                w = np.exp(-(k - 1) / 4)
                total += w * (np.log(np.exp(logits).sum()) - logits[tokens[b, i]])
                weight += w
                right = logits.argmax() == tokens[b, i]
                hits[k - 1] += right
                tries[k - 1] += 1
                agree = agree and right
                length += agree
            lengths.append(length)
    assert loss == pytest.approx(total / weight, abs=1e-5)
    assert metrics["acceptance_length"] == pytest.approx(np.mean(lengths), abs=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], hits / np.maximum(tries, 1), atol=1e-6)


def test_gradient_reaches_every_drafter_weight_and_no_nan():
    rows = make_rows()
    grads = jax.jit(jax.grad(LOSS, has_aux=True))(
        PAIR.params.drafter, PAIR.params.target, rows, jax.random.key(0), START
    )[0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_decay_is_the_papers():
    assert [loss_decay(w) for w in (8, 10, 16)] == [4, 5, 7]
