"""The gated delta net in place of attention (Qwen3.5, Qwen3-Next): projections, convolution, state.

It reads its pass: some rows of a `Block` may be rolled back, rows of a `Chunk` past `length` are
padding, and `Rows` are whole sequences from a state of zeros. pallas_kernels/gated_delta has the
rule itself and the rollback of a state.
Axes: B batch, T rows, D width, Hk and Hv heads, dk and dv their widths, C columns convolved.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jflash.cache import DeltaCache, LayerState, empty_delta
from jflash.layers import DecoderLayer, Projection, RMSNorm, output
from jflash.leaves import Leaf, SideBySide, declare
from jflash.passes import Block, Chunk, Pass, Rows
from jflash.specs import DeltaSpec
from pallas_kernels import gated_delta as op


class DeltaNet(nn.Module):
    """Parameters: inputs [D, q k v z b a], conv [C, 1, taps], a_log and dt_bias [Hv], norm, out."""

    spec: DeltaSpec
    hidden_size: int
    eps: float

    def setup(self) -> None:
        s, width = self.spec, self.hidden_size
        heads = s.num_value_heads
        columns = SideBySide((s.mixed_width, s.out_width, heads, heads))
        shape = (width, s.num_key_heads, s.inputs_width // s.num_key_heads)
        convolved = (s.num_key_heads * s.key_dim,) * 2 + (s.out_width,)
        axes, whole = ("embed", "key_heads", "delta"), s.inputs_width * s.shards
        runs = (*convolved, s.out_width, heads, heads)
        self.inputs = Projection(Leaf(shape, axes, columns, whole=whole, runs=runs))
        conv = Leaf((s.mixed_width, 1, s.taps), ("convolved", "one", "taps"), runs=convolved)
        self.conv = declare(self, "conv", conv)
        of_heads = Leaf((heads,), ("value_heads",), dtype="float32")
        self.a_log, self.dt_bias = (declare(self, x, of_heads) for x in ("a_log", "dt_bias"))
        self.norm = RMSNorm(s.value_dim, self.eps, "value_dim")
        self.out = output(s, s.out_width, width, "value")

    def __call__(self, x, positions, cache: DeltaCache | None, over: Pass, residual):
        s, kernels = self.spec, over.kernels
        fused = self.inputs(x, kernels.matmul)
        heads = s.num_value_heads
        raw, z, b, a = self.inputs.leaf.parts(fused)
        out, cache = self._over(over, cache, raw, b, a)
        z = z.reshape(*z.shape[:2], heads, -1)
        out = op.gated_norm(out, z, self.norm.scale, self.eps, backend=kernels.delta)
        return self.out(out.reshape(*x.shape[:2], -1), kernels.matmul, residual), cache

    def _over(self, over: Pass, cache: DeltaCache | None, raw, b, a):
        match over:
            case Block():
                assert cache is not None
                # Any row of a block may be rolled back: the next block's start tells.
                real = jnp.full_like(over.lengths, raw.shape[1])
                nothing = jnp.zeros_like(over.lengths)
                return self._step(cache, raw, b, a, over.lengths, real, nothing, over)
            case Chunk():
                assert cache is not None
                one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, over.slot, 1), cache)
                real = jnp.clip(over.length - over.offset, 0, raw.shape[1])[None]
                out, one = self._step(one, raw, b, a, over.offset[None], real, real, over)
                put = jax.lax.dynamic_update_slice_in_dim
                return out, jax.tree.map(lambda all, x: put(all, x, over.slot, 0), cache, one)
            case Rows():
                return self._whole(raw, b, a, over.mask), cache
            case _:
                raise AssertionError(f"{type(over).__name__} has no recurrent layers")

    def _rows(self, raw, b, a, backend: str):
        leaves = (self.conv[:, 0], self.a_log, self.dt_bias)
        heads = op.Heads(self.spec.num_key_heads, self.spec.key_dim)
        return op.inputs(raw, b, a, *leaves, heads=heads, backend=backend)

    def _step(
        self,
        cache: DeltaCache,
        raw: Float[Array, "B T C"],
        b: Float[Array, "B T Hv"],
        a: Float[Array, "B T Hv"],
        start: Int[Array, " B"],
        real: Int[Array, " B"],
        kept: Int[Array, " B"],
        over: Pass,
    ) -> tuple[Float[Array, "B T Hv dv"], DeltaCache]:
        """Outputs of the rows from `start` on, and the new cache; see the op's contract."""
        sequence, row = jnp.arange(len(start))[:, None], jnp.arange(raw.shape[1])
        places = cache.raw.shape[1]
        before = start[:, None] + jnp.arange(1 - self.spec.taps, 0)
        tail = jnp.where((before >= 0)[:, :, None], cache.raw[sequence, before % places], 0)
        padding = (row >= real[:, None])[:, :, None]
        raw = jnp.where(padding, 0, raw)  # padding must be finite
        q, rows = self._rows(jnp.concatenate([tail, raw], axis=1), b, a, over.kernels.delta)
        out, memory = self.rule(q, rows, cache.memory, start, real, kept, over.kernels.delta)
        stays = (row < real[:, None]) & (row >= real[:, None] - places)
        at = jnp.where(stays, (start[:, None] + row) % places, places + row)
        kept_raw = cache.raw.at[sequence, at].set(raw, mode="drop", unique_indices=True)
        return out, DeltaCache(memory, kept_raw)

    def rule(self, q, rows: op.Rows, memory: op.Memory, start, real, kept, backend: str):
        """The op's outputs and memory."""
        return op.gated_delta(q, rows, memory, start, real, kept, backend=backend)

    def _whole(self, raw, b, a, mask: Bool[Array, "B 1 T S"]) -> Float[Array, "B T Hv dv"]:
        """Whole sequences, several in a row, token by token; each begins at its first key."""
        T, taps = raw.shape[1], self.spec.taps
        age = jnp.arange(T) - jnp.argmax(mask[:, 0], axis=-1)  # [B, T]
        age = jnp.broadcast_to(age, raw.shape[:2])
        windows = jnp.pad(raw, ((0, 0), (taps - 1, 0), (0, 0)))
        back = jnp.arange(taps - 1, -1, -1)
        index = jnp.arange(T)[:, None] + (taps - 1) - back
        same = jnp.where((age[:, :, None] >= back)[..., None], windows[:, index], 0)
        flat = same.reshape(-1, taps, raw.shape[-1])
        b, a = (x.reshape(-1, 1, x.shape[-1]) for x in (b, a))
        each = self._rows(flat, b, a, "reference")
        q, rows = jax.tree.map(lambda x: x.reshape(*raw.shape[:2], *x.shape[2:]), each)
        return op.recurrent(q, rows, age == 0)


class DeltaLayer(DecoderLayer):
    """A decoder layer that mixes tokens by a delta net."""

    @nn.nowrap
    def make_mixer(self) -> nn.Module:
        assert isinstance(self.config.mixer, DeltaSpec)
        return DeltaNet(self.config.mixer, self.hidden_size, self.eps)

    def empty_state(self, batch: int, capacity: int, rows: int, dtype: DTypeLike) -> LayerState:
        assert isinstance(self.config.mixer, DeltaSpec)
        return empty_delta(self.config.mixer, batch, dtype)
