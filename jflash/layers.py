"""RMSNorm, attention and MLP of a decoder layer: the one door to pallas_kernels.

A layer knows no cache layout: it hands its projection, with what it takes to make heads of it, and
its cache to an `attend`, which writes, attends and returns the cache. `BlockAttend` serves the
speculative step, `PrefillAttend` a prompt's chunk, `MaskAttend` training.
Axes: B batch, T tokens, D width, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jflash.cache import Cache, one_sequence, write_chunk
from jflash.config import DecoderConfig, MoeConfig, Sight
from jflash.experts import Experts
from jflash.kernels import XLA, Kernels
from jflash.rope import rope_angles
from pallas_kernels import heads_to_cache as heads_op
from pallas_kernels.block_attention import block_attention
from pallas_kernels.matmul import gate_up, matmul, partial_products, silu_times
from pallas_kernels.matmul import head_argmax as head_argmax  # for the models: layers is the door
from pallas_kernels.matmul import head_logits as head_logits
from pallas_kernels.rms_norm import rms_norm


class Projected(NamedTuple):
    """A fused projection, in P pieces, and what makes normed, rotated heads of its columns."""

    x: Float[Array, "P B R C"]  # R ≥ T rows
    q_scale: Float[Array, " H"] | None
    k_scale: Float[Array, " H"] | None
    cos: Float[Array, "B T H/2"]
    sin: Float[Array, "B T H/2"]
    heads: heads_op.Heads

    def split(self, backend: str = "xla") -> tuple[Array, Array, Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H], of a projection in one piece."""
        if len(self.x) > 1:
            raise ValueError(f"{len(self.x)} pieces of a projection: only `write` adds them up")
        return heads_op.split_heads(self.x[0], *self[1:5], heads=self.heads, backend=backend)

    def write[C: Cache](
        self, cache: C, slots: Int[Array, "B T"], backend: str
    ) -> tuple[Float[Array, "B T N H"], C]:
        """The queries, and the cache with the keys and values at `slots`; see the op's contract."""
        q, k, v = heads_op.heads_to_cache(
            *self[:5], cache.k, cache.v, slots,
            heads=self.heads, backend=backend, rising=not cache.wraps,
        )  # fmt: skip
        return q, cache._replace(k=k, v=v)


Attend = Callable[[Projected, Cache | None], tuple[Array, Cache | None]]


@runtime_checkable
class DrafterAttend(Protocol):
    """An Attend that can be told what the rows of each layer see."""

    def seeing(self, sight: Sight) -> Attend: ...
    def __call__(self, projected: Projected, cache: Cache | None) -> tuple[Array, Cache | None]: ...


class BlockAttend(NamedTuple):
    """A block of T tokens at slots lengths[b] … of each sequence; see pallas_kernels' contract."""

    lengths: Int[Array, " B"]
    widths: Int[Array, " B"]
    causal: bool
    kernels: Kernels
    window: int | None = None

    def seeing(self, sight: Sight) -> "BlockAttend":
        return self._replace(causal=sight.causal, window=sight.window)

    def __call__(self, projected, cache):
        slots = cache.slots(self.lengths[:, None] + jnp.arange(projected.cos.shape[1]))
        q, cache = projected.write(cache, slots, self.kernels.heads)
        out = block_attention(
            q, cache.k, cache.v, self.lengths, self.widths,
            causal=self.causal, scale=q.shape[-1] ** -0.5, backend=self.kernels.attention,
            window=self.window, ring=cache.wraps,
        )  # fmt: skip
        return out, cache


class PrefillAttend(NamedTuple):
    """One chunk [1, C] of the prompt of sequence `slot`, at positions offset …."""

    slot: Int[Array, ""]
    offset: Int[Array, ""]
    kernels: Kernels = XLA

    def __call__(self, projected, cache):
        q, k, v = projected.split(self.kernels.heads)
        cache = write_chunk(cache, k, v, self.slot, self.offset)
        own = one_sequence(cache, self.slot)
        # A chunk is a causal block that fills its width.
        out = block_attention(
            q, own.k, own.v, self.offset[None], jnp.full(1, q.shape[1]),
            causal=True, scale=q.shape[-1] ** -0.5, backend=self.kernels.attention,
        )  # fmt: skip
        return out, cache


class MaskAttend(NamedTuple):
    """Whole sequences without a cache, by an explicit mask; differentiable, for training.

    `implementation` is one of jax.nn.dot_product_attention's.
    """

    mask: Bool[Array, "B 1 T S"]
    implementation: Literal["xla", "cudnn"] = "xla"

    def seeing(self, sight: Sight) -> "MaskAttend":
        return self  # the mask says it all

    def __call__(self, projected, cache):
        out = jax.nn.dot_product_attention(
            *projected.split(), mask=self.mask, implementation=self.implementation
        )
        return out, cache


