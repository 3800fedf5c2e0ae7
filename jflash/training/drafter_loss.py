"""DFlash's training loss: blocks at random anchors of a row, all drafted in one forward.

Every block is [anchor, mask × W-1] and sees what it would see when decoding: the context features
strictly before its anchor and all of its block's rows, restricted by each layer's window and
causality. The target is frozen. One causal forward of it over the row gives the features of all
blocks (arXiv 2602.06036), and its distribution at every place if the loss needs that.
Axes besides the package's: A anchors of a row, K = W - 1 places past an anchor.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jflash.layers.cache import LayerCache
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_params
from jflash.records.config import Drafter2Config, DrafterConfig
from jflash.speculative import apply
from jflash.training.attention import Backend, blocks_attend, causal_attend
from jflash.training.chunked import chunk, sum_over_chunks, unchunk
from jflash.training.data import Rows, followed
from jflash.training.losses import agreeing, head_logits, scale_residual_outputs, weighted_mean
from jflash.training.objective import (
    counted,
    decay_weights,
    dpace_weights,
    loss_decay,
    place_losses,
)
from jflash.training.recipe import PAPERS, Objective
from jflash.training.selector_loss import selector_losses

LOGITS = 2**31  # bytes of one chunk's float32 logits on a device


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a drafter's blocks are trained."""

    anchors: int  # of a row
    objective: Objective = PAPERS
    backend: Backend = "xla"  # of attention
    chunks: int = 1  # of anchors, whose logits are made one after the other; divides `anchors`

    def __post_init__(self) -> None:
        if self.anchors < 1 or self.chunks < 1 or self.anchors % self.chunks:
            raise ValueError(f"{self.anchors} anchors do not divide into {self.chunks} chunks")


