"""Published model shapes as configs, so that a step can be timed without a checkpoint.

The numbers come from the models' public config.json; `-window` and `-dflash2` give a published
target another kind of drafter. A shape has no weights: it decodes nothing of meaning.
"""

import math
from dataclasses import replace
from typing import Any

from jflash.bench.shapes.dense import glm_4_32b, mistral_7b, qwen_2_5_7b
from jflash.bench.shapes.gemma import gemma_3_12b, gemma_4_12b, gemma_4_26b, gemma_4_31b
from jflash.bench.shapes.muse import muse_glimmer_30b
from jflash.bench.shapes.parts import ModelShape, drafter_of, trunk_sizes
from jflash.bench.shapes.sigmoid import glm_4_5_air, glm_4_6, minimax_m2
from jflash.records.config import TargetConfig, second_version
from jflash.records.specs import (
    DeltaSpec,
    Kept,
    Llama3Scaling,
    MoeSpec,
    RopeConfig,
    YarnScaling,
)


def _qwen3(hidden: int, intermediate: int, tied: bool) -> ModelShape:
    """36 layers with the 5-layer drafter of block 16, whose layers have the target's shape."""
    trunk = trunk_sizes(hidden, intermediate, 32, 8)
    target = TargetConfig.alike(**trunk, num_layers=36, tie_embeddings=tied)
    return ModelShape(target, drafter_of(trunk, 5, 16, 151669, (1, 9, 17, 25, 33), 36))


def _llama_8b() -> ModelShape:
    """Llama-3.1-8B-Instruct with its 5-layer drafter of block 10."""
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    rope = RopeConfig(theta=5e5, scaling=scaling)
    shared = dict(vocab_size=128256, rope=rope, max_position_embeddings=131072)
    trunk = trunk_sizes(4096, 14336, 32, 8, **shared) | dict(rms_norm_eps=1e-5, qk_norm=False)
    # Any id serves as the mask here: the step reads one row of the embedding.
    mask, taps = 128255, (1, 8, 15, 22, 29)
    return ModelShape(
        TargetConfig.alike(**trunk, num_layers=32, tie_embeddings=False),
        drafter_of(trunk_sizes(4096, 12288, 32, 8, **shared), 5, 10, mask, taps, 32),
    )


def _smollm2_135m() -> ModelShape:
    """SmolLM2-135M-Instruct with the drafter of checkpoints/, 4 layers of block 16."""
    shared: Any = dict(vocab_size=49152, rope=RopeConfig(theta=1e5, scaling=None), head_dim=64)
    shared |= dict(max_position_embeddings=8192, rms_norm_eps=1e-5)
    trunk = trunk_sizes(576, 1536, 9, 3, **shared) | dict(qk_norm=False)
    return ModelShape(
        TargetConfig.alike(**trunk, num_layers=30, tie_embeddings=True),
        drafter_of(trunk_sizes(576, 960, 9, 3, **shared), 4, 16, 16, (1, 10, 18, 27), 30),
    )


def _qwen3_coder_30b() -> ModelShape:
    """Qwen3-Coder-30B-A3B-Instruct, 128 experts of which 8 a token, with its 8-layer drafter."""
    rope = RopeConfig(theta=1e7, scaling=None)
    trunk = trunk_sizes(2048, 6144, 32, 4, rope=rope, max_position_embeddings=262144)
    moe = MoeSpec(num_experts=128, experts_per_token=8, intermediate_size=768, renormalise=True)
    target = TargetConfig.alike(**trunk, num_layers=48, tie_embeddings=False)
    drafter = drafter_of(trunk, 8, 16, 151669, (1, 12, 23, 34, 45), 48)
    return ModelShape(target.with_experts(moe, range(48)), drafter)


def _qwen3_32b() -> ModelShape:
    """Qwen3-32B, and a drafter of 10 layers of which only the config is public."""
    trunk = trunk_sizes(5120, 25600, 64, 8)
    target = TargetConfig.alike(**trunk, num_layers=64, tie_embeddings=False)
    taps = (1, 8, 14, 21, 28, 34, 41, 48, 54, 61)
    return ModelShape(target, drafter_of(trunk, 10, 16, 151669, taps, 64))


def _tiny() -> ModelShape:
    """Small enough for a CPU: for trying the command, not for numbers."""
    trunk = trunk_sizes(128, 192, 4, 2, head_dim=64, vocab_size=512, max_position_embeddings=4096)
    target = TargetConfig.alike(**trunk, num_layers=3, tie_embeddings=False)
    return ModelShape(target, drafter_of(trunk, 1, 8, 511, (0, 2), 3))


