"""Where a leaf differs from its tensors: the order of its columns, and a constant to add.

Some files hold fused rows by head, where a leaf has them by kind. The rotated dims of a head are
permuted, so that RoPE rotates dim i with dim i + H/2; queries and keys are permuted alike, so the
scores stay. Norms of 1 + w get their 1. This file knows configs and leaves, and no files.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jflash.io.names import Names, in_layer
from jflash.models.params import leaf_paths
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import AttentionSpec


class Arrangement(NamedTuple):
    """Column i of a leaf is row `order[i]` of its tensors, plus `shift`."""

    order: Int[np.ndarray, " C"] | None
    shift: float

    def of(self, leaf: Array) -> Array:
        """The leaf, made from its tensors side by side."""
        if self.order is not None:
            leaf = jnp.take(leaf, jnp.asarray(self.order), axis=-1)
        return jax.block_until_ready(leaf + self.shift if self.shift else leaf)


def arrangements(config: TargetConfig | DrafterConfig, names: Names) -> dict[str, Arrangement]:
    """The arrangement of each leaf that differs from its tensors, by path."""
    arranged = {}
    for path, leaf in leaf_paths(config).items():
        i, name = in_layer(path)
        mixer = None if i is None else config.layers[i].mixer
        order = _attention(mixer, name) if isinstance(mixer, AttentionSpec) else None
        if i is not None and name in names.orders:
            order = names.orders[name](config.layers[i])
        shifted = leaf.dtype and path.endswith("/scale") and path not in names.whole
        shift = config.norm_shift if shifted and isinstance(config, TargetConfig) else 0.0
        if order is not None or shift:
            arranged[path] = Arrangement(order, shift)
    return arranged


def _attention(mixer: AttentionSpec, leaf: str) -> Int[np.ndarray, " C"] | None:
    turned = _turned(mixer)
    if turned is None and not mixer.gated:
        return None
    H, N, K = mixer.head_dim, mixer.num_heads, mixer.num_kv_heads
    dims = np.arange(H) if turned is None else turned
    if leaf in ("attention/q_norm/scale", "attention/k_norm/scale"):
        if turned is None or not mixer.norm_all_heads:
            return turned
        heads = N if leaf == "attention/q_norm/scale" else K
        return (np.arange(heads)[:, None] * H + turned).reshape(-1)
    if leaf not in ("attention/qkv/kernel", "attention/qkv/bias"):
        return None
    step = (1 + mixer.gated) * H  # a head's rows of q_proj: its queries, then its gate
    heads, first = np.arange(N)[:, None] * step, N * step
    parts = [heads + dims, first + np.arange(K)[:, None] * H + dims]
    parts.append(first + K * H + np.arange(K * H))
    if mixer.gated:
        parts.append(heads + H + np.arange(H))
    return np.concatenate([part.reshape(-1) for part in parts])


def _turned(mixer: AttentionSpec) -> Int[np.ndarray, " H"] | None:
    """The file's dim at each place of a head; None if RoPE rotates all dims or none."""
    rotary = mixer.rope.rotary_dim if mixer.rope else None
    H = mixer.head_dim
    in_pairs = mixer.rope is not None and mixer.rope.in_pairs
    if rotary in (None, H) and not in_pairs:
        return None
    rotary = rotary or H
    half = rotary // 2
    turning = np.arange(rotary)
    first, second = (turning[::2], turning[1::2]) if in_pairs else (turning[:half], turning[half:])
    dims = np.full(H, -1)
    dims[:half], dims[H // 2 : H // 2 + half] = first, second
    dims[dims < 0] = np.arange(rotary, H)
    return dims
