"""What version 2 of the DFlash drafter adds: convolutions in its layers and a choice of drafts.

Around attention and around the MLP stand causal convolutions over the block's rows, whose kernels
are made from the rows (dflash 0.1.0, `DFlash2DraftModel`). Drafts are chosen from left to right:
each place has k candidates, scored by the head and by how well they follow the token chosen before.
Axes besides the package's: C candidates of a place, A those of the place before it, R rank, G
groups of channels, U taps.
"""

import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Int

from jflash.layers.layer import DecoderLayer
from jflash.layers.passes import Pass
from jflash.layers.projections import Projection
from jflash.layers.sums import Sums
from jflash.records.config import Drafter2Config
from jflash.records.leaves import Leaf, declare
from pallas_kernels.matmul import Unsummed

GROUP = 128  # tokens whose best comes first


class DynamicConvolution(nn.Module):
    """Two causal convolutions of a block's rows, one before and one after a sub-layer.

    A tap's kernel is `base_kernel` [2, U, D] plus a number for each group of channels, which comes
    from the row that goes into the first of the two, for both.
    """

    config: Drafter2Config

    def setup(self) -> None:
        c = self.config
        width, taps, groups = c.hidden_size, c.conv_kernel_size, c.hidden_size // c.conv_group_size
        base = Leaf((2, taps, width), ("convolutions", "taps", "embed"))
        self.base_kernel = declare(self, "base_kernel", base)
        self.kernel_projection = Projection(Leaf((width, 2 * taps * groups), ("embed", "kernels")))

    def kernels(self, x: Float[Array, "B T D"], backend: str) -> Float[Array, "2 B T U D"]:
        """Kernels of both convolutions, in float32."""
        c = self.config
        dynamic = self.kernel_projection(x, backend).astype(jnp.float32)
        dynamic = dynamic.reshape(*x.shape[:2], 2, c.conv_kernel_size, -1)
        dynamic = jnp.moveaxis(jnp.repeat(dynamic, c.conv_group_size, axis=-1), 2, 0)
        return dynamic + self.base_kernel.astype(jnp.float32)[:, None, None]

    def __call__(
        self, x: Float[Array, "B T D"], kernel: Float[Array, "B T U D"]
    ) -> Float[Array, "B T D"]:
        """Row i from rows i, i - 1, … of its block; what would lie before the block is 0.

        Training lays blocks of the full width side by side; decoding has one a sequence, at most
        that wide.
        """
        place = jnp.arange(x.shape[1]) % self.config.block_size
        out = kernel[:, :, 0] * x
        for tap in range(1, self.config.conv_kernel_size):
            shifted = jnp.roll(x, tap, axis=1)
            out += kernel[:, :, tap] * jnp.where((place >= tap)[:, None], shifted, 0)
        return out.astype(x.dtype)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with its attention and its MLP each between two convolutions."""

    drafter: Drafter2Config

    def setup(self) -> None:
        super().setup()
        self.attention_conv = DynamicConvolution(self.drafter)
        self.mlp_conv = DynamicConvolution(self.drafter)

    def __call__(self, given: Sums, positions, cache, over: Pass):
        kernels = over.kernels
        entered, normed = self.input_norm.after(given, kernels.norm)
        before, after = self.attention_conv.kernels(normed, kernels.matmul)
        inner = self.attention_conv(normed, before)
        inner, cache = self.attention(inner, positions, cache, over, None)
        x = entered + self.attention_conv(inner, after)
        normed = self.post_norm(x, kernels.norm)
        before, after = self.mlp_conv.kernels(normed, kernels.matmul)
        inner = self.mlp(self.mlp_conv(normed, before), None, kernels)
        return entered, Unsummed(None, x + self.mlp_conv(inner, after)), cache


class CandidateSelector(nn.Module):
    """Scores what may follow a token: Σ over R of predecessor · projected hidden · successor."""

    config: Drafter2Config

    def setup(self) -> None:
        c = self.config
        codebook = Leaf((c.vocab_size, c.selector_rank), ("vocab", "rank"))
        self.predecessor_codebook = declare(self, "predecessor_codebook", codebook)
        self.successor_codebook = declare(self, "successor_codebook", codebook)
        self.hidden_projection = Projection(
            Leaf((c.hidden_size, c.selector_rank), ("embed", "rank"))
        )

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        previous: Int[Array, "B T A"],
        candidates: Int[Array, "B T C"],
    ) -> Float[Array, "B T A C"]:
        """The gain of each candidate after each token that may come before it, in float32."""
        projected = self.hidden_projection(hidden)[:, :, None]
        return jnp.einsum(
            "BTAR,BTCR->BTAC",
            self.predecessor_codebook[previous] * projected, self.successor_codebook[candidates],
            precision="highest", preferred_element_type=jnp.float32,
        )  # fmt: skip

    def candidates(
        self,
        hidden: Float[Array, "B T D"],
        anchor: Int[Array, " B"],
        logits: Float[Array, "B T V"],
    ) -> tuple[Int[Array, "B T C"], Float[Array, "B T A C"]]:
        """Candidates of each place, and their scores after each candidate of the place before.

        The anchor comes before the first place, as often as there are candidates.
        """
        unary, ids = best_candidates(logits, self.config.selector_top_k)
        first = jnp.broadcast_to(anchor[:, None, None], ids[:, :1].shape)
        previous = jnp.concatenate([first, ids[:, :-1]], axis=1)
        return ids, unary[:, :, None] + self(hidden, previous, ids)


def best_candidates(
    logits: Float[Array, "B T V"], count: int
) -> tuple[Float[Array, "B T C"], Int[Array, "B T C"]]:
    """The largest logits and their ids, in falling order.

    They lie in the `count` groups with the largest maxima, so the other groups need only a maximum:
    sorting a whole vocabulary would cost more than the drafter.
    """
    vocab = logits.shape[-1]
    if vocab <= 2 * count * GROUP:
        values, ids = lax.top_k(logits, count)
        return values, ids
    groups = -(-vocab // GROUP)
    beyond = (0, 0), (0, 0), (0, groups * GROUP - vocab)
    padded = jnp.pad(logits, beyond, constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*logits.shape[:2], groups, GROUP), axis=-1)
    chosen = lax.top_k(best, count)[1]
    ids = (chosen[..., None] * GROUP + jnp.arange(GROUP)).reshape(*logits.shape[:2], -1)
    inside = jnp.take_along_axis(logits, jnp.minimum(ids, vocab - 1), axis=-1)
    inside = jnp.where(ids < vocab, inside, -jnp.inf)
    values, index = lax.top_k(inside, count)
    return values, jnp.take_along_axis(ids, index, axis=-1)
