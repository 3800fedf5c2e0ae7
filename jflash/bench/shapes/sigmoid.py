"""Published sizes of MiniMax-M2 and GLM-4, whose experts are chosen by sigmoids.

Several GPUs hold them. Their drafters' files could not be opened, or there is none.
"""

from dataclasses import replace
from typing import Any

from jflash.bench.shapes.parts import ModelShape, drafter_of, trunk_sizes
from jflash.records.config import TargetConfig
from jflash.records.specs import MoeSpec, RopeConfig


def minimax_m2() -> ModelShape:
    """MiniMax-M2, M2.5 and M2.7. Of the drafter only the taps are stated; its layers are Qwen3's,
    three times as wide as the target."""
    rope = RopeConfig(theta=5e6, scaling=None, rotary_dim=64)
    shared: Any = dict(vocab_size=200064, max_position_embeddings=196608)
    trunk = trunk_sizes(3072, 1536, 48, 8, rope=rope, **shared)
    target = TargetConfig.alike(
        **trunk, num_layers=62, tie_embeddings=False, norm_all_heads=True
    )  # fmt: skip
    moe = MoeSpec(
        num_experts=256, experts_per_token=8, intermediate_size=1536, renormalise=True,
        scores="sigmoid",
    )  # fmt: skip
    trunk = trunk_sizes(3072, 9216, 32, 8, rope=replace(rope, rotary_dim=None), **shared)
    drafter = drafter_of(trunk, 5, 16, 200063, (1, 13, 24, 36, 47, 59), 62)
    return ModelShape(target.with_experts(moe, range(62)), drafter)


def _glm_4(layers: int, hidden: int, ffn: int, dense: int, moe: MoeSpec, **other: Any):
    """A GLM-4 whose first `dense` layers have an MLP, and a drafter of Qwen3's layers for it."""
    rope = RopeConfig(theta=1e6, scaling=None, rotary_dim=64)
    shared: Any = dict(vocab_size=151552, rms_norm_eps=1e-5) | other
    trunk = trunk_sizes(hidden, ffn, 96, 8, rope=rope, **shared)
    target = TargetConfig.alike(
        **trunk, num_layers=layers, tie_embeddings=False, qkv_bias=True
    )  # fmt: skip
    small = trunk_sizes(hidden, ffn, 32, 8, **shared | dict(qk_norm=True))
    taps = tuple(round(1 + i * (layers - 4) / 4) for i in range(5))  # where a file gives none
    drafter = drafter_of(small, 5, 16, 151551, taps, layers)
    return ModelShape(target.with_experts(moe, range(dense, layers)), drafter)


def _glm_experts(experts: int, size: int, scale: float) -> MoeSpec:
    """Of which 8 a token, beside one for all."""
    return MoeSpec(
        num_experts=experts, experts_per_token=8, intermediate_size=size, renormalise=True,
        shared_size=size, shared_gated=False, scores="sigmoid", scale=scale,
    )  # fmt: skip


def glm_4_5_air() -> ModelShape:
    """GLM-4.5-Air, 106B-A12B. No drafter is published by DFlash's authors."""
    other = dict(qk_norm=False, max_position_embeddings=131072)
    return _glm_4(46, 4096, 10944, 1, _glm_experts(128, 1408, 1.0), **other)


def glm_4_6() -> ModelShape:
    """GLM-4.6 and 4.7, 355B-A32B. No drafter is published by DFlash's authors."""
    other = dict(max_position_embeddings=202752)
    return _glm_4(92, 5120, 12288, 3, _glm_experts(160, 1536, 2.5), **other)
