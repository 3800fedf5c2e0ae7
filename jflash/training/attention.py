"""Attention in training: whole rows, and a drafter's blocks against the row that holds them.

Nothing is cached and everything is differentiable. Backend 'xla' writes the scores to memory;
'cudnn' is NVIDIA's fused attention (bfloat16, a GPU), several times faster on long rows.
Axes besides the package's: A anchors of a row, T the row's tokens, all keys before a block.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jflash.layers.passes import Rows, check_trains
from jflash.records.config import DecoderConfig
from jflash.records.kernels import XLA, Kernels
from jflash.records.specs import AttentionSpec
from jflash.training.data import Rows as PackedRows

Backend = Literal["xla", "cudnn"]
BACKENDS = ("xla", "cudnn")
QUERIES = 256  # rows of blocks that share a copy of the context: more make fewer copies


class BlocksAttend(NamedTuple):
    """A row's blocks [B, A·W] attend to its context, which the cache carries, and to themselves.

    The keys of the blocks are not concatenated: each anchor has T + W keys, not T + A·W.
    """

    context: Bool[Array, "B A T"]  # which context rows the block of an anchor sees at most
    anchors: Int[Array, "B A"]
    kernels: Kernels = XLA

    def _masks(
        self, spec: AttentionSpec, W: int
    ) -> tuple[Bool[Array, "B 1 1 A _ T"], Bool[Array, "W W"]]:
        """Which context rows, and which rows of its block, each row of a block sees."""
        context, row = self.context[:, :, None], jnp.arange(W)
        if spec.window is not None:
            key = jnp.arange(context.shape[-1])
            context &= within(spec, self.anchors[:, :, None] + row, key)
        return context[:, None, None], within(spec, row, row)

    def attend(self, spec, projected, cache, sinks=None):
        check_trains(spec)
        assert sinks is None, "drafters have none"
        q, k, v = projected.split()
        B, A, _ = self.context.shape
        N, H = q.shape[2:]
        K = k.shape[2]
        q = q.reshape(B, A, -1, K, N // K, H)
        k, v = (x.reshape(B, A, -1, K, H) for x in (k, v))
        f32 = jnp.float32
        past = jnp.einsum("BAWKGH,BTKH->BKGAWT", q, cache.k, preferred_element_type=f32)
        block = jnp.einsum("BAWKGH,BAUKH->BKGAWU", q, k, preferred_element_type=f32)
        past_mask, block_mask = self._masks(spec, q.shape[2])
        past = jnp.where(past_mask, past, -jnp.inf)
        if spec.causal or spec.window is not None:
            block = jnp.where(block_mask, block, -jnp.inf)
        scores = jnp.concatenate([past, block], axis=-1) * spec.scale
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        past, block = jnp.split(weights, [past.shape[-1]], axis=-1)
        out = jnp.einsum("BKGAWT,BTKH->BAWKGH", past, cache.v)
        out += jnp.einsum("BKGAWU,BAUKH->BAWKGH", block, v)
        return out.reshape(B, -1, N, H), cache


class GroupedBlocksAttend(NamedTuple):
    """The same for a fused backend: g blocks are one batch entry, with a copy of the context.

    A query of a group has T + g·W keys; the mask leaves the context and the query's block.
    """

    mask: Bool[Array, "C 1 Q S"]  # C = B·A/g groups, Q = g·W queries, S = T + g·W keys
    implementation: Backend
    places: Int[Array, "C Q"]  # of the queries
    kernels: Kernels = XLA

    def _mask(self, spec: AttentionSpec) -> Bool[Array, "C 1 Q S"]:
        if not (spec.causal or spec.window is not None):
            return self.mask
        context = jnp.arange(self.mask.shape[-1] - self.places.shape[1])
        context = jnp.broadcast_to(context, (len(self.places), len(context)))
        keys = jnp.concatenate([context, self.places], axis=1)
        return self.mask & within(spec, self.places, keys)[:, None]

    def attend(self, spec, projected, cache, sinks=None):
        check_trains(spec)
        assert sinks is None, "drafters have none"
        q, k, v = projected.split()
        B, _, N, H = q.shape
        C, _, Q, _ = self.mask.shape

        def keys(context, block):
            K = block.shape[2]
            copies = jnp.broadcast_to(context[:, None], (B, C // B, *context.shape[1:]))
            copies = copies.reshape(C, -1, K, H)
            return jnp.concatenate([copies, block.reshape(C, Q, K, H)], axis=1)

        out = jax.nn.dot_product_attention(
            q.reshape(C, Q, N, H), keys(cache.k, k), keys(cache.v, v), mask=self._mask(spec),
            scale=spec.scale, implementation=self.implementation,
        )  # fmt: skip
        return out.reshape(B, -1, N, H), cache


def causal_attend(rows: PackedRows, backend: Backend = "xla") -> Rows:
    """Every token sees itself and the earlier tokens of its conversation.

    Padding counts as one more conversation (segment 0), so no row of scores is empty.
    """
    T = rows.tokens.shape[1]
    same = rows.segments[:, :, None] == rows.segments[:, None, :]
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)
    return Rows((same & causal)[:, None], backend)


def within(
    spec: AttentionSpec, query: Int[Array, "*lead Q"], key: Int[Array, "*_ S"]
) -> Bool[Array, "*lead Q S"]:
    """The keys that a layer's window and causality leave to each query, given places in a row."""
    ahead = key[..., None, :] - query[..., :, None]
    seen = (ahead <= 0) if spec.causal else jnp.ones_like(ahead, bool)
    return seen if spec.window is None else seen & (jnp.abs(ahead) < spec.window)


