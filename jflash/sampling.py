"""From logits to tokens, and how much of a draft they confirm. Explicit keys, no state.

A token drawn at index p of a request is the argmax of logits / temperature + Gumbel noise, and the
noise is a function of the request's key and p alone. The draft is the drafter's argmax and draws
nothing, so it is accepted with probability p(draft), which is the exact rule for a one-hot draft,
and the tokens of a seed are the same whatever was drafted.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def greedy(logits: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """The largest logit; ties go to the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "B T V"],
    indices: Int[Array, "B T"],
    keys: Key[Array, " B"],
    temperature: Float[Array, " B"],
) -> Int[Array, "B T"]:
    """Draws from softmax(logits / temperature) for tokens at `indices`; greedy where it is 0."""

    def noise(key, index):
        return jax.random.gumbel(jax.random.fold_in(key, index), logits.shape[-1:])

    gumbel = jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(keys, indices)
    t = temperature[:, None, None]
    return greedy(jnp.where(t > 0, logits / jnp.where(t > 0, t, 1) + gumbel, logits))


def accepted_drafts(
    drafts: Int[Array, "B D"], choices: Int[Array, "B D+1"], widths: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Length of the longest prefix of drafts that equals the target's choices, within the width."""
    agree = (drafts == choices[:, :-1]) & (jnp.arange(1, choices.shape[1]) < widths[:, None])
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1)


def through_first_stop(
    tokens: Int[Array, "B T"], count: Int[Array, " B"], stops: Int[Array, "B E"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """`count` cut to end with the first stop token among the first `count`, and whether one is."""
    row = jnp.arange(tokens.shape[1])
    is_stop = jnp.any(tokens[:, :, None] == stops[:, None, :], axis=-1)
    is_stop &= row < count[:, None]
    first = jnp.argmax(is_stop, axis=1)
    stopped = jnp.any(is_stop, axis=1)
    return jnp.where(stopped, first + 1, count), stopped
