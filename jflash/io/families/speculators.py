"""DFlash drafters as the speculators library saves them: the same trunk under other keys.

The layers' config is nested, tapped layers are counted from the embedding (ids + 1), and the number
of the target's layers is absent. A file may hold an embedding and a head; a head of fewer tokens
comes with `d2t`: a draft's id plus its `d2t` is the target's id. That library trains with a plain
table of the target's rows (its core.py), so these are not scaled, whichever file holds them. The
layers are Qwen3's whatever class their config has, of Qwen3 or of Llama; as vLLM makes those of a
Llama, files may leave out the norms of queries and keys.
"""

from dataclasses import replace
from typing import Any

from jflash.io.families import dflash, llama, qwen3, variants
from jflash.io.families.dflash import DRAFTER, DRAFTER_2, OF_DRAFTER_2
from jflash.io.hf_values import checked, shown
from jflash.io.names import ROTARY
from jflash.records.config import DrafterConfig, TargetConfig

MODEL_TYPE = "speculators_model_type"
KINDS = {"dflash": DRAFTER, "dflash2": DRAFTER_2}
_KEYS = (MODEL_TYPE, "transformer_layer_config", "aux_hidden_state_layer_ids", "draft_vocab_size")
_KEYS += ("sliding_window_non_causal", "sample_from_anchor", "projector_type", "shift_label")
_KEYS += ("target_hidden_size", "block_size", "mask_token_id", "input_embedding_scale")
_KEYS += OF_DRAFTER_2
# What that library takes for keys which a config of its dflash2 leaves out.
DEFAULTS_2 = {"sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16}
DEFAULTS_2 |= {"selector_rank": 256, "selector_top_k": 16}
_ENDS = {"embedding": ("embed_tokens.weight",), "head": ("lm_head.weight",), "d2t": ("d2t",)}
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
NAMES = replace(
    dflash.NAMES,
    ends=dflash.NAMES.ends | _ENDS,
    dropped=rf"{ROTARY}|t2d|verifier_(norm|lm_head)\.weight",
)


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config under dflash's keys; ValueError for what is not supported."""
    value = checked(raw, _KEYS)
    kind = value.get(MODEL_TYPE)
    if kind not in KINDS:
        raise ValueError(f"{MODEL_TYPE} {shown(kind)} is not supported, only {', '.join(KINDS)}")
    name = KINDS[kind]
    value = (DEFAULTS_2 if name == DRAFTER_2 else {}) | value
    layer = value.get("transformer_layer_config")
    ids = value.get("aux_hidden_state_layer_ids")
    if layer is None or not ids:
        raise ValueError("a speculators config needs transformer_layer_config and tapped layers")
    checked(layer, ("layer_types", "hidden_size", "vocab_size"))
    if value.get("target_hidden_size", layer.get("hidden_size")) != layer.get("hidden_size"):
        raise ValueError(f"target_hidden_size {value['target_hidden_size']} is not the drafter's")
    # Only `layer_types` gives windows, and windowed layers are causal unless a key denies it.
    sliding = "sliding_attention" in (layer.get("layer_types") or [])
    sight: dict[str, Any] = {"use_sliding_window": sliding}
    if value.get("sliding_window_non_causal"):
        sight["is_causal"] = False
    kept = ("block_size", "mask_token_id", "input_embedding_scale", *OF_DRAFTER_2, *variants.KEYS)
    drafting = {key: value[key] for key in kept if key in value}
    size = value.get("draft_vocab_size", layer.get("vocab_size"))
    if name == DRAFTER_2 and size != layer.get("vocab_size"):
        raise ValueError(f"draft_vocab_size {size}: a DFlash 2 drafter has its target's vocabulary")
    return {
        **layer, **sight, "block_size": 8, "input_embedding_scale": 1.0, **drafting,
        "architectures": [name],
        "target_layer_ids": [i - 1 for i in ids],
        "draft_vocab_size": size,
    }  # fmt: skip


def defaults(layer: dict[str, Any]) -> dict[str, Any]:
    """What keys mean that the layers' config leaves out, by its class."""
    return llama.DEFAULTS if _is_llama(layer) else qwen3.DEFAULTS


def with_own_tensors[C: TargetConfig | DrafterConfig](
    config: C, raw: dict[str, Any], stored: list[str]
) -> C:
    """A drafter's config with what its file holds, by the names in NAMES: ends and norms.

    Without a head in the file, a full vocabulary means the target's head. Any other config stays.
    """
    if MODEL_TYPE not in raw or not isinstance(config, DrafterConfig):
        return config
    full = config.draft_vocab_size == config.vocab_size and _ENDS["head"][0] not in stored
    normed = not stored or any(name.endswith(_NORMS) for name in stored)
    if _is_llama(raw["transformer_layer_config"]) and not normed:
        config = config.attending(*[{"qk_norm": False}] * config.num_layers)
    return replace(
        config,
        own_embedding=_ENDS["embedding"][0] in stored,
        draft_vocab_size=None if full else config.draft_vocab_size,
    )


def _is_llama(layer: dict[str, Any]) -> bool:
    return layer.get("model_type") == llama.MODEL_TYPE
