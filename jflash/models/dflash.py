"""The DFlash drafter: a block-diffusion decoder fed with its target's hidden states.

One forward over [anchor, mask, mask, …] proposes a token for every masked position at once. What
it knows of the text comes from its cache: keys and values projected from the target's features of
every committed token but the newest (arXiv 2602.06036; dflash 0.1.0, `DFlashDraftModel`).
Embedding and head are the target's, but for drafters that bring both: this module takes
embeddings and returns hidden states, and of these and the head's logits the candidates for drafts.
What version 2 adds is in `dflash2.py`.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, DTypeLike, Float, Int

from jflash.layers.gather import gather, rows_of
from jflash.layers.head import best_and_probability, head_best, head_logits
from jflash.layers.layer import DecoderLayer
from jflash.layers.passes import Pass, Projected
from jflash.layers.projections import Projection, RMSNorm
from jflash.models.decoder import Caches
from jflash.models.dflash2 import CandidateSelector, ConvolvedLayer
from jflash.records.config import Drafter2Config, DrafterConfig
from jflash.records.kernels import XLA, Kernels
from jflash.records.leaves import Leaf, declare
from pallas_kernels.matmul import Unsummed, matmul
from pallas_kernels.matmul.float8.rounded import Rounded

HEAD = "draft_head"  # a rounded one; see jflash.models.float8


class Candidates(NamedTuple):
    """Tokens that may be drafted at each place, and their scores.

    If scores depend only on the place they are [B, T, C], and `ids` [C] (None: all tokens in their
    order). If they depend on the token before it, which is one of A, they are [B, T, A, C] and
    `ids` [B, T, C].
    """

    ids: Int[Array, "*places C"] | None
    scores: Float[Array, "B T *A C"]


class Drafter(nn.Module):
    """Parameters: fc [P·D, D], hidden_norm, one subtree a layer, norm.

    Of a drafter that brings both: embedding [V, D], head [V', D], and if V' is not V, d2t [V'],
    what is added to a draft's id to give the target's. Of version 2: two convolutions a layer,
    candidate_selector.

    `context_kernel` [D, L·2·K·H] (and `context_bias`), if there, holds the layers' key and value
    columns once more, side by side: one GEMM then makes the context of all layers. Without it they
    are sliced from the layers' kernels, which copies them. `with_context_kernel` adds it.
    """

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        features = len(c.target_layer_ids) * c.hidden_size
        leaf = Leaf((features, c.hidden_size // c.shards), ("features", "embed"))
        self.fc = Projection(replace(leaf, whole=c.hidden_size))
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = [self.make_layer(i) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.own_embedding:
            table = Leaf((c.vocab_size // c.shards, c.hidden_size), ("vocab", "embed"))
            self.embedding = declare(self, "embedding", table)
        if c.draft_vocab_size is not None:
            if not self.has_variable("params", HEAD):
                rows = c.draft_vocab_size // c.shards
                head = Leaf((rows, c.hidden_size), ("draft_vocab", "embed"))
                self.head = declare(self, "head", head)
            if c.draft_vocab_size != c.vocab_size:
                offsets = Leaf((c.draft_vocab_size,), ("draft_vocab",), dtype="int32")
                self.d2t = declare(self, "d2t", offsets)
        if isinstance(c, Drafter2Config):
            self.candidate_selector = CandidateSelector(c)

    @nn.nowrap
    def make_layer(self, i: int) -> nn.Module:
        c = self.config
        common = c.layers[i], c.hidden_size, c.rms_norm_eps, ""
        if isinstance(c, Drafter2Config):
            return ConvolvedLayer(*common, c)
        return DecoderLayer(*common)

    @nn.nowrap
    def empty_states(self, batch: int, capacity: int, rows: int, dtype: DTypeLike) -> tuple:
        """What the layers keep of `batch` sequences; blocks have at most `rows` tokens."""
        layers = [self.make_layer(i) for i in range(self.config.num_layers)]
        return tuple(layer.empty_state(batch, capacity, rows, dtype) for layer in layers)

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        caches: Caches,
        over: Pass,
    ) -> tuple[Float[Array, "B T D"], Caches]:
        """Final-normed hidden states of a block: row i predicts the token at its position."""
        scale = self.config.input_embedding_scale
        assert scale is not None, "a drafter meets its target before it drafts"
        x = embeddings * jnp.asarray(scale, embeddings.dtype)
        sums, new = Unsummed(None, x), []
        for layer, cache in zip(self.layers, caches, strict=True):
            _, sums, cache = layer(sums, positions, cache, over)
            new.append(cache)
        return self.norm.after(sums, over.kernels.norm)[1], tuple(new)

    def context(
        self,
        features: Float[Array, "B T PD"],
        positions: Int[Array, "B T"],
        kernels: Kernels = XLA,
    ) -> tuple[Projected, ...]:
        """Keys and values of context tokens for every layer, from the target's features of them.

        A row is a pure function of one token's features: context never flows through the layers.
        """
        x = gather(self.fc(features, kernels.matmul), self.config.shards)
        x = self.hidden_norm(x, kernels.norm)
        kernel, bias = self._context_weights()
        columns = context_leaves(self.config)["context_kernel"].columns
        flat = x.reshape(-1, x.shape[-1])
        flat = matmul(flat, kernel, backend=kernels.matmul, columns=columns)
        rows = flat.reshape(*x.shape[:2], -1)
        rows = rows if bias is None else rows + bias
        sizes = [mixer.kv_width for mixer in self.config.mixers]
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(
            layer.keys_values(rows, positions, first)
            for layer, first in zip(self.layers, firsts, strict=True)
        )

    def _context_weights(self):
        if self.has_variable("params", "context_kernel"):
            bias = None
            if self.has_variable("params", "context_bias"):
                bias = self.get_variable("params", "context_bias")
            return self.get_variable("params", "context_kernel"), bias
        return self.context_weights()

    def context_weights(self) -> tuple[Float[Array, "D C"], Float[Array, " C"] | None]:
        """The layers' key and value columns side by side, and their biases if they have any."""
        parts = [layer.attention.context_kernel() for layer in self.layers]
        biases = [bias for _, bias in parts if bias is not None]
        kernel = jnp.concatenate([kernel for kernel, _ in parts], axis=1)
        return kernel, jnp.concatenate(biases) if biases else None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the drafter's embedding."""
        return rows_of(self.embedding, tokens, self.config.shards)

    def best(self, hidden: Float[Array, "B T D"], backend: str = "xla") -> Int[Array, "B T"]:
        """The id of the largest logit of the drafter's own head."""
        return head_best(hidden, self._head(), backend, self.config.shards)

    def best_and_confidence(
        self, hidden: Float[Array, "B T D"], backend: str = "xla"
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
        """`best`, and its probability by the drafter's own head."""
        return best_and_probability(hidden, self._head(), backend, self.config.shards)

    def raw_logits(
        self, hidden: Float[Array, "B T D"], backend: str = "xla"
    ) -> Float[Array, "B T _"]:
        """Logits of the drafter's head in float32."""
        return head_logits(hidden, self._head(), backend, self.config.shards)

    def _head(self) -> Float[Array, "V D"] | Rounded:
        if self.has_variable("params", HEAD):
            return self.get_variable("params", HEAD)
        return self.head

    def adjust_logits(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        """The head's logits with the drafter's multiplier and soft cap (never the target's)."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if not cap else jnp.tanh(logits / cap) * cap

    @nn.nowrap
    def surest(
        self, anchor: Int[Array, " B"], best: Int[Array, "B T"], sure: Float[Array, "B T"]
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
        """The head's best ids and their probabilities, of a block after `anchor`, as they are."""
        return best, sure

    def candidates(
        self,
        hidden: Float[Array, "B T D"],
        anchor: Int[Array, " B"],
        logits: Float[Array, "B T _"],
    ) -> Candidates:
        """By adjusted logits; version 2 also uses the anchor, the token before the first place."""
        c = self.config
        if isinstance(c, Drafter2Config):
            return Candidates(*self.candidate_selector.candidates(hidden, anchor, logits))
        if c.draft_vocab_size in (None, c.vocab_size):
            return Candidates(None, logits)
        return Candidates(jnp.arange(c.draft_vocab_size) + self.d2t, logits)


def with_context_kernel(drafter: Drafter, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with the leaf that makes the context of all layers in one GEMM.

    It repeats weights (L·2·K·H·D of them), so it is made only for decoding, and never stored.
    """
    kernel, bias = _context_weights(drafter, params)
    extra = {"context_kernel": kernel} | ({} if bias is None else {"context_bias": bias})
    return {**params, **extra}


@functools.partial(jax.jit, static_argnums=0)  # an engine may get new weights again and again
def _context_weights(drafter: Drafter, params: dict[str, Any]) -> Any:
    return drafter.apply({"params": params}, method="context_weights")


def context_leaves(config: DrafterConfig) -> dict[str, Leaf]:
    """What with_context_kernel adds."""
    columns = sum(mixer.kv_width for mixer in config.mixers)
    biases = sum(mixer.kv_width for mixer in config.mixers if mixer.qkv_bias)
    whole = sum(mixer.whole.kv_width for mixer in config.mixers)
    runs = [mixer.num_kv_heads * mixer.head_dim for mixer in config.mixers for _ in range(2)]
    kernel = Leaf(
        (config.hidden_size, columns), ("embed", "context"), whole=whole, runs=tuple(runs)
    )
    bias = {"context_bias": Leaf((biases,), ("context",))} if biases else {}
    return {"context_kernel": kernel, **bias}
