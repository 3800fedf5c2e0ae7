"""Values of a config.json: each known key has one kind of value, and null means absent."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard


class Kind(NamedTuple):
    """What a value must be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number that a float holds: no NaN, no infinity."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


MOST = 2**31 - 1  # of sizes and ids: they are int32 on the device
MOST_PARTS = 1024  # of layers, experts and others of which each makes modules and names


def _whole(least: int, most: int) -> Kind:
    words = f"a whole number from {least} to {most}"
    return Kind(words, lambda v: type(v) is int and least <= v <= most)


SIZE, _COUNT = _whole(1, MOST), _whole(0, MOST)
_PARTS, _FEW = _whole(1, MOST_PARTS), _whole(0, MOST_PARTS)
WHOLE = _whole(-MOST, MOST)
ID = _COUNT
NUMBER = Kind("a number", is_number)
POSITIVE = Kind("a number above 0", lambda v: is_number(v) and v > 0)
SWITCH = Kind("true or false", lambda v: type(v) is bool)
TEXT = Kind("a text", lambda v: type(v) is str)
_OBJECT = Kind("an object", lambda v: type(v) is dict)
WHOLES = Kind("a list of whole numbers", lambda v: type(v) is list and all(map(WHOLE.holds, v)))
NUMBERS = Kind("a list of numbers", lambda v: type(v) is list and all(map(is_number, v)))
TEXTS = Kind("a list of names", lambda v: type(v) is list and all(map(TEXT.holds, v)))
IDS = Kind("a whole number or a list of them", lambda v: WHOLE.holds(v) or WHOLES.holds(v))
_KEYS = {
    SIZE: "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads"
    " max_position_embeddings moe_intermediate_size decoder_sparse_step full_attention_interval"
    " shared_expert_intermediate_size draft_vocab_size target_hidden_size"
    " sliding_window_pattern rotary_dim",
    _PARTS: "num_hidden_layers num_target_layers head_dim num_experts_per_tok"
    " linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
    " linear_conv_kernel_dim n_routed_experts n_group topk_group global_head_dim"
    " num_global_key_value_heads",
    _FEW: "num_experts num_local_experts block_size conv_kernel_size n_shared_experts"
    " first_k_dense_replace top_k_experts",
    _COUNT: "conv_group_size selector_rank selector_top_k max_window_layers image_token_id"
    " video_token_id image_token_index audio_token_id num_kv_shared_layers"
    " hidden_size_per_layer_input",
    WHOLE: "mask_token_id",
    NUMBER: "input_embedding_scale output_multiplier final_logit_softcapping",
    POSITIVE: "rms_norm_eps partial_rotary_factor query_pre_attn_scalar rope_local_base_freq"
    " routed_scaling_factor post_norm_eps qk_scale_factor",
    SWITCH: "attention_bias mlp_bias tie_word_embeddings norm_topk_prob use_sliding_window"
    " use_qk_norm is_causal truncate sliding_window_non_causal sample_from_anchor shift_label"
    " attention_k_eq_v enable_moe_block use_double_wide_mlp",
    _OBJECT: "dflash_config quantization_config rope_parameters rope_scaling text_config"
    " transformer_layer_config weight_map per_layer_config quantization",
    IDS: "eos_token_id",
    WHOLES: "target_layer_ids mlp_only_layers aux_hidden_state_layer_ids",
    NUMBERS: "layer_rope_theta",
    TEXT: "speculators_model_type projector_type hidden_activation",
    TEXTS: "architectures layer_types",
}
KINDS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}


def checked(raw: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """`raw` without its nulls; ValueError if a key of `names` has a value of another kind."""
    for name in names:
        value = raw.get(name)
        if value is not None and name in KINDS and not KINDS[name].holds(value):
            raise ValueError(f"{name} must be {KINDS[name].words}, got {shown(value)}")
    return {key: value for key, value in raw.items() if value is not None}


def shown(value: Any) -> str:
    """A value from a file as errors show it: one line, cut where it is long."""
    text = repr(value) if not isinstance(value, int) or abs(value) <= 10**40 else "a huge number"
    return text if len(text) <= 80 else f"{text[:80]}…"