def _tiny_moe() -> ModelShape:
    """The tiny shape with experts in all layers but one."""
    target, drafter = _tiny()
    moe = MoeSpec(num_experts=8, experts_per_token=2, intermediate_size=64, renormalise=True)
    return ModelShape(target.with_experts(moe, (0, 2)), drafter)


def _windowed(shape: ModelShape) -> ModelShape:
    """All layers of the drafter but the last with a window, as Qwen3.6-27B's drafter has them."""
    near = [{"window": 2048, "causal": True}] * (shape.drafter.num_layers - 1)
    return shape._replace(drafter=shape.drafter.attending(*near, {}))


def _dflash2(shape: ModelShape) -> ModelShape:
    return shape._replace(drafter=second_version(shape.drafter))


# Of Qwen3.5 and its drafters.
_LONG: Any = dict(vocab_size=248320, max_position_embeddings=262144)


def _hybrid(layers: int, heads: tuple[int, int], values: int, hidden: int, ffn: int, **other: Any):
    """A target of Qwen3.5's layers: every fourth attends, the others have a delta net."""
    rope = RopeConfig(theta=1e7, scaling=None, rotary_dim=64)
    trunk = trunk_sizes(hidden, ffn, *heads, **_LONG | other, head_dim=256, rope=rope)
    gates = dict(gated=True, norm_shift=1.0, tie_embeddings=False)
    target = TargetConfig.alike(**trunk | gates, num_layers=layers)
    delta = DeltaSpec(num_key_heads=16, num_value_heads=values, key_dim=128, value_dim=128, taps=4)
    mixed = [x if i % 4 == 3 else replace(x, mixer=delta) for i, x in enumerate(target.layers)]
    return replace(target, layers=tuple(mixed))


def _hybrid_drafter(layers: int, target: TargetConfig, taps: tuple[int, ...], ffn: int):
    """The drafter of a hybrid: plain attention of 32 heads over 8 or 4 of keys."""
    kv_heads = 8 if target.hidden_size > 2048 else 4
    rope = RopeConfig(theta=1e7, scaling=None)
    trunk = trunk_sizes(target.hidden_size, ffn, 32, kv_heads, **_LONG, rope=rope)
    return drafter_of(trunk, layers, 16, 248070, taps, target.num_layers)


def _qwen35_27b() -> ModelShape:
    """Qwen3.5-27B and 3.6-27B, with the drafter of 5 layers."""
    target = _hybrid(64, (24, 4), values=48, hidden=5120, ffn=17408)
    return ModelShape(target, _hybrid_drafter(5, target, (1, 16, 31, 46, 61), 17408))


def _qwen35_35b() -> ModelShape:
    """Qwen3.5-35B-A3B, 256 experts of which 8 a token beside a shared one, and its drafter."""
    target = _hybrid(40, (16, 2), values=32, hidden=2048, ffn=512)
    moe = MoeSpec(
        num_experts=256, experts_per_token=8, intermediate_size=512, renormalise=True,
        shared_size=512,
    )  # fmt: skip
    target = target.with_experts(moe, range(40))
    return ModelShape(target, _hybrid_drafter(8, target, (1, 10, 19, 28, 37), 6144))


def _qwen3_coder_next() -> ModelShape:
    """Qwen3-Coder-Next, 80B-A3B: 512 experts of which 10 a token beside a shared one.

    Its drafter's file could not be opened: Qwen3-Coder-30B-A3B's here, which has the same width
    and as many layers to tap.
    """
    target = _hybrid(48, (16, 2), values=32, hidden=2048, ffn=5632, vocab_size=151936)
    moe = MoeSpec(
        num_experts=512, experts_per_token=10, intermediate_size=512, renormalise=True,
        shared_size=512,
    )  # fmt: skip
    return ModelShape(target.with_experts(moe, range(48)), _qwen3_coder_30b().drafter)


def _tiny_hybrid() -> ModelShape:
    """The tiny shape with delta nets in all layers but one."""
    target, drafter = _tiny()
    delta = DeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=32, value_dim=32, taps=4)
    mixed = [x if i == 1 else replace(x, mixer=delta) for i, x in enumerate(target.layers)]
    return ModelShape(replace(target, layers=tuple(mixed)), drafter)


