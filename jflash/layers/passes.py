"""The passes that layers work on: a step's block, a prompt's chunk, rows of training.

A layer hands a pass its spec, its fused projection (with head norms and RoPE angles) and its cache;
the pass writes the rows, masks, attends and returns the cache.
Axes: B batch, T tokens, N query heads, K KV heads, H head dim.
"""

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jflash.layers.cache import Cache, PagedCache, one_sequence, write_chunk, write_context
from jflash.records.kernels import XLA, Kernels
from jflash.records.specs import AttentionSpec
from pallas_kernels import heads_to_cache as heads_op
from pallas_kernels.block_attention import block_attention


class Projected(NamedTuple):
    """A fused projection in P pieces, and the norms and angles that turn its columns into heads."""

    x: Float[Array, "P B T C"]
    q_scale: Float[Array, " H"] | None
    k_scale: Float[Array, " H"] | None
    cos: Float[Array, "B T H/2"]
    sin: Float[Array, "B T H/2"]
    heads: heads_op.Heads

    def split(
        self, backend: str = "xla", dtype: DTypeLike | None = None
    ) -> tuple[Array, Array, Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H]; pieces are rounded to `dtype`."""
        return heads_op.split_heads(
            *self[:5], heads=self.heads, dtype=dtype or self.x.dtype, backend=backend
        )

    def columns(self, first: int, count: int, dtype: DTypeLike) -> Float[Array, "B T _"]:
        """Some columns as they are, rounded to `dtype`."""
        pieces = self.x[..., first : first + count]
        return pieces[0] if len(pieces) == 1 else jnp.sum(pieces, axis=0).astype(dtype)

    def write[C: Cache](
        self, cache: C, slots: Int[Array, "B T"], backend: str
    ) -> tuple[Float[Array, "B T N H"], C]:
        """The queries, and the cache with the keys and values at `slots`; see the op's contract."""
        if isinstance(cache, PagedCache):
            return self.write_flat(cache, slots, backend)
        q, k, v = heads_op.heads_to_cache(
            *self[:5], cache.k, cache.v, slots,
            heads=self.heads, backend=backend, rising=not cache.wraps,
        )  # fmt: skip
        return q, cache._replace(k=k, v=v)

    def write_flat[C: Cache](
        self, cache: C, places: Int[Array, "B T"], backend: str
    ) -> tuple[Float[Array, "B T N H"], C]:
        """`write` with the pools or the sequences as one long cache that all sequences share.

        B is any number; places past the end are dropped.
        """
        k, v = (pool.reshape(1, -1, *pool.shape[2:]) for pool in (cache.k, cache.v))
        q, k, v = heads_op.heads_to_cache(
            *self[:5], k, v, places, heads=self.heads, backend=backend, rising=False
        )
        pools = {"k": k.reshape(cache.k.shape), "v": v.reshape(cache.v.shape)}
        return q, cache._replace(**pools)


