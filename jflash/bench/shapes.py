"""Published model shapes as configs, so that a step can be timed without a checkpoint.

Numbers from the models' public config.json; `-window` and `-dflash2` give a published target
another kind of drafter. Knows no weights: a shape decodes nothing of meaning.
"""

from typing import Any, NamedTuple

from jflash.config import (
    DrafterConfig,
    Llama3Scaling,
    MoeSpec,
    RopeConfig,
    TargetConfig,
    second_version,
)


class ModelShape(NamedTuple):
    """A target and the drafter published for it."""

    target: TargetConfig
    drafter: DrafterConfig


def _qwen3(hidden_size: int, intermediate_size: int, tie_embeddings: bool) -> ModelShape:
    """36 layers with the 5-layer drafter of block 16, whose layers have the target's shape."""
    trunk: dict[str, Any] = dict(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6, scaling=None),
        max_position_embeddings=40960,
        qk_norm=True,
    )
    return ModelShape(
        TargetConfig.alike(**trunk, num_layers=36, tie_embeddings=tie_embeddings),
        _drafter(trunk, layers=5, block=16, mask=151669, taps=(1, 9, 17, 25, 33), target_layers=36),
    )


def _llama_8b() -> ModelShape:
    """Llama-3.1-8B-Instruct with its 5-layer drafter of block 10."""
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    trunk: dict[str, Any] = dict(
        vocab_size=128256,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(theta=5e5, scaling=scaling),
        max_position_embeddings=131072,
    )
    target: dict[str, Any] = trunk | dict(intermediate_size=14336, rms_norm_eps=1e-5, qk_norm=False)
    drafter: dict[str, Any] = trunk | dict(intermediate_size=12288, rms_norm_eps=1e-6, qk_norm=True)
    # Any id serves as the mask here: the step reads one row of the embedding.
    return ModelShape(
        TargetConfig.alike(**target, num_layers=32, tie_embeddings=False),
        _drafter(
            drafter, layers=5, block=10, mask=128255, taps=(1, 8, 15, 22, 29), target_layers=32
        ),
    )


def _qwen3_coder_30b() -> ModelShape:
    """Qwen3-Coder-30B-A3B-Instruct, 128 experts of which 8 a token, with its 8-layer drafter."""
    trunk: dict[str, Any] = dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e7, scaling=None),
        max_position_embeddings=262144,
        qk_norm=True,
    )
    moe = MoeSpec(num_experts=128, experts_per_token=8, intermediate_size=768, renormalise=True)
    target = TargetConfig.alike(**trunk, num_layers=48, tie_embeddings=False)
    return ModelShape(
        target.with_experts(moe, range(48)),
        _drafter(
            trunk, layers=8, block=16, mask=151669, taps=(1, 12, 23, 34, 45), target_layers=48
        ),
    )


def _tiny_moe() -> ModelShape:
    """The tiny shape with experts in all layers but one."""
    target, drafter = _tiny()
    moe = MoeSpec(num_experts=8, experts_per_token=2, intermediate_size=64, renormalise=True)
    return ModelShape(target.with_experts(moe, (0, 2)), drafter)


def _tiny() -> ModelShape:
    """Small enough for a CPU: for trying the command, not for numbers."""
    trunk: dict[str, Any] = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6, scaling=None),
        max_position_embeddings=4096,
        qk_norm=True,
    )
    return ModelShape(
        TargetConfig.alike(**trunk, num_layers=3, tie_embeddings=False),
        _drafter(trunk, layers=1, block=8, mask=511, taps=(0, 2), target_layers=3),
    )


def _drafter(
    trunk: dict[str, Any], *, layers: int, block: int, mask: int, taps, target_layers: int
) -> DrafterConfig:
    return DrafterConfig.alike(
        **trunk,
        causal=False,
        num_layers=layers,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=target_layers,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )


def _windowed(shape: ModelShape) -> ModelShape:
    """All layers of the drafter but the last with a window, as Qwen3.6-27B's drafter has them."""
    near = [{"window": 2048, "causal": True}] * (shape.drafter.num_layers - 1)
    return shape._replace(drafter=shape.drafter.attending(*near, {}))


def _dflash2(shape: ModelShape) -> ModelShape:
    return shape._replace(drafter=second_version(shape.drafter))


SHAPES: dict[str, ModelShape] = {
    "qwen3-8b": _qwen3(4096, 12288, tie_embeddings=False),
    "qwen3-4b": _qwen3(2560, 9728, tie_embeddings=True),
    "llama-3.1-8b": _llama_8b(),
    "qwen3-coder-30b": _qwen3_coder_30b(),
    "tiny": _tiny(),
    "tiny-moe": _tiny_moe(),
}
SHAPES["qwen3-8b-window"] = _windowed(SHAPES["qwen3-8b"])
SHAPES["qwen3-8b-dflash2"] = _dflash2(SHAPES["qwen3-8b"])
SHAPES["tiny-dflash2"] = _dflash2(SHAPES["tiny"])


def model_shape(name: str) -> ModelShape:
    """The shape called `name`; ValueError with the names there are."""
    if name not in SHAPES:
        raise ValueError(f"no shape is called {name!r}: use one of {', '.join(SHAPES)}")
    return SHAPES[name]
