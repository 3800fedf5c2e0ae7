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


_SIZE = Kind("a whole number of at least 1", lambda v: type(v) is int and v >= 1)
_COUNT = Kind("a whole number of at least 0", lambda v: type(v) is int and v >= 0)
_WHOLE = Kind("a whole number", lambda v: type(v) is int)
_NUMBER = Kind("a number", is_number)
_POSITIVE = Kind("a number above 0", lambda v: is_number(v) and v > 0)
_SWITCH = Kind("true or false", lambda v: type(v) is bool)
_OBJECT = Kind("an object", lambda v: type(v) is dict)
_IDS = Kind("a list of whole numbers", lambda v: type(v) is list and all(map(_WHOLE.holds, v)))
_NAMES = Kind(
    "a list of names", lambda v: type(v) is list and all(isinstance(name, str) for name in v)
)
_KEYS = {
    _SIZE: "vocab_size hidden_size intermediate_size num_hidden_layers head_dim num_attention_heads"
    " num_key_value_heads max_position_embeddings num_experts_per_tok moe_intermediate_size"
    " decoder_sparse_step",
    _COUNT: "num_experts num_local_experts",
    _WHOLE: "num_target_layers block_size mask_token_id conv_kernel_size conv_group_size"
    " selector_rank selector_top_k max_window_layers",
    _NUMBER: "input_embedding_scale output_multiplier final_logit_softcapping",
    _POSITIVE: "rms_norm_eps",
    _SWITCH: "attention_bias mlp_bias tie_word_embeddings norm_topk_prob use_sliding_window"
    " is_causal truncate",
    _OBJECT: "dflash_config quantization_config rope_parameters rope_scaling",
    _IDS: "target_layer_ids mlp_only_layers",
    _NAMES: "architectures layer_types",
}
KINDS = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}


def said(raw: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """`raw` without its nulls; ValueError if a key of `names` has a value of another kind."""
    for name in names:
        value = raw.get(name)
        if value is not None and name in KINDS and not KINDS[name].holds(value):
            raise ValueError(f"{name} must be {KINDS[name].words}, got {value!r}")
    return {key: value for key, value in raw.items() if value is not None}
