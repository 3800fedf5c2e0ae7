"""config.json of Hugging Face checkpoints to jflash's records: nothing is guessed.

A missing key takes the default of transformers' config class for that model_type (DEFAULTS); a
feature that is not implemented is a ValueError that names it.
"""

import json
from pathlib import Path
from typing import Any

from jflash.config import (
    Drafter2Config,
    DrafterConfig,
    MoeConfig,
    Sight,
    TargetConfig,
    default_target_layer_ids,
)
from jflash.io.hf_rope import rope_config
from jflash.io.hf_values import said

# transformers 5's defaults. None for head_dim means hidden_size / heads, for KV heads all heads.
_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": _COMMON
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False},
    "qwen3_moe": _COMMON
    | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"head_dim": None, "max_position_embeddings": 32768, "attention_bias": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2": _COMMON
    | {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"head_dim": None, "max_position_embeddings": 32768},
    "llama": _COMMON
    | {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None}
    | {"head_dim": None, "max_position_embeddings": 2048, "attention_bias": False}
    | {"mlp_bias": False},
}
# Keys without a default there.
_OF_TRUNK = ("quantization_config", "rope_parameters", "rope_scaling", "num_local_experts")
_OF_WINDOWS = ("layer_types", "use_sliding_window")  # that transformers' Llama does not read
LAYER_TYPES = ("full_attention", "sliding_attention")
TARGETS = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}
DRAFTER = "DFlashDraftModel"
DRAFTER_2 = "DFlash2DraftModel"
_SIGHT_KEYS = ("is_causal", "layer_types", "sliding_window", "use_sliding_window")
OF_DRAFTER_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OF_DRAFTER = ("block_size", "mask_token_id", "target_layer_ids", "input_embedding_scale")
_OF_DRAFTER += ("output_multiplier", "final_logit_softcapping", *OF_DRAFTER_2)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError if it is missing, not UTF-8 or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}: not a checkpoint folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON here: it is nested too deep") from None
    except ValueError as error:  # the encoding, the syntax, or a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def architecture(raw: dict[str, Any]) -> str:
    """The one architecture that a config names."""
    names = said(raw, ["architectures"]).get("architectures", [])
    if len(names) != 1:
        raise ValueError(f"config.json must name one architecture, found {names}")
    return names[0]


def _printed(name: str) -> str:
    return " ".join(name.split())


def target_config(raw: dict[str, Any]) -> TargetConfig:
    """A decoder's config; ValueError for another architecture or an unsupported feature."""
    name = architecture(raw)
    if name not in TARGETS:
        hint = " (a drafter: give it as --drafter)" if "DFlash" in name else ""
        raise ValueError(
            f"unsupported target {' '.join(name.split())}{hint}; supported: {', '.join(TARGETS)}"
        )
    family = TARGETS[name]
    trunk, value = _trunk(raw, family)
    seen = said(raw, _OF_WINDOWS) if family != "llama" else {}
    windowed = [t for t in seen.get("layer_types", []) if t != "full_attention"]
    if seen.get("use_sliding_window") or windowed:
        raise ValueError("sliding_window: targets with sliding-window layers are not supported")
    return TargetConfig(
        **trunk,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2" or value["attention_bias"],
        out_bias=family != "qwen2" and value["attention_bias"],
        mlp_bias=family == "llama" and value["mlp_bias"],
        tie_embeddings=value["tie_word_embeddings"],
        moe=_moe(value) if family == "qwen3_moe" else None,
    )


def drafter_config(raw: dict[str, Any]) -> DrafterConfig:
    """A drafter's config, version 1 or 2, its own keys in `dflash_config` or at the top level."""
    name = architecture(raw)
    if name not in (DRAFTER, DRAFTER_2):
        raise ValueError(
            f"unsupported drafter {' '.join(name.split())}; supported: {DRAFTER}, {DRAFTER_2}"
        )
    given = said(raw, ("num_target_layers", "dflash_config", *_OF_DRAFTER))
    own = given.get("dflash_config", {})
    value = given | {k: v for k, v in said(own, _OF_DRAFTER).items() if k in _OF_DRAFTER}
    needed = ("num_target_layers", "mask_token_id", *(OF_DRAFTER_2 if name == DRAFTER_2 else ()))
    missing = [key for key in needed if key not in value]
    if missing:
        raise ValueError(f"the drafter's config.json lacks {', '.join(missing)}")
    trunk, defaults = _trunk(raw, "qwen3")
    bias, targets = defaults["attention_bias"], value["num_target_layers"]
    ids = value.get("target_layer_ids", default_target_layer_ids(targets, trunk["num_layers"]))
    cap = value.get("final_logit_softcapping", 0)
    shared = dict(
        **trunk,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        block_size=value.get("block_size", 16),
        mask_token_id=value["mask_token_id"],
        target_layer_ids=tuple(ids),
        num_target_layers=targets,
        input_embedding_scale=float(value.get("input_embedding_scale", 1)),
        output_multiplier=float(value.get("output_multiplier", 1)),
        final_logit_softcapping=float(cap) if cap > 0 else None,
        sights=_sights(raw, own, trunk["num_layers"]),
    )
    if name == DRAFTER:
        return DrafterConfig(**shared)
    return Drafter2Config(**shared, **{key: value[key] for key in OF_DRAFTER_2})


