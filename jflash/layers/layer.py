"""Attention and MLP of a decoder layer, and the layer.

A layer knows no mask and no cache layout: it hands its spec, its fused projection and its cache to
the pass, which attends (see `jflash/layers/passes.py`).
Axes: B batch, T tokens, D width, N query heads, K KV heads, H head dim.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, DTypeLike, Float, Int

from jflash.layers.cache import LayerState, empty_cache
from jflash.layers.experts import Experts
from jflash.layers.gather import gated_product
from jflash.layers.newest import rows_read
from jflash.layers.passes import Pass, Projected
from jflash.layers.projections import Projection, RMSNorm, output
from jflash.layers.rope import rope_angles
from jflash.layers.sums import Sums, summed
from jflash.records.kernels import Kernels
from jflash.records.leaves import Leaf, SideBySide, declare, gate_up_leaf
from jflash.records.specs import AttentionSpec, DenseSpec, LayerConfig, MoeSpec
from pallas_kernels import heads_to_cache as heads_op
from pallas_kernels.matmul import (
    Unsummed,
    gate_up,
    gelu_times,
    sigmoid_times,
    silu_times,
)

TIMES = {"silu": silu_times, "gelu_tanh": gelu_times}  # by DenseSpec.activation


class Attention(nn.Module):
    """Grouped-query attention; q, k, v and the gate are one kernel."""

    spec: AttentionSpec
    hidden_size: int
    eps: float
    norm_dtype: str = ""

    def setup(self) -> None:
        s, width = self.spec, self.hidden_size
        N, K, H = s.num_heads, s.num_kv_heads, s.head_dim
        columns = SideBySide((N * H, K * H, *[K * H] * (not s.shared_kv), *[N * H] * s.gated))
        shape = (width, K, s.inputs_width // K)
        leaf = Leaf(shape, ("embed", "kv_heads", "qkv"), columns, whole=s.whole.inputs_width)
        self.qkv = Projection(leaf, s.qkv_bias)
        self.out = output(s, N * H, width, "heads", s.out_bias)
        if s.qk_norm and not s.weightless:
            columns, axis = ((N * H, K * H), "heads") if s.norm_all_heads else ((H, H), "head_dim")
            self.q_norm = RMSNorm(columns[0], self.eps, axis, self.norm_dtype)
            self.k_norm = RMSNorm(columns[1], self.eps, axis, self.norm_dtype)
        if s.sinks:
            self.sinks = declare(self, "sinks", Leaf((N,), ("heads",)))

    def keys_values(
        self, x: Float[Array, "B T C"], positions: Int[Array, "B T"], first: int
    ) -> Projected:
        """Keys and values without queries, from x's columns `first` …, as a projection."""
        s = self.spec
        k, v = (first + column for column in self.context_format.firsts)
        heads = heads_op.Heads(0, s.num_kv_heads, s.head_dim, self.eps, (k, k, v))
        scale, angles = self._scales()[1], rope_angles(positions, s.rope, s.head_dim)
        return Projected(x[None], None, scale, *angles, heads)

    @property
    def context_format(self) -> SideBySide:
        """How `context_kernel` holds keys and values."""
        return SideBySide((self.spec.kv_width // 2,) * 2)

    def context_kernel(self) -> tuple[Float[Array, "D C"], Float[Array, " C"] | None]:
        """The columns of keys and values of the fused kernel, and of its bias."""

        def keys_values(x):
            _, k, v, *_ = self.qkv.leaf.parts(x)
            return self.context_format.join([k, v])

        bias = keys_values(self.qkv.bias) if self.qkv.use_bias else None
        return keys_values(self.qkv.kernel), bias

    def __call__(self, x, positions, cache, over: Pass, residual):
        sums, cache = self.unsummed(x, positions, cache, over, residual)
        return summed(sums), cache

    def unsummed(self, x, positions, cache, over: Pass, residual) -> tuple[Sums, Any]:
        """The outputs added to `residual`, for a norm to add up, and the new cache."""
        s = self.spec
        q, k, *gate = self.qkv.leaf.firsts
        v = k if s.shared_kv else gate.pop(0)
        heads = heads_op.Heads(
            s.num_heads, s.num_kv_heads, s.head_dim, self.eps, (q, k, v), s.value_norm
        )
        angles = rope_angles(positions, s.rope, s.head_dim)
        projected = Projected(self._pieces(x, over.kernels), *self._scales(), *angles, heads)
        out, cache = over.attend(s, projected, cache, self.sinks if s.sinks else None)
        out = out.reshape(*out.shape[:2], -1)
        if s.gated:
            opened = rows_read(over, projected.columns(gate[0], s.out_width, out.dtype))
            out = sigmoid_times(opened, out, backend=over.kernels.matmul)
        return self.out.unsummed(out, over.kernels.matmul, residual), cache

    def _scales(self) -> tuple[Float[Array, " H"] | None, Float[Array, " H"] | None]:
        """The weights of the norms of each query and key head; None without such norms."""
        s = self.spec
        if not s.qk_norm or s.norm_all_heads:
            return None, None
        if s.weightless:
            ones = jnp.ones(s.head_dim)
            return ones, ones
        return self.q_norm.scale, self.k_norm.scale

    def _pieces(self, x: Float[Array, "B T D"], kernels: Kernels) -> Float[Array, "P B T C"]:
        """The fused projection's; one piece where all heads, of all devices, are normed at once."""
        if not self.spec.norm_all_heads:
            return self.qkv.pieces(x, kernels.matmul)
        format = self.qkv.leaf.format
        assert format is not None
        q, k, *rest = format.split(self.qkv(x, kernels.matmul))
        pairs = (self.q_norm, q), (self.k_norm, k)
        normed = [norm.over_all(x, self.spec.shards, kernels.norm) for norm, x in pairs]
        return format.join([*normed, *rest])[None]


class MLP(nn.Module):
    """A gated MLP; gate and up are one kernel."""

    spec: DenseSpec
    hidden_size: int

    def setup(self) -> None:
        s, width = self.spec, self.hidden_size
        leaf = gate_up_leaf(width, s.intermediate_size, s.shards)
        self.gate_up = Projection(leaf, s.bias)
        self.down = output(s, s.intermediate_size, width, "mlp", s.bias)

    def __call__(self, x, residual, kernels: Kernels) -> Float[Array, "B T D"]:
        return summed(self.unsummed(x, residual, kernels))

    def unsummed(self, x, residual, kernels: Kernels) -> Sums:
        """The same, for a norm to add up."""
        own = self._by_one_kernel(x, kernels)
        if own is not None:
            return self.down.gathered(own, kernels.matmul, residual)
        if self.spec.bias or self.spec.activation != "silu":
            gate, up = self.gate_up.leaf.parts(self.gate_up(x, kernels.matmul))
            inner = TIMES[self.spec.activation](gate, up, backend=kernels.matmul)
        else:
            flat = x.reshape(-1, x.shape[-1])
            both = self.gate_up
            inner = gate_up(flat, both.kernel, both.leaf.firsts, backend=kernels.matmul)
            inner = inner.reshape(*x.shape[:-1], -1)
        return self.down.unsummed(inner, kernels.matmul, residual)

    def _by_one_kernel(self, x: Float[Array, "B T D"], kernels: Kernels) -> Unsummed | None:
        """This device's columns, where devices that share the MLP have a kernel for all of it."""
        spec, both, down = self.spec, self.gate_up, self.down
        plain = spec.activation == "silu" and not spec.bias and kernels.matmul == "canonical"
        if spec.shards == 1 or down.whole or not plain:
            return None
        return gated_product(x, both.kernel, both.leaf.firsts, down.kernel, down.leaf.columns)


class DecoderLayer(nn.Module):
    """Pre-norm attention, and an MLP or experts, each with its residual.

    Layers hand on sums that the next norm makes, with what it norms: small kernels cost a launch.
    """

    config: LayerConfig
    hidden_size: int
    eps: float
    norm_dtype: str  # "": the model's

    def setup(self) -> None:
        c, width = self.config, self.hidden_size
        self.input_norm = RMSNorm(width, self.eps, dtype=self.norm_dtype)
        self.attention = self.make_mixer()
        self.post_norm = RMSNorm(width, self.eps, dtype=self.norm_dtype)
        self.mlp = Experts(width, c.mlp) if isinstance(c.mlp, MoeSpec) else MLP(c.mlp, width)

    @nn.nowrap
    def make_mixer(self) -> nn.Module:
        """The module that mixes tokens."""
        assert isinstance(self.config.mixer, AttentionSpec)
        return Attention(self.config.mixer, self.hidden_size, self.eps, self.norm_dtype)

    def empty_state(self, batch: int, capacity: int, rows: int, dtype: DTypeLike) -> LayerState:
        """The layer's state for `batch` sequences; see jflash.layers.cache's LayerState."""
        assert isinstance(self.config.mixer, AttentionSpec)
        return empty_cache(self.config.mixer, batch, capacity, rows, dtype)

    def keys_values(self, x, positions, first):
        """Keys and values of context features, without input norm and residual."""
        return self.attention.keys_values(x, positions, first)

    def __call__(
        self, given: Sums, positions, cache, over: Pass
    ) -> tuple[Float[Array, "B T D"], Sums, LayerState | None]:
        """What the layer is given, summed; its output of the rows that are read; the new cache."""
        norm = over.kernels.norm
        x, normed = self.input_norm.after(given, norm)
        residual = rows_read(over, x)
        sums, cache = self.attention.unsummed(normed, positions, cache, over, residual)
        inner, normed = self.post_norm.after(sums, norm)
        return x, self.mlp.unsummed(normed, inner, over.kernels), cache