class RMSNorm(nn.Module):
    """x / rms(x) in float32, back to x's dtype, then times scale: transformers' order."""

    features: int
    eps: float

    def setup(self) -> None:
        self.scale = self.param("scale", nn.initializers.ones, (self.features,))

    def __call__(self, x: Float[Array, "*lead D"], backend: str = "xla") -> Float[Array, "*lead D"]:
        return rms_norm(x, self.scale, self.eps, backend=backend)


class Projection(nn.Module):
    """x @ kernel [in, out] (+ bias); in float32 it is exact float32 on GPUs too (no TF32)."""

    inputs: int
    features: int
    use_bias: bool = False

    def setup(self) -> None:
        init = nn.initializers.normal(0.02)
        self.kernel = self.param("kernel", init, (self.inputs, self.features))
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.features,))

    def __call__(
        self,
        x: Float[Array, "B T _"],
        backend: str = "xla",
        residual: Float[Array, "B T _"] | None = None,
    ) -> Float[Array, "B T _"]:
        """The product, on top of `residual` if given."""
        lead = x.shape[:-1]
        flat = x.reshape(-1, self.inputs)
        if self.use_bias:
            out = matmul(flat, self.kernel, backend=backend) + self.bias
            out = out.reshape(*lead, -1)
            return out if residual is None else residual + out
        if residual is not None:
            residual = residual.reshape(-1, self.features)
        return matmul(flat, self.kernel, residual, backend=backend).reshape(*lead, -1)

    def pieces(self, x: Float[Array, "B T _"], backend: str) -> Float[Array, "P B R _"]:
        """The product in the pieces that the backend adds up to it; with a bias in one.

        A single row may come back as several, of which the first counts.
        """
        if self.use_bias:
            return self(x, backend)[None]
        flat = partial_products(x.reshape(-1, self.inputs), self.kernel, backend=backend)
        rows = flat.shape[1] // x.shape[0]
        return flat.reshape(-1, x.shape[0], rows, self.features)


class Attention(nn.Module):
    """Grouped-query attention with optional q/k norm and biases; q, k and v are one kernel."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = Projection(c.hidden_size, width, c.qkv_bias)
        self.out = Projection(c.num_heads * c.head_dim, c.hidden_size, c.out_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(
        self, x: Float[Array, "B T C"], positions: Int[Array, "B T"], first: int
    ) -> Projected:
        """Keys and values alone, which lie in x's columns from `first` on, as a projection."""
        c = self.config
        heads = heads_op.Heads(0, c.num_kv_heads, c.head_dim, c.rms_norm_eps, first)
        scale = self.k_norm.scale if c.qk_norm else None
        return Projected(x[None], None, scale, *rope_angles(positions, c.rope, c.head_dim), heads)

    def context_kernel(self) -> tuple[Float[Array, "D C"], Float[Array, " C"] | None]:
        """The columns of keys and values of the fused kernel, and of its bias."""
        first = self.config.num_heads * self.config.head_dim
        return self.qkv.kernel[:, first:], self.qkv.bias[first:] if self.qkv.use_bias else None

    def __call__(self, x, positions, cache, attend: Attend, residual, kernels: Kernels):
        c = self.config
        heads = heads_op.Heads(c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps)
        scales = (self.q_norm.scale, self.k_norm.scale) if c.qk_norm else (None, None)
        angles = rope_angles(positions, c.rope, c.head_dim)
        projected = Projected(self.qkv.pieces(x, kernels.matmul), *scales, *angles, heads)
        out, cache = attend(projected, cache)
        return self.out(out.reshape(*out.shape[:2], -1), kernels.matmul, residual), cache


class MLP(nn.Module):
    """SwiGLU; gate and up are one kernel."""

    config: DecoderConfig

    def setup(self) -> None:
        c = self.config
        self.gate_up = Projection(c.hidden_size, 2 * c.intermediate_size, c.mlp_bias)
        self.down = Projection(c.intermediate_size, c.hidden_size, c.mlp_bias)

    def __call__(self, x, residual, kernels: Kernels) -> Float[Array, "B T D"]:
        if self.config.mlp_bias:
            gate, up = jnp.split(self.gate_up(x, kernels.matmul), 2, axis=-1)
            inner = silu_times(gate, up, backend=kernels.matmul)
        else:
            flat = x.reshape(-1, x.shape[-1])
            inner = gate_up(flat, self.gate_up.kernel, backend=kernels.matmul)
            inner = inner.reshape(*x.shape[:-1], -1)
        return self.down(inner, kernels.matmul, residual)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, or the experts of `moe`, each with its residual."""

    config: DecoderConfig
    moe: MoeConfig | None = None

    def setup(self) -> None:
        c = self.config
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(c)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c) if self.moe is None else Experts(c.hidden_size, self.moe)

    def keys_values(self, x, positions, first):
        """Keys and values of context features: no input norm, no residual."""
        return self.attention.keys_values(x, positions, first)

    def __call__(self, x, positions, cache, attend: Attend, kernels: Kernels):
        x, cache = self.attention(
            self.input_norm(x, kernels.norm), positions, cache, attend, x, kernels
        )
        return self.mlp(self.post_norm(x, kernels.norm), x, kernels), cache