def _sights(raw: dict[str, Any], own: dict[str, Any], num_layers: int) -> tuple[Sight, ...]:
    """What a drafter's layers see, () if all of them see everything.

    Qwen3Config's rules for windows; unless `is_causal` says so for all, those layers are causal
    that have a window. dflash 0.1.0 reads the keys at the top level alone, not in its `own`.
    """
    misplaced = [key for key in _SIGHT_KEYS if key in own and own[key] != raw.get(key)]
    if misplaced:
        raise ValueError(f"dflash_config says {', '.join(misplaced)}: put it at the top level")
    value = said(raw, (*_SIGHT_KEYS, "max_window_layers"))
    window, is_causal = raw.get("sliding_window", 4096), value.get("is_causal")
    windowed = _windowed_layers(value, num_layers, window)
    if any(windowed) and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window must be a whole number of at least 1, got {window!r}")
    sights = tuple(
        Sight(window=window if own else None, causal=own if is_causal is None else is_causal)
        for own in windowed
    )
    return () if set(sights) == {Sight()} else sights


def _windowed_layers(value: dict[str, Any], num_layers: int, window: Any) -> list[bool]:
    """Which layers have a sliding window; a `window` of null is none."""
    on, types = value.get("use_sliding_window", False), value.get("layer_types")
    if types is None:
        on &= window is not None
        first = value.get("max_window_layers", 28)
        return [on and i >= first for i in range(num_layers)]
    unknown = [t for t in types if t not in LAYER_TYPES]
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types must be {num_layers} of {' or '.join(LAYER_TYPES)}, got {types}"
        )
    if "sliding_attention" in types and not on:
        raise ValueError(
            "sliding_window: layer_types has sliding_attention but use_sliding_window is not true"
        )
    return [t == "sliding_attention" for t in types]


def _trunk(raw: dict[str, Any], family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """DecoderConfig's common fields, and the family's keys with defaults filled in."""
    value = DEFAULTS[family] | said(raw, (*DEFAULTS[family], *_OF_TRUNK))
    if "quantization_config" in value:
        method = value["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantization_config ({method}): quantised weights are not supported")
    if value["hidden_act"] != "silu":
        raise ValueError(f"hidden_act {value['hidden_act']!r} is not supported, only 'silu'")
    heads = value["num_attention_heads"]
    head_dim = value["head_dim"] or value["hidden_size"] // heads
    return dict(
        vocab_size=value["vocab_size"],
        hidden_size=value["hidden_size"],
        intermediate_size=value["intermediate_size"],
        num_layers=value["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=value["num_key_value_heads"] or heads,
        head_dim=head_dim,
        rms_norm_eps=float(value["rms_norm_eps"]),
        rope=rope_config(raw, value["max_position_embeddings"]),
        max_position_embeddings=value["max_position_embeddings"],
    ), value


def _moe(value: dict[str, Any]) -> MoeConfig | None:
    """The experts of a Qwen3-MoE config, its keys filled up; None if no layer has any."""
    experts = value.get("num_local_experts", value["num_experts"])
    step, dense = value["decoder_sparse_step"], value["mlp_only_layers"]
    layers = range(value["num_hidden_layers"])
    sparse = tuple(i for i in layers if experts and i not in dense and (i + 1) % step == 0)
    if not sparse:
        return None
    return MoeConfig(
        num_experts=experts,
        experts_per_token=value["num_experts_per_tok"],
        intermediate_size=value["moe_intermediate_size"],
        renormalise=value["norm_topk_prob"],
        sparse_layers=sparse,
    )
