"""jflash's records to config.json in the form of published files; hf_config reads it back.

It writes only Qwen3's shape, dense or with experts: drafters and the models made here have it.
"""

from dataclasses import asdict, replace
from typing import Any

from jflash.io.families.dflash import DRAFTER, DRAFTER_2, LAYER_TYPES, OF_DRAFTER_2
from jflash.records.config import Drafter2Config, DrafterConfig, TargetConfig
from jflash.records.specs import (
    AttentionSpec,
    DenseSpec,
    LinearScaling,
    Llama3Scaling,
    MoeSpec,
    RopeConfig,
    YarnScaling,
)

_KINDS = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}


def to_hf_config(config: TargetConfig | DrafterConfig, dtype: str) -> dict[str, Any]:
    """config.json of a model of Qwen3's shape; ValueError for any other."""
    mixer = config.mixers[0]
    rope = mixer.rope
    if rope is None or rope != _written(rope) or not _usual(config):
        raise ValueError("only models of Qwen3's shape can be written in Hugging Face layout")
    common: dict[str, Any] = dict(
        architectures=[_architecture(config)],
        model_type="qwen3",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=mixer.num_heads,
        num_key_value_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        hidden_act="silu",
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope.theta,
        rope_scaling=_rope_scaling(rope),
        max_position_embeddings=config.max_position_embeddings,
        attention_bias=mixer.qkv_bias,
        torch_dtype=dtype,
    )
    if isinstance(config, DrafterConfig):
        return common | _drafter_keys(config)
    common["tie_word_embeddings"] = config.tie_embeddings
    if config.experts:
        common |= _moe_keys(config)
    return common


def _usual(config: TargetConfig | DrafterConfig) -> bool:
    """Whether a model is Qwen3's, or a drafter with its windows and causality."""
    mixer = config.mixers[0]
    usual = AttentionSpec(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rope=mixer.rope,
        scale=mixer.head_dim**-0.5,
        qk_norm=True,
        qkv_bias=mixer.qkv_bias,
        out_bias=mixer.qkv_bias,
    )
    mlps = [layer.mlp for layer in config.layers if isinstance(layer.mlp, DenseSpec)]
    dense = [mlp == DenseSpec(intermediate_size=config.intermediate_size) for mlp in mlps]
    if config.deltas or not all(dense) or any(layer.sandwich for layer in config.layers):
        return False
    if isinstance(config, DrafterConfig):
        plain = {replace(m, window=None, causal=True) for m in config.mixers}
        return plain == {usual} and not (config.own_embedding or config.draft_vocab_size)
    changed = config.norm_shift or config.norm_dtype or config.logit_softcap
    changed = changed or config.logit_multiplier != 1 or config.embedding_norm
    other = changed or config.embedding_scale != 1 or any(map(_unusual, config.experts))
    return {*config.mixers} == {usual} and not other


def _unusual(moe: MoeSpec) -> bool:
    """Whether experts are none of Qwen3-MoE's."""
    size, count, chosen = moe.intermediate_size, moe.num_experts, moe.experts_per_token
    usual = MoeSpec(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=size,
        renormalise=moe.renormalise,
    )
    return moe != usual


def _written(rope: RopeConfig) -> RopeConfig:
    """What a file keeps of RoPE: whole heads by halves, and the scalings that have keys here."""
    scaling = rope.scaling if type(rope.scaling) in _KINDS else None
    return RopeConfig(theta=rope.theta, scaling=scaling)


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The scaling of RoPE, in the keys of published files."""
    if rope.scaling is None:
        return None
    return {"rope_type": _KINDS[type(rope.scaling)], **asdict(rope.scaling)}


def _architecture(config: TargetConfig | DrafterConfig) -> str:
    if isinstance(config, TargetConfig):
        return "Qwen3ForCausalLM" if not config.experts else "Qwen3MoeForCausalLM"
    return DRAFTER_2 if isinstance(config, Drafter2Config) else DRAFTER


def _drafter_keys(config: DrafterConfig) -> dict[str, Any]:
    """The keys of a drafter's config.json beside those of its trunk."""
    drafting: dict[str, Any] = dict(
        mask_token_id=config.mask_token_id, target_layer_ids=list(config.target_layer_ids)
    )
    if config.input_embedding_scale is not None:
        drafting["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        drafting["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping:
        drafting["final_logit_softcapping"] = config.final_logit_softcapping
    if isinstance(config, Drafter2Config):
        drafting |= {key: getattr(config, key) for key in OF_DRAFTER_2}
    return {
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": drafting,
        **(_window_keys(config.mixers) if any(m.window or m.causal for m in config.mixers) else {}),
    }


def _window_keys(mixers: tuple[AttentionSpec, ...]) -> dict[str, Any]:
    """The keys of config.json for windows and causality of a drafter's layers."""
    windows = {m.window for m in mixers if m.window is not None}
    causal = {m.causal for m in mixers}
    usual = all(m.causal == (m.window is not None) for m in mixers)
    if len(windows) > 1 or (len(causal) > 1 and not usual):
        seen = [(m.window, m.causal) for m in mixers]
        raise ValueError(f"config.json has one sliding_window and one is_causal, not {seen}")
    keys: dict[str, Any] = dict(
        layer_types=[LAYER_TYPES[m.window is not None] for m in mixers],
        use_sliding_window=bool(windows),
        sliding_window=max(windows, default=None),
    )
    return keys if usual else keys | {"is_causal": causal.pop()}


def _moe_keys(config: TargetConfig) -> dict[str, Any]:
    """The keys of a Qwen3-MoE's config.json beside those of a dense model."""
    if len(set(config.experts)) > 1:
        raise ValueError(f"config.json has one kind of experts, not {set(config.experts)}")
    moe, layers = config.experts[0], range(config.num_layers)
    return {
        "model_type": "qwen3_moe",
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if i not in config.sparse_layers],
    }
