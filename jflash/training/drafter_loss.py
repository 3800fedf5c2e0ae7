"""DFlash's training loss: blocks at random anchors of a row, all drafted in one forward.

Every block is [anchor, mask × W-1] and sees what it would see when decoding: the context features
strictly before its anchor, and its own rows in both directions. The target is frozen; one causal
forward of it over the row gives the features of all blocks (arXiv 2602.06036).
Axes besides the package's: A anchors of a row, R rows of keys before the block (the row's T).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jflash.cache import LayerCache
from jflash.config import DrafterConfig
from jflash.io.load import random_params
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.speculative import apply
from jflash.training.data import Rows
from jflash.training.losses import (
    agreeing,
    causal_attend,
    cross_entropy,
    head_logits,
    scale_residual_outputs,
    weighted_mean,
)


class TrainAttend(NamedTuple):
    """A row's blocks [B, A·W] against the row's context, which the cache carries, and themselves.

    Keys are never laid side by side for all blocks: each anchor has T + W of them, not T + A·W.
    """

    context: Bool[Array, "B A T"]  # which context rows the block of an anchor sees

    def __call__(self, projected, cache):
        q, k, v = projected.split()
        B, A, _ = self.context.shape
        N, H = q.shape[2:]
        K = k.shape[2]
        q = q.reshape(B, A, -1, K, N // K, H)
        k, v = (x.reshape(B, A, -1, K, H) for x in (k, v))
        f32 = jnp.float32
        past = jnp.einsum("BAWKGH,BTKH->BKGAWT", q, cache.k, preferred_element_type=f32)
        own = jnp.einsum("BAWKGH,BAUKH->BKGAWU", q, k, preferred_element_type=f32)
        past = jnp.where(self.context[:, None, None, :, None, :], past, -jnp.inf)
        scores = jnp.concatenate([past, own], axis=-1) * H**-0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        past, own = jnp.split(weights, [past.shape[-1]], axis=-1)
        out = jnp.einsum("BKGAWT,BTKH->BAWKGH", past, cache.v)
        out += jnp.einsum("BKGAWU,BAUKH->BAWKGH", own, v)
        return out.reshape(B, -1, N, H), cache


def loss_decay(block_size: int) -> float:
    """γ of the weights exp(-(k - 1) / γ): the paper's 4, 5, 7 for W = 8, 10, 16.

    Between and beyond them the two straight lines through these points: W / 2 up to 10, then
    5 + (W - 10) / 3.
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def init_drafter(config: DrafterConfig, seed: int) -> Any:
    """Float32 params of an untrained drafter: normal(0, 0.02), residual outputs scaled down."""
    return scale_residual_outputs(random_params(config, seed, "float32"), config.num_layers)


def draw_anchors(
    rows: Rows, count: int, key: Key[Array, ""]
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Different random places of each row whose next token is supervised, and which of them exist.

    A row with fewer than `count` such places fills up with others, marked as not existing.
    """
    if count > rows.tokens.shape[1]:
        raise ValueError(f"{count} anchors do not fit rows of {rows.tokens.shape[1]} tokens")
    # A prompt is never empty, so a supervised token's neighbour is of the same conversation.
    eligible = jnp.pad(rows.supervised[:, 1:], ((0, 0), (0, 1)))
    score = jnp.where(eligible, jax.random.uniform(key, eligible.shape), -1.0)
    score, anchors = jax.lax.top_k(score, count)
    return anchors, score >= 0


def block_labels(
    rows: Rows, anchors: Int[Array, "B A"], exist: Bool[Array, "B A"], block_size: int
) -> tuple[Int[Array, "B A K"], Bool[Array, "B A K"]]:
    """Tokens anchor + 1 … anchor + W - 1, and which of them count.

    Those count that are supervised and of the anchor's conversation, up to the first that is not:
    decoding would end there.
    """
    T = rows.tokens.shape[1]
    index = anchors[:, :, None] + jnp.arange(1, block_size)
    inside, index = index < T, jnp.minimum(index, T - 1)

    def at(x, i):
        return jax.vmap(lambda row, i: row[i])(x, i)

    same = at(rows.segments, index) == at(rows.segments, anchors)[:, :, None]
    live = inside & same & at(rows.supervised, index) & exist[:, :, None]
    return at(rows.tokens, index), jnp.cumprod(live, axis=-1).astype(bool)


def block_hidden(
    target: Target,
    drafter: Drafter,
    params: Any,
    target_params: Any,
    rows: Rows,
    anchors: Int[Array, "B A"],
) -> Float[Array, "B Q D"]:
    """The drafter's hidden states of all blocks, Q = A·W rows, W to an anchor."""
    W = drafter.config.block_size
    B, A = anchors.shape
    _, features, _ = apply(
        target, target_params, rows.tokens, rows.positions,
        (None,) * target.config.num_layers, causal_attend(rows), drafter.config.target_layer_ids,
    )  # fmt: skip
    context = apply(drafter, params, features, rows.positions, method="context")
    caches = tuple(LayerCache(*projected.split()[1:]) for projected in context)

    tokens = jnp.take_along_axis(rows.tokens, anchors, axis=1)[:, :, None]
    mask = jnp.full((B, A, W - 1), drafter.config.mask_token_id, tokens.dtype)
    block = jnp.concatenate([tokens, mask], axis=2).reshape(B, A * W)
    start = jnp.take_along_axis(rows.positions, anchors, axis=1)
    positions = (start[:, :, None] + jnp.arange(W)).reshape(B, A * W)
    segment = jnp.take_along_axis(rows.segments, anchors, axis=1)
    before = jnp.arange(rows.tokens.shape[1]) < anchors[:, :, None]
    attend = TrainAttend(before & (rows.segments[:, None, :] == segment[:, :, None]))

    embeddings = apply(target, target_params, block, method="embed")
    hidden, _ = apply(drafter, params, embeddings, positions, caches, attend)
    return hidden


def drafter_loss(
    target: Target,
    drafter: Drafter,
    anchors_per_row: int,
    params: Any,
    target_params: Any,
    rows: Rows,
    key: Key[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Σ w_k · CE / Σ w_k over the tokens that blocks predict, k = 1 … W - 1 places past the anchor.

    Metrics: `accuracy` [W - 1] by place, and `acceptance_length`, what a greedy step would commit
    on average at these anchors (bonus included). Bind the first three arguments for the trainer.
    """
    W = drafter.config.block_size
    anchors, exist = draw_anchors(rows, anchors_per_row, key)
    labels, live = block_labels(rows, anchors, exist, W)
    hidden = block_hidden(target, drafter, params, target_params, rows, anchors)
    predicting = hidden.reshape(*anchors.shape, W, -1)[:, :, 1:]
    logits = head_logits(
        target, target_params, predicting.reshape(len(anchors), -1, hidden.shape[-1])
    )
    logits = apply(drafter, params, logits, method="adjust_logits").reshape(*labels.shape, -1)

    weights = jnp.exp(-jnp.arange(W - 1) / loss_decay(W)) * live
    loss = weighted_mean(cross_entropy(logits, labels), weights)
    correct = jnp.argmax(logits, axis=-1) == labels
    hits = jnp.sum(correct & live, axis=(0, 1)) / jnp.maximum(jnp.sum(live, axis=(0, 1)), 1)
    length = weighted_mean(1.0 + agreeing(correct, live), exist.astype(jnp.float32))
    return loss, {"accuracy": hits, "acceptance_length": length}