@runtime_checkable
class Pass(Protocol):
    """The input of one call of a model besides its tokens: layers attend through it.

    A recurrent layer reads the pass itself: some rows of a `Block` may be rolled back, and rows of
    a `Chunk` past `length` are padding.
    """

    @property
    def kernels(self) -> Kernels: ...

    def attend(
        self,
        spec: AttentionSpec,
        projected: Projected,
        cache: Any,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """Attention of the projected rows, and the cache with their keys and values."""
        ...


class Block(NamedTuple):
    """A block of T tokens at slots lengths[b] … of each sequence; see pallas_kernels' contract."""

    lengths: Int[Array, " B"]
    widths: Int[Array, " B"]
    kernels: Kernels
    unread: Bool[Array, " B"] | None = None  # nobody reads their rows: these see only their block

    def attend(self, spec, projected, cache, sinks=None):
        slots = cache.slots(self.lengths[:, None] + jnp.arange(projected.cos.shape[1]))
        q, cache = projected.write(cache, slots, self.kernels.heads)
        return self.seen(spec, q, cache, sinks), cache

    def seen(
        self,
        spec: AttentionSpec,
        q: Float[Array, "B T N H"],
        cache: Cache,
        sinks: Float[Array, " N"] | None,
    ) -> Float[Array, "B T N H"]:
        """Attention to a cache that holds the block's keys and values already."""
        lengths = self.lengths
        if self.unread is not None:  # a long cache would keep the other sequences waiting
            lengths = jnp.where(self.unread, 0, lengths)
        return block_attention(
            q, cache.k, cache.v, lengths, self.widths,
            causal=spec.causal, scale=spec.scale, backend=self.kernels.attention,
            window=spec.window, sinks=sinks, softcap=spec.softcap, ring=cache.wraps,
            table=cache.table,
        )  # fmt: skip


class Chunk(NamedTuple):
    """One chunk [1, C], at positions offset …, of the `length` prompt tokens of sequence `slot`."""

    slot: Int[Array, ""]
    offset: Int[Array, ""]
    length: Int[Array, ""]
    kernels: Kernels

    def attend(self, spec, projected, cache, sinks=None):
        if isinstance(cache, PagedCache):
            one = one_sequence(cache, self.slot)
            out, one = self.chunks.attend(spec, projected, one, sinks)
            return out, one._replace(table=cache.table)
        q, k, v = projected.split(self.kernels.heads, cache.k.dtype)
        cache = write_chunk(cache, k, v, self.slot, self.offset)
        one = one_sequence(cache, self.slot)
        # A chunk is a causal block that fills its width.
        out = block_attention(
            q, one.k, one.v, self.offset[None], jnp.full(1, q.shape[1]),
            causal=spec.causal, scale=spec.scale, backend=self.kernels.attention,
            window=spec.window, sinks=sinks, softcap=spec.softcap, ring=cache.wraps,
            table=one.table,
        )  # fmt: skip
        return out, cache

    def write[C: Cache](self, projected: Projected, cache: C) -> C:
        """The cache with keys and values that this pass does not attend to: a drafter's context."""
        if isinstance(cache, PagedCache):
            one = self.chunks.write(projected, one_sequence(cache, self.slot))
            return one._replace(table=cache.table)
        _, k, v = projected.split(self.kernels.heads)
        return write_context(cache, k, v, self.slot, self.offset, self.length)

    @property
    def chunks(self) -> "Chunks":
        """This pass as one of several; where layers have pages it is one row of them."""
        return Chunks(self.slot[None], self.offset[None], self.length[None], self.kernels)


class Chunks(NamedTuple):
    """A chunk of each of P prompts [P, C], of sequences `slots`: at positions `offsets` … of their
    `lengths` tokens.

    All layers that attend have pages: padding past a prompt's pages is dropped, and later rows
    overwrite the rest.
    """

    slots: Int[Array, " P"]
    offsets: Int[Array, " P"]
    lengths: Int[Array, " P"]
    kernels: Kernels

    @property
    def chunks(self) -> "Chunks":
        return self

    def attend(self, spec, projected, cache, sinks=None):
        # Each is a causal block that fills its width.
        widths = jnp.full_like(self.offsets, projected.cos.shape[1])
        return Block(self.offsets, widths, self.kernels).attend(spec, projected, cache, sinks)

    def write[C: Cache](self, projected: Projected, cache: C) -> C:
        """As `Chunk.write`."""
        slots = cache.slots(self.offsets[:, None] + jnp.arange(projected.cos.shape[1]))
        return projected.write(cache, slots, self.kernels.heads)[1]


class Rows(NamedTuple):
    """Whole sequences without a cache, by an explicit mask; differentiable, for training.

    `implementation` is one of jax.nn.dot_product_attention's. Key s and query s are the same token.
    """

    mask: Bool[Array, "B 1 T S"]
    implementation: Literal["xla", "cudnn"] = "xla"
    kernels: Kernels = XLA

    def attend(self, spec, projected, cache, sinks=None):
        mask = self.mask
        if spec.window is not None:
            ahead = jnp.arange(mask.shape[3]) - jnp.arange(mask.shape[2])[:, None]
            mask &= jnp.abs(ahead) < spec.window
        check_trains(spec)
        if sinks is not None:
            q, k, v = projected.split()
            return _attention_with_sinks(q, k, v, sinks, mask, spec.scale), cache
        out = jax.nn.dot_product_attention(
            *projected.split(), mask=mask, scale=spec.scale, implementation=self.implementation
        )
        return out, cache


def _attention_with_sinks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    sinks: Float[Array, " N"],
    mask: Bool[Array, "B 1 T S"],
    scale: float,
) -> Float[Array, "B T N H"]:
    """jax.nn.dot_product_attention with one more logit a head, which has no value."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    f32 = jnp.float32
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=f32) * scale
    scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    sink = sinks.astype(f32).reshape(1, k.shape[2], -1, 1, 1)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :-1].astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(q.shape)


def check_trains(spec: AttentionSpec) -> None:
    """ValueError for features that only the step's kernels have."""
    if spec.softcap is not None:
        raise ValueError(f"no training has a soft cap of scores yet, here {spec.softcap}")
