"""The gated delta net in place of attention (Qwen3.5, Qwen3-Next): projections, convolution, state.

It reads its pass: some rows of a `Block` may be rolled back, rows of a `Chunk` past `length` are
padding, and `Rows` are whole sequences from a state of zeros. pallas_kernels/gated_delta has the
rule itself and the rollback of a state.
Axes: B batch, T rows, D width, Hk and Hv heads, dk and dv their widths, C columns convolved.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, DTypeLike, Float

from jflash.layers.cache import DeltaCache, LayerState, empty_delta
from jflash.layers.layer import DecoderLayer
from jflash.layers.passes import Block, Chunk, Chunks, Pass, Rows
from jflash.layers.projections import Projection, RMSNorm, output
from jflash.layers.sums import Sums
from jflash.records.leaves import Leaf, SideBySide, declare
from jflash.records.specs import DeltaSpec
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

    def unsummed(
        self, x, positions, cache: DeltaCache | None, over: Pass, residual
    ) -> tuple[Sums, DeltaCache | None]:
        """As `Attention.unsummed`."""
        kernels = over.kernels
        fused = self.inputs(x, kernels.matmul)
        gate = op.Gate(fused, self.inputs.leaf.firsts[1], self.norm.scale, self.eps)
        out, cache = self._over(over, cache, gate)
        out = out.reshape(*x.shape[:2], -1)
        return self.out.unsummed(out, kernels.matmul, residual), cache

    def _over(self, over: Pass, cache: DeltaCache | None, gate: op.Gate):
        count = gate.fused.shape[1]
        match over:
            case Block():
                assert cache is not None
                # Any row of a block may be rolled back: the next block's start tells.
                real = jnp.full_like(over.lengths, count)
                nothing = jnp.zeros_like(over.lengths)
                return self._step(
                    cache, gate, op.Span(over.lengths, real, nothing, cache.slots), over
                )
            case Chunk() | Chunks():
                assert cache is not None
                slots, offsets, lengths, _ = over.chunks
                real = jnp.clip(lengths - offsets, 0, count)
                return self._step(cache, gate, op.Span(offsets, real, real, slots), over)
            case Rows():
                out = self._whole(gate.fused, over.mask)
                return op.gated_norm(out, gate, backend="reference"), cache
            case _:
                raise AssertionError(f"{type(over).__name__} has no recurrent layers")

    def _leaves(self):
        return self.conv[:, 0], self.a_log, self.dt_bias

    @property
    def _heads(self) -> op.Heads:
        return op.Heads(self.spec.num_key_heads, self.spec.key_dim)

    def _step(
        self,
        cache: DeltaCache,
        gate: op.Gate,
        span: op.Span,
        over: Pass,
    ) -> tuple[Float[Array, "B T Hv dv"], DeltaCache]:
        """Outputs of the span's rows, and the new cache; see the op's contract."""
        (raw, _, b, a), backend = self.inputs.leaf.firsts, over.kernels.delta
        how = {"heads": self._heads, "firsts": (raw, b, a), "backend": backend}
        q, rows, ring = op.next_inputs(gate.fused, cache.raw, *self._leaves(), span, **how)
        out, state = self.rule(q, rows, cache.memory, span, backend)
        memory = cache.memory._replace(state=state)
        out, memory = op.finish(out, gate, rows, memory, span, backend=backend)
        return out, DeltaCache(memory, ring, cache.slots)

    def rule(self, q, rows: op.Rows, memory: op.Memory, span: op.Span, backend: str):
        """The op's outputs, and the state that is kept."""
        return op.gated_delta(q, rows, memory, span, backend=backend)

    def _whole(self, fused, mask: Bool[Array, "B 1 T S"]) -> Float[Array, "B T Hv dv"]:
        """Whole sequences, several in a row, token by token; each begins at its first key."""
        raw, _, b, a = self.inputs.leaf.parts(fused)
        T, taps = raw.shape[1], self.spec.taps
        age = jnp.arange(T) - jnp.argmax(mask[:, 0], axis=-1)  # [B, T]
        age = jnp.broadcast_to(age, raw.shape[:2])
        windows = jnp.pad(raw, ((0, 0), (taps - 1, 0), (0, 0)))
        back = jnp.arange(taps - 1, -1, -1)
        index = jnp.arange(T)[:, None] + (taps - 1) - back
        same = jnp.where((age[:, :, None] >= back)[..., None], windows[:, index], 0)
        flat = same.reshape(-1, taps, raw.shape[-1])
        b, a = (x.reshape(-1, 1, x.shape[-1]) for x in (b, a))
        each = op.inputs(flat, b, a, *self._leaves(), heads=self._heads, backend="reference")
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
