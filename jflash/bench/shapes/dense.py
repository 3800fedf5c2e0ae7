"""Published sizes of Qwen2.5, Mistral and the dense GLM-4.

DFlash's authors publish no drafter for them: each has one of five layers like its own here.
"""

from typing import Any

from jflash.bench.shapes.parts import ModelShape, drafter_of, trunk_sizes
from jflash.records.config import TargetConfig
from jflash.records.specs import RopeConfig

MASK = 16  # any id serves: the step reads one row of the embedding


def _of(trunk: Any, layers: int, drafter: Any, **other: Any) -> ModelShape:
    target = TargetConfig.alike(**trunk, num_layers=layers, tie_embeddings=False, **other)
    taps = tuple(round(1 + i * (layers - 4) / 4) for i in range(5))  # where a file gives none
    return ModelShape(target, drafter_of(trunk | drafter, 5, 16, MASK, taps, layers))


def qwen_2_5_7b() -> ModelShape:
    other: Any = dict(vocab_size=152064, max_position_embeddings=32768, qk_norm=False)
    return _of(trunk_sizes(3584, 18944, 28, 4, **other), 28, {"qk_norm": True}, qkv_bias=True)


def mistral_7b() -> ModelShape:
    """Mistral 7B v0.3, whose layers have no window."""
    other: Any = dict(vocab_size=32768, max_position_embeddings=32768, rms_norm_eps=1e-5)
    return _of(trunk_sizes(4096, 14336, 32, 8, **other, qk_norm=False), 32, {"qk_norm": True})


def glm_4_32b() -> ModelShape:
    """GLM-4-32B-0414, by its stated sizes."""
    other: Any = dict(vocab_size=151552, max_position_embeddings=32768, rms_norm_eps=1e-5)
    rope = RopeConfig(theta=1e4, scaling=None, rotary_dim=64, in_pairs=True)
    trunk = trunk_sizes(6144, 23040, 48, 2, **other, rope=rope, qk_norm=False)
    drafter = {"qk_norm": True, "rope": RopeConfig(theta=1e4, scaling=None)}
    return _of(trunk, 61, drafter, sandwich=True)