def chunks_for(anchors: int, rows: int, block_size: int, vocab_size: int) -> int:
    """The fewest equal chunks of anchors whose logits, for a device's rows, stay below LOGITS."""
    one = rows * (block_size - 1) * vocab_size * 4
    fitting = max(1, LOGITS // one)
    return next(n for n in range(1, anchors + 1) if anchors % n == 0 and anchors // n <= fitting)


def init_drafter(config: DrafterConfig, seed: int) -> Any:
    """Float32 params of an untrained drafter: normal(0, 0.02), residual outputs scaled down.

    Convolutions begin near the identity: each row passes as it is.
    """
    params = scale_residual_outputs(
        random_params(replace(config, dtype="float32"), seed), config.num_layers
    )

    def begin(path: Any, leaf: Array) -> Array:
        convolution = path[-1].key == "base_kernel"
        return jnp.zeros_like(leaf).at[:, 0].set(1.0) if convolution else leaf

    return jax.tree_util.tree_map_with_path(begin, params)


def draw_anchors(
    rows: Rows, count: int, key: Key[Array, ""]
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Different random answer tokens of each row that another one follows, and which exist.

    A row with fewer than `count` such places gets others, marked as not existing. The last token of
    a prompt is no anchor, as in decoding, where the prefill gives the first one.
    """
    if count > rows.tokens.shape[1]:
        raise ValueError(f"{count} anchors do not fit rows of {rows.tokens.shape[1]} tokens")
    eligible = jnp.pad(followed(rows.supervised), ((0, 0), (0, 1)))
    score = jnp.where(eligible, jax.random.uniform(key, eligible.shape), -1.0)
    score, anchors = jax.lax.top_k(score, count)
    return anchors, score >= 0


def block_labels(
    rows: Rows, anchors: Int[Array, "B A"], exist: Bool[Array, "B A"], block_size: int
) -> tuple[Int[Array, "B A K"], Bool[Array, "B A K"]]:
    """Tokens anchor + 1 … anchor + W - 1, and which of them count.

    A token counts if it and all tokens between are supervised and in the anchor's conversation:
    decoding would end at the first that is not.
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
    target: Target, drafter: Drafter, params: Any, target_params: Any, rows: Rows,
    anchors: Int[Array, "B A"], backend: Backend = "xla",
) -> tuple[Float[Array, "B A W D"], Float[Array, "B T D"]]:  # fmt: skip
    """The drafter's hidden states of all blocks, and the target's hidden states of the rows."""
    W = drafter.config.block_size
    B, A = anchors.shape
    target_rows, features, _ = apply(
        target, target_params, rows.tokens, rows.positions, (None,) * target.config.num_layers,
        causal_attend(rows, backend), drafter.config.target_layer_ids,
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
    seen = before & (rows.segments[:, None, :] == segment[:, :, None])

    embeddings = apply(target, target_params, block, method="embed")
    attend = blocks_attend(seen, anchors, W, backend)
    hidden, _ = apply(drafter, params, embeddings, positions, caches, attend)
    return hidden.reshape(B, A, W, -1), target_rows


def target_hidden(
    rows: Float[Array, "B T D"], anchors: Int[Array, "B A"], places: int
) -> Float[Array, "B A K D"]:
    """The target's rows that predict places 1 … K past each anchor: row t predicts t + 1."""
    B, A = anchors.shape
    index = jnp.minimum(anchors[:, :, None] + jnp.arange(places), rows.shape[1] - 1)
    flat = jnp.take_along_axis(rows, index.reshape(B, A * places, 1), axis=1)
    return flat.reshape(B, A, places, -1)


def drafter_loss(
    target: Target, drafter: Drafter, blocks: Blocks, params: Any, target_params: Any, rows: Rows,
    key: Key[Array, ""], progress: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Array]]:  # fmt: skip
    """The objective's mean over the tokens that blocks predict, k = 1 … W - 1 past the anchor.

    With weights by decay it is Σ w_k · loss_k / Σ w_k. With D-PACE's weights, which count tokens,
    it is Σ w_k · loss_k over the number of blocks and places. The metrics are `accuracy` [W - 1] by
    place and `acceptance_length`, the mean that greedy steps would commit at these anchors (bonus
    included). A DFlash 2 drafter adds its selector's loss at every place, and its metrics use the
    selector's choice. Bind the first three arguments for the trainer.
    """
    places, objective = drafter.config.block_size - 1, blocks.objective
    anchors, exist = draw_anchors(rows, blocks.anchors, key)
    labels, live = block_labels(rows, anchors, exist, places + 1)
    hidden, target_rows = block_hidden(
        target, drafter, params, target_params, rows, anchors, blocks.backend
    )
    wanted = target_hidden(target_rows, anchors, places) if objective.soft else None
    counts = counted(objective, places, progress)
    decay = decay_weights(objective.decay or loss_decay(places + 1), places) * counts
    second = isinstance(drafter.config, Drafter2Config)
    learnt = (params["candidate_selector"],) if second else ()
    newest = jnp.take_along_axis(rows.tokens, anchors, axis=1)
    previous = jnp.concatenate([newest[:, :, None], labels[:, :, :-1]], axis=2)
    by_decay = objective.weights == "decay"
    rest = jax.tree.map(lambda x: chunk(x, blocks.chunks), (wanted, labels, live, previous))
    shared = (target_params, decay if by_decay else counts)
    total, correct = sum_over_chunks(
        partial(chunk_loss, target, drafter, objective),
        chunk(hidden[:, :, 1:], blocks.chunks), rest, shared, *learnt,
    )  # fmt: skip
    norm = jnp.sum(decay * live) if by_decay else jnp.sum(exist) * places
    correct = unchunk(correct)
    hits = jnp.sum(correct & live, axis=(0, 1)) / jnp.maximum(jnp.sum(live, axis=(0, 1)), 1)
    length = weighted_mean(1.0 + agreeing(correct, live), exist.astype(jnp.float32))
    return total / jnp.maximum(norm, 1e-6), {"accuracy": hits, "acceptance_length": length}


def chunk_loss(
    target: Target, drafter: Drafter, objective: Objective, hidden: Float[Array, "B C K D"],
    rest: Any, shared: Any, *selector: Any,
) -> tuple[Float[Array, ""], Bool[Array, "B C K"]]:  # fmt: skip
    """The weighted sum over C anchors a row, and the places where the target's token is drafted."""
    wanted, labels, live, previous = rest
    head, counts = shared

    def logits_of(x):
        return head_logits(target, head, x.reshape(len(x), -1, x.shape[-1]))

    logits = apply(drafter, {}, logits_of(hidden), method="adjust_logits")
    logits = logits.reshape(*labels.shape, -1)
    soft = None if wanted is None else target.capped(logits_of(wanted)).reshape(logits.shape)
    losses, cross = place_losses(objective, logits, soft, labels)
    best = jnp.argmax(logits, axis=-1)
    if isinstance(drafter.config, Drafter2Config):
        cross, best = selector_losses(drafter.config, selector[0], hidden, logits, previous, labels)
        losses += objective.selector_weight * cross
    if objective.weights == "dpace":
        weights = counts * dpace_weights(jnp.exp(-cross), live, objective.dpace_alpha)
    else:
        weights = live * counts
    return jnp.sum(weights * losses), best == labels