def _gpt_oss(layers: int, experts: int, block: int, taps: tuple[int, ...]) -> ModelShape:
    """gpt-oss, bfloat16 weights, with its 8-layer drafter."""
    scaling = YarnScaling(
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=0.1 * math.log(32.0) + 1,
        truncate=False,
    )
    trunk = trunk_sizes(
        2880, 7680, 64, 8, head_dim=64, vocab_size=201088, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=150000.0, scaling=scaling), max_position_embeddings=131072,
    )  # fmt: skip
    plain = dict(qk_norm=False, qkv_bias=True, out_bias=True, sinks=True, norm_dtype="float32")
    target = TargetConfig.alike(**trunk | plain, num_layers=layers, tie_embeddings=False)
    moe = MoeSpec(
        num_experts=experts,
        experts_per_token=4,
        intermediate_size=2880,
        renormalise=True,
        scores="softmax of the chosen",
        clamped=True,
        bias=True,
    )
    windows = [{"window": 128 if i % 2 == 0 else None} for i in range(layers)]
    target = target.attending(*windows).with_experts(moe, range(layers))
    return ModelShape(target, drafter_of(trunk, 8, block, 200000, taps, layers))


SHAPES: dict[str, ModelShape] = {
    "qwen3-8b": _qwen3(4096, 12288, tied=False),
    "qwen3-4b": _qwen3(2560, 9728, tied=True),
    "qwen3-32b": _qwen3_32b(),
    "llama-3.1-8b": _llama_8b(),
    "qwen3-coder-30b": _qwen3_coder_30b(),
    "qwen2.5-7b": qwen_2_5_7b(),
    "mistral-7b": mistral_7b(),
    "smollm2-135m": _smollm2_135m(),
    "qwen3.5-27b": _qwen35_27b(),
    "qwen3.5-35b-a3b": _qwen35_35b(),
    "qwen3-coder-next": _qwen3_coder_next(),
    "gpt-oss-20b": _gpt_oss(24, 32, 8, (1, 6, 11, 16, 21)),
    "gpt-oss-120b": _gpt_oss(36, 128, 10, (1, 9, 17, 25, 33)),
    "gemma-3-12b": gemma_3_12b(),
    "gemma-4-12b": gemma_4_12b(),
    "gemma-4-31b": gemma_4_31b(),
    "gemma-4-26b-a4b": gemma_4_26b(),
    "muse-glimmer-30b": muse_glimmer_30b(),
    "minimax-m2": minimax_m2(),
    "glm-4.5-air": glm_4_5_air(),
    "glm-4.6": glm_4_6(),
    "glm-4-32b": glm_4_32b(),
    "tiny": _tiny(),
    "tiny-hybrid": _tiny_hybrid(),
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


# The layers' kernels in FP8 by blocks of 128, or in INT4 by groups of 128; or experts in MXFP4.
# Qwen's files of FP8 have scales of bfloat16, DeepSeek's and MiniMax's of float32.
QUANTISED = {
    "fp8": Kept("fp8", 128, "bfloat16", False),
    "fp8-float32": Kept("fp8", 128, "float32", False),
    "int4": Kept("int4", 128, "bfloat16", False),
    "mxfp4": Kept("fp8", 32, "bfloat16", False),
}


def form_of(text: str) -> tuple[str, str | None]:
    """A shape's name, and the form that its target is kept in, out of "qwen3-8b+fp8"."""
    name, plus, form = text.partition("+")
    return name, form if plus else None


def check_quantised(name: str, form: str) -> None:
    """ValueError unless the target of the shape called `name` can be kept so."""
    if form not in QUANTISED:
        raise ValueError(f"{name} cannot be kept as {form!r}: use one of {', '.join(QUANTISED)}")
    if form == "mxfp4" and not model_shape(name).target.experts:
        raise ValueError(f"mxfp4 is a form of experts, and {name} has none")


def quantised(target: TargetConfig, form: str) -> TargetConfig:
    """The target with its layers' kernels, but for routers, kept quantised in memory."""
    from jflash.models.params import leaf_paths  # JAX, which the names of shapes need not

    paths = [
        path
        for path, leaf in leaf_paths(target).items()
        if path.startswith("layers_") and path.endswith("/kernel") and leaf.stored[-1] > 1
        if leaf.experts or (form != "mxfp4" and "experts" not in leaf.axes)
    ]
    return target.keeping(dict.fromkeys(paths, QUANTISED[form]))
