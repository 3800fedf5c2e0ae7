"""The DFlash drafter, version 1: a block-diffusion decoder fed with its target's hidden states.

One forward over [anchor, mask, mask, …] proposes a token for every masked position at once. What
it knows of the text comes from its cache: keys and values projected from the target's features of
every committed token but the newest (arXiv 2602.06036; dflash 0.1.0, `DFlashDraftModel`).
Embedding and head are the target's: this module takes embeddings and returns hidden states.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jflash.config import DrafterConfig
from jflash.layers import Attend, DecoderLayer, RMSNorm, dense
from jflash.models.decoder import Caches


class Drafter(nn.Module):
    """Parameters: fc [P·D, D], hidden_norm, one subtree a layer, norm."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.fc = dense(c.hidden_size)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.layers = [DecoderLayer(c, fused=False) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        caches: Caches,
        attend: Attend,
    ) -> tuple[Float[Array, "B T D"], Caches]:
        """Final-normed hidden states of a block: row i speaks for the token at its own position."""
        x = embeddings * jnp.asarray(self.config.input_embedding_scale, embeddings.dtype)
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, positions, cache, attend)
            new.append(cache)
        return self.norm(x), tuple(new)

    def context(
        self, features: Float[Array, "B T PD"], positions: Int[Array, "B T"]
    ) -> tuple[tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]], ...]:
        """Keys and values of context tokens for every layer, from the target's features of them.

        A row is a pure function of one token's features: context never flows through the layers.
        """
        context = self.hidden_norm(self.fc(features))
        return tuple(layer.keys_values(context, positions) for layer in self.layers)

    def adjust_logits(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        """The head's logits with the drafter's multiplier and soft cap (never the target's)."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if not cap else jnp.tanh(logits / cap) * cap

    def init_all(self, features, embeddings, positions, caches, attend):
        """Touches every parameter once, for `init`."""
        return self.context(features, positions), self(embeddings, positions, caches, attend)
