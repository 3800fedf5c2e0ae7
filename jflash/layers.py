"""RMSNorm, rotary embedding, attention and MLP of a decoder layer: the one door to pallas_kernels.

A layer knows no cache layout: it hands q, k, v and its cache to an `attend`, which writes, attends
and returns the cache. `BlockAttend` serves the speculative step, `PrefillAttend` a prompt's chunk,
`MaskAttend` training. Axes: B batch, T tokens, D width, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jflash.cache import LayerCache, one_sequence, write_chunk, write_rows
from jflash.config import DecoderConfig, RopeConfig
from pallas_kernels.block_attention import block_attention
from pallas_kernels.prefill_attention import prefill_attention

Attend = Callable[[Array, Array, Array, LayerCache | None], tuple[Array, LayerCache | None]]


class BlockAttend(NamedTuple):
    """A block of T tokens at slots lengths[b] … of each sequence; see pallas_kernels' contract."""

    lengths: Int[Array, " B"]
    widths: Int[Array, " B"]
    causal: bool
    backend: str

    def __call__(self, q, k, v, cache):
        slots = self.lengths[:, None] + jnp.arange(q.shape[1])
        cache = write_rows(cache, k, v, slots)
        out = block_attention(
            q, cache.k, cache.v, self.lengths, self.widths,
            causal=self.causal, scale=q.shape[-1] ** -0.5, backend=self.backend,
        )  # fmt: skip
        return out, cache


class PrefillAttend(NamedTuple):
    """One chunk [1, C] of the prompt of sequence `slot`, at positions offset …."""

    slot: Int[Array, ""]
    offset: Int[Array, ""]
    backend: str

    def __call__(self, q, k, v, cache):
        cache = write_chunk(cache, k, v, self.slot, self.offset)
        own = one_sequence(cache, self.slot)
        scale = q.shape[-1] ** -0.5
        out = prefill_attention(q, own.k, own.v, self.offset, scale=scale, backend=self.backend)
        return out, cache


class MaskAttend(NamedTuple):
    """Whole sequences without a cache, by an explicit mask; differentiable, for training."""

    mask: Bool[Array, "B 1 T S"]

    def __call__(self, q, k, v, cache):
        return jax.nn.dot_product_attention(q, k, v, mask=self.mask), cache


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies [H/2] in float32, scaled as transformers' `llama3` does."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    inverse = inverse.astype(np.float32)
    if rope.scaling is None:
        return inverse
    s = rope.scaling
    wavelength = 2 * np.pi / inverse
    # Long waves are slowed by the whole factor, short ones not at all, those between in proportion.
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    smooth = np.clip(smooth, 0, 1)
    return ((1 - smooth) * inverse / s.factor + smooth * inverse).astype(np.float32)


def apply_rope(
    x: Float[Array, "B T _ H"], positions: Int[Array, "B T"], rope: RopeConfig
) -> Float[Array, "B T _ H"]:
    """Rotates halves of each head by position, in float32 (Llama's layout: pairs i, i + H/2)."""
    angle = positions[:, :, None, None] * rope_frequencies(rope, x.shape[-1])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) in float32, back to x's dtype, then times scale: transformers' order."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return scale * normed.astype(x.dtype)


def dense(features: int, use_bias: bool = False) -> nn.Dense:
    """A projection [in, out]; in float32 it is exact float32 on GPUs too (no TF32)."""
    return nn.Dense(
        features, use_bias=use_bias, precision="highest", kernel_init=nn.initializers.normal(0.02)
    )


class Attention(nn.Module):
    """Grouped-query attention with optional q/k norm and biases.

    Targets hold q, k and v as one kernel. A drafter also projects context features to k and v
    alone, so it holds q apart (`fused=False`): slicing a kernel would copy it every step.
    """

    config: DecoderConfig
    fused: bool

    def setup(self) -> None:
        c = self.config
        q_width, kv_width = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
        if self.fused:
            self.qkv = dense(q_width + kv_width, c.qkv_bias)
        else:
            self.q = dense(q_width, c.qkv_bias)
            self.kv = dense(kv_width, c.qkv_bias)
        self.out = dense(c.hidden_size, c.out_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps)
            self.k_norm = RMSNorm(c.rms_norm_eps)

    def _queries(self, q, positions):
        c = self.config
        q = q.reshape(*q.shape[:2], c.num_heads, c.head_dim)
        return apply_rope(self.q_norm(q) if c.qk_norm else q, positions, c.rope)

    def _keys_values(self, kv, positions):
        c = self.config
        k, v = jnp.split(kv.reshape(*kv.shape[:2], 2 * c.num_kv_heads, c.head_dim), 2, axis=2)
        return apply_rope(self.k_norm(k) if c.qk_norm else k, positions, c.rope), v

    def keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Keys (normed, rotated) and values of x, for a context that has no queries."""
        return self._keys_values(self.kv(x), positions)

    def __call__(self, x, positions, cache, attend: Attend):
        if self.fused:
            q, kv = jnp.split(self.qkv(x), [self.config.num_heads * self.config.head_dim], axis=-1)
        else:
            q, kv = self.q(x), self.kv(x)
        k, v = self._keys_values(kv, positions)
        out, cache = attend(self._queries(q, positions), k, v, cache)
        return self.out(out.reshape(*out.shape[:2], -1)), cache


class MLP(nn.Module):
    """SwiGLU; gate and up are one kernel."""

    config: DecoderConfig

    def setup(self) -> None:
        self.gate_up = dense(2 * self.config.intermediate_size, self.config.mlp_bias)
        self.down = dense(self.config.hidden_size, self.config.mlp_bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    config: DecoderConfig
    fused: bool

    def setup(self) -> None:
        self.input_norm = RMSNorm(self.config.rms_norm_eps)
        self.attention = Attention(self.config, self.fused)
        self.post_norm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = MLP(self.config)

    def keys_values(self, x, positions):
        """Keys and values of context features: no input norm, no residual."""
        return self.attention.keys_values(x, positions)

    def __call__(self, x, positions, cache, attend: Attend):
        mixed, cache = self.attention(self.input_norm(x), positions, cache, attend)
        x = x + mixed
        return x + self.mlp(self.post_norm(x)), cache