def blocks_attend(
    context: Bool[Array, "B A T"], anchors: Int[Array, "B A"], block_size: int, backend: Backend
) -> BlocksAttend | GroupedBlocksAttend:
    """Each row sees its block and its anchor's context, restricted by the layer's window and
    causality."""
    if backend == "xla":
        return BlocksAttend(context, anchors)
    return grouped(context, anchors, block_size, backend)


def grouped(
    context: Bool[Array, "B A T"], anchors: Int[Array, "B A"], block_size: int, backend: Backend
) -> GroupedBlocksAttend:
    """`blocks_attend` by jax.nn.dot_product_attention, whose implementation is `backend`."""
    B, A, T = context.shape
    g = max(n for n in range(1, A + 1) if A % n == 0 and (n == 1 or n * block_size <= QUERIES))
    past = jnp.repeat(context.reshape(B * A // g, g, T), block_size, axis=1)
    block = jnp.arange(g * block_size) // block_size
    same = jnp.broadcast_to(block[:, None] == block, (len(past), len(block), len(block)))
    places = (anchors[:, :, None] + jnp.arange(block_size)).reshape(len(past), len(block))
    mask = jnp.concatenate([past, same], axis=-1)[:, None]
    return GroupedBlocksAttend(mask, backend, places)


def training_backend(
    name: str | None, configs: Sequence[DecoderConfig], dtype: str, platform: str
) -> Backend:
    """The named backend, or the fastest that runs: cuDNN where it can, else XLA.

    ValueError for a name of none, and with the reason for one that cannot run here.
    """
    if name not in (None, *BACKENDS):
        raise ValueError(f"attention of a training is one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "xla":
        return "xla"
    refusal = _cudnn_refusal(configs, dtype, platform)
    if refusal and name == "cudnn":
        raise ValueError(f"cudnn attention {refusal}: take xla")
    return "xla" if refusal else "cudnn"


def _cudnn_refusal(configs: Sequence[DecoderConfig], dtype: str, platform: str) -> str | None:
    if platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, the device is a {platform}"
    if dtype != "bfloat16":
        return f"needs bfloat16, the training runs in {dtype}"
    heads = {mixer.head_dim for config in configs for mixer in config.mixers}
    if any(head % 8 or head > 128 for head in heads):
        return f"takes heads of at most 128 and a multiple of 8, got {sorted(heads)}"
    return None
