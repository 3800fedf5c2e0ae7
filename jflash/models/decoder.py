"""The decoder target: families differ only in their config, which describes each layer.

It knows nothing of drafting except taps: outputs of chosen layers, which are a drafter's features.
"""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, DTypeLike, Float, Int

from jflash.layers.cache import LayerState
from jflash.layers.delta import DeltaLayer
from jflash.layers.gather import rows_of
from jflash.layers.head import best_and_probability, head_best, head_logits
from jflash.layers.layer import DecoderLayer
from jflash.layers.passes import Pass
from jflash.layers.projections import RMSNorm
from jflash.layers.sandwich import SandwichLayer
from jflash.records.config import TargetConfig
from jflash.records.leaves import Leaf, declare
from jflash.records.specs import DeltaSpec
from pallas_kernels.fixed_order import rounded
from pallas_kernels.matmul import Unsummed
from pallas_kernels.rms_norm import rms_norm

Caches = tuple[LayerState | None, ...]


class Target(nn.Module):
    """Parameters: embedding [V, D], one subtree a layer, norm, and a head [V, D] unless tied."""

    config: TargetConfig

    def setup(self) -> None:
        c = self.config
        table = Leaf((c.vocab_size // c.shards, c.hidden_size), ("vocab", "embed"))
        self.embedding = declare(self, "embedding", table)
        self.layers = [self.make_layer(i) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=self.norm_dtype)
        if not c.tie_embeddings:
            self.head = declare(self, "head", table)

    @property
    def norm_dtype(self) -> str:
        """The dtype of the norms' weights: bfloat16 would lose bits of w in 1 + w."""
        return "float32" if self.config.norm_shift else self.config.norm_dtype

    @nn.nowrap
    def make_layer(self, i: int) -> nn.Module:
        c = self.config
        kind = DeltaLayer if isinstance(c.layers[i].mixer, DeltaSpec) else DecoderLayer
        kind = SandwichLayer if c.layers[i].sandwich else kind
        return kind(c.layers[i], c.hidden_size, c.rms_norm_eps, self.norm_dtype)

    @nn.nowrap
    def empty_states(self, batch: int, capacity: int, rows: int, dtype: DTypeLike) -> tuple:
        """The layers' states for `batch` sequences; at most `rows` tokens a pass."""
        layers = [self.make_layer(i) for i in range(self.config.num_layers)]
        return tuple(layer.empty_state(batch, capacity, rows, dtype) for layer in layers)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        caches: Caches,
        over: Pass,
        taps: tuple[int, ...] = (),
        last: Pass | None = None,
    ) -> tuple[Float[Array, "B _ D"], Float[Array, "B T PD"], Caches]:
        """Final-normed hidden states, tapped features (side by side, as `taps` orders), caches.

        Tap i is the output of layer i, counted from 0; that of the last layer is the final-normed
        state, as in transformers' `hidden_states[i + 1]`. `last` is the last layer's pass if that
        reads some of the rows alone: the hidden states are theirs, and no tap is that layer.
        """
        x = self.embed(tokens)
        if self.config.embedding_scale != 1:
            x = rounded(x * jnp.asarray(self.config.embedding_scale, x.dtype))
        if self.config.embedding_norm:
            ones = jnp.ones(x.shape[-1])
            x = rms_norm(x, ones, self.config.rms_norm_eps, backend=over.kernels.norm)
        sums, inputs, new = Unsummed(None, x), [], []
        passes = [over] * (len(self.layers) - 1) + [last or over]
        for layer, cache, through in zip(self.layers, caches, passes, strict=True):
            x, sums, cache = layer(sums, positions, cache, through)
            inputs.append(x)
            new.append(cache)
        outputs = [*inputs[1:], self.norm.after(sums, over.kernels.norm)[1]]
        features = [outputs[i] for i in taps]
        empty = jnp.zeros((*x.shape[:2], 0), x.dtype)
        return outputs[-1], jnp.concatenate([empty, *features], axis=-1), tuple(new)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the raw embedding matrix."""
        return rows_of(self.embedding, tokens, self.config.shards)

    def best(self, hidden: Float[Array, "B T D"], backend: str = "xla") -> Int[Array, "B T"]:
        """The id of the largest float32 logit, after the cap; ties go to the lowest id."""
        if self.config.logit_softcap is not None or self.config.logit_multiplier != 1:
            return jnp.argmax(self.logits(hidden, backend), axis=-1).astype(jnp.int32)
        return head_best(hidden, self._head(), backend, self.config.shards)

    def best_and_confidence(
        self, hidden: Float[Array, "B T D"], backend: str = "xla"
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
        """The id of the largest logit of the head and its probability, without writing logits."""
        return best_and_probability(hidden, self._head(), backend, self.config.shards)

    def logits(self, hidden: Float[Array, "B T D"], backend: str = "xla") -> Float[Array, "B T V"]:
        """The target's logits in float32."""
        return self.capped(self.raw_logits(hidden, backend))

    @nn.nowrap
    def capped(self, raw: Float[Array, "*lead V"]) -> Float[Array, "*lead V"]:
        """The target's logits from its head's."""
        cap, multiplier = self.config.logit_softcap, self.config.logit_multiplier
        raw = raw if multiplier == 1 else raw * multiplier
        return raw if cap is None else jnp.tanh(raw / cap) * cap

    def raw_logits(
        self, hidden: Float[Array, "B T D"], backend: str = "xla"
    ) -> Float[Array, "B T V"]:
        """The head's float32 logits, without the target's multiplier and cap: drafters differ."""
        return head_logits(hidden, self._head(), backend, self.config.shards)

    def _head(self) -> Float[Array, "V D"]:
        return self.embedding if self.config.tie_embeddings else self.head
