"""DFlash drafters in GGUF: metadata to a config.json of dflash's, and the names of tensors.

They are llama.cpp's: its `src/models/dflash.cpp` names keys and tensors, and its converter
(DFlashModel in `conversion/qwen.py`) says what they hold. `target_layers` are the layers whose
inputs are tapped, one more than dflash's ids. RoPE turns heads by halves, so rows stay in place.
The vocabulary is the tokenizer's, which is the target's; how many layers that has is not said.
"""

import re
from typing import Any

from jflash.io.families.dflash import DRAFTER, DRAFTER_2, OF_DRAFTER_2, UNCOUNTED
from jflash.io.gguf.config import metadata_of, refuse_foreign, trunk_of
from jflash.io.gguf.file import GgufFile
from jflash.io.hf_values import ID, NUMBER, SIZE, SWITCH, TEXTS, WHOLES, Kind, shown

ARCHITECTURE = "dflash"  # of llama.cpp; its forks have others
_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_WHOLE_NAMES = {  # of version 2, where one of the two has no ".weight"
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
_OWN_ENDS = ("token_embd.weight", "output.weight", "d2t")
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_SECTIONS, _TOKENS = "rope.dimension_sections", "tokenizer.ggml.tokens"
_SCALES = {  # key -> dflash's
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "input_embedding_scale",
}
_SWITCHES = Kind(
    "a list of true and false", lambda v: type(v) is list and all(map(SWITCH.holds, v))
)
_KINDS: dict[str, Kind] = {
    "block_size": SIZE, "target_layers": WHOLES, "target_hidden_size": SIZE, _SECTIONS: WHOLES,
    _PATTERN: _SWITCHES,
}  # fmt: skip
_KINDS |= dict.fromkeys(_SCALES, NUMBER) | dict.fromkeys(OF_DRAFTER_2, SIZE)
_MASK = "tokenizer.ggml.mask_token_id"


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json of the drafter in `file`; ValueError for what is missing or not supported."""
    kinds = {f"{ARCHITECTURE}.{key}": kind for key, kind in _KINDS.items()}
    file.check(kinds | {_MASK: ID, _TOKENS: TEXTS})
    metadata = metadata_of(file, ARCHITECTURE)
    _refuse(file, metadata)
    config = trunk_of(file, ARCHITECTURE, metadata)
    _check_sizes(file, metadata, config)
    scales = {ours: metadata[key] for key, ours in _SCALES.items() if key in metadata}
    second = {key: metadata[key] for key in OF_DRAFTER_2 if key in metadata}
    return config | scales | second | _sight(file, metadata, config["num_hidden_layers"]) | {
        "architectures": [DRAFTER_2 if second else DRAFTER],
        "model_type": UNCOUNTED,
        "vocab_size": metadata.get("vocab_size") or len(file.need(_TOKENS)),
        "attention_bias": False,
        "block_size": file.need(f"{ARCHITECTURE}.block_size"),
        "mask_token_id": file.need(_MASK),
        "target_layer_ids": [i - 1 for i in file.need(f"{ARCHITECTURE}.target_layers")],
    }  # fmt: skip


def stored_name(name: str) -> str:
    """What GGUF calls the tensor that dflash calls `name`."""
    layer = re.match(r"layers\.(\d+)\.", name)
    name = name.removeprefix(layer[0] if layer else "")
    module, _, last = name.rpartition(".")
    prefix = f"blk.{layer[1]}." if layer else ""
    return prefix + (_WHOLE_NAMES.get(name) or f"{_NAMES[module]}.{last}")


def _refuse(file: GgufFile, metadata: dict[str, Any]) -> None:
    """ValueError for what llama.cpp's drafters may have and this reader does not know."""
    own = [name for name in _OWN_ENDS if name in file.tensors]
    if own:
        raise ValueError(
            f"{file.path}: {own[0]}: drafters that bring an embedding or a head are not read from "
            "GGUF: give the drafter's folder of safetensors"
        )
    scaling = metadata.get("rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(
            f"{file.path}: {ARCHITECTURE}.rope.scaling.type {shown(scaling)} is not supported"
        )
    refuse_foreign(file, ARCHITECTURE, metadata, {_WINDOW, *_KINDS})


def _check_sizes(file: GgufFile, metadata: dict[str, Any], config: dict[str, Any]) -> None:
    """ValueError for sizes that only other drafters have, and for RoPE of several positions."""
    width, pairs = config["hidden_size"], config["head_dim"] // 2
    if (theirs := metadata.get("target_hidden_size", width)) != width:
        raise ValueError(f"{file.path}: target_hidden_size {theirs} is not the drafter's {width}")
    sections = metadata.get(_SECTIONS) or [pairs]
    if sections[0] != pairs or any(sections[1:]):  # a text has one position: the first
        raise ValueError(
            f"{file.path}: {_SECTIONS} {shown(sections)} must turn all {pairs} pairs of a head by "
            "the first position"
        )


def _sight(file: GgufFile, metadata: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """dflash's keys for windows and causality.

    A file with windows that does not say whether rows see later ones may be that of a config which
    leaves it to dflash's rule, that of Muse-Glimmer's assistant, or one of an older converter.
    """
    causal = metadata.get("attention.causal")
    said = {} if causal is None else {"is_causal": causal}
    if not metadata.get(_WINDOW):
        return said
    windowed = file.need(f"{ARCHITECTURE}.{_PATTERN}")
    if len(windowed) != num_layers:
        raise ValueError(
            f"{file.path}: {ARCHITECTURE}.{_PATTERN} must have {num_layers} values, got "
            f"{shown(windowed)}"
        )
    if any(windowed) and causal is None:
        raise ValueError(
            f"{file.path}: {ARCHITECTURE}.{_WINDOW} {metadata[_WINDOW]} without "
            f"{ARCHITECTURE}.attention.causal: the file does not say whether a row of a block sees "
            "those after it: give the drafter's folder of safetensors"
        )
    return said | {
        "layer_types": [f"{'sliding' if one else 'full'}_attention" for one in windowed],
        "use_sliding_window": True,
        "sliding_window": metadata[_WINDOW],
    }
