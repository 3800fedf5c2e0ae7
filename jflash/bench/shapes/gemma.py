"""Gemma's published sizes, and the drafters of Gemma 4."""

from dataclasses import replace
from typing import Any

from jflash.bench.shapes.parts import ModelShape, drafter_of, trunk_sizes
from jflash.records.config import TargetConfig
from jflash.records.specs import LinearScaling, MoeSpec, ProportionalScaling, RopeConfig


def _gemma(layers: int, hidden: int, ffn: int, heads: tuple[int, int], head_dim: int, **other):
    """A target of Gemma's layers, each with a window of 1024; the head is the embedding."""
    gemma = dict(sandwich=True, activation="gelu_tanh", tie_embeddings=True, window=1024)
    gemma |= dict(embedding_scale=hidden**0.5, max_position_embeddings=131072)
    trunk = trunk_sizes(
        hidden, ffn, *heads, head_dim=head_dim, rope=RopeConfig(theta=1e4, scaling=None)
    )
    return TargetConfig.alike(**trunk | gemma | other, num_layers=layers)


def _sixth_full(target: TargetConfig, **full: Any) -> TargetConfig:
    """The target with other values in every sixth layer, which has no window."""
    changes = [full | {"window": None} if i % 6 == 5 else {} for i in range(target.num_layers)]
    return target.attending(*changes)


def _gemma_drafter(target: TargetConfig, heads: int, ffn: int, taps: tuple[int, ...]):
    """The drafter of Gemma 4: four layers with a window, and one without."""
    rope, V = RopeConfig(theta=1e6, scaling=None), target.vocab_size
    other = dict(vocab_size=V, max_position_embeddings=131072, rope=rope)
    trunk = trunk_sizes(target.hidden_size, ffn, heads, 8, **other)
    drafter = drafter_of(trunk, 5, 16, 4, taps, target.num_layers)
    scale = target.embedding_scale
    drafter = replace(drafter, input_embedding_scale=scale, final_logit_softcapping=30.0)
    return drafter.attending(*[{"window": 2048, "causal": True}] * 4, {})


def gemma_3_12b() -> ModelShape:
    """Gemma 3 12B. No drafter is published: Gemma 4's, with this target's width."""
    target = _gemma(48, 3840, 15360, (16, 8), 256, vocab_size=262208, norm_shift=1.0)
    full = RopeConfig(theta=1e6, scaling=LinearScaling(factor=8.0))
    target = _sixth_full(target, rope=full)
    return ModelShape(target, _gemma_drafter(target, 32, 7680, (1, 12, 23, 34, 45)))


def _gemma_4(target: TargetConfig, kv_heads: int) -> TargetConfig:
    """Gemma 4's layers: those without a window have wider heads, whose values are the keys."""
    scaling = ProportionalScaling(turning=64, factor=1.0)
    full = dict(head_dim=512, num_kv_heads=kv_heads, shared_kv=True)
    target = _sixth_full(target, rope=RopeConfig(theta=1e6, scaling=scaling), **full)
    return replace(target, layers=tuple(replace(x, scaled=True) for x in target.layers))


# Of Gemma 4.
_FOUR: Any = dict(vocab_size=262144, scale=1.0, value_norm=True, norm_dtype="float32")
_FOUR |= dict(logit_softcap=30.0)


def gemma_4_31b() -> ModelShape:
    target = _gemma_4(_gemma(60, 5376, 21504, (32, 16), 256, **_FOUR), 4)
    return ModelShape(target, _gemma_drafter(target, 64, 10752, (1, 12, 23, 35, 46, 57)))


def gemma_4_12b() -> ModelShape:
    """Gemma 4 12B, one tower for text and images. Its drafter's file could not be opened: Gemma 3
    12B's here, whose target has the same width and layers."""
    longer = dict(max_position_embeddings=262144)
    target = _gemma_4(_gemma(48, 3840, 15360, (16, 8), 256, **_FOUR | longer), 1)
    return ModelShape(target, _gemma_drafter(target, 32, 7680, (1, 12, 23, 34, 45)))


def gemma_4_26b() -> ModelShape:
    """Gemma 4 26B-A4B by its stated sizes: 128 experts of which 8 a token, beside an MLP."""
    target = _gemma_4(_gemma(30, 2816, 2112, (16, 8), 256, **_FOUR), 2)
    moe = MoeSpec(
        num_experts=128, experts_per_token=8, intermediate_size=704, renormalise=True,
        activation="gelu_tanh",
    )  # fmt: skip
    target = replace(target, layers=tuple(replace(x, beside=moe) for x in target.layers))
    return ModelShape(target, _gemma_drafter(target, 32, 5632, (1, 6, 11, 17, 22, 27)))
