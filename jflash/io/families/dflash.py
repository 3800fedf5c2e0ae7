"""DFlash drafters, version 1 and 2: Qwen3's trunk, a block, windows, and the tapped layers."""

from typing import Any

from jflash.io.families import qwen3
from jflash.io.families.trunk import ATTENTION, MLP, NORMS, all_heads, read_trunk
from jflash.io.families.variants import refuse_variants
from jflash.io.hf_values import SIZE, checked, shown
from jflash.io.names import Names
from jflash.records.config import Drafter2Config, DrafterConfig, default_target_layer_ids
from jflash.records.specs import AttentionSpec, DenseSpec

LAYER_TYPES = ("full_attention", "sliding_attention")
DRAFTER = "DFlashDraftModel"
DRAFTER_2 = "DFlash2DraftModel"
UNCOUNTED = "dflash"  # model_type of GGUF's, which do not say how many layers the target has
_SIGHT_KEYS = ("is_causal", "layer_types", "sliding_window", "use_sliding_window")
OF_DRAFTER_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OF_DRAFTER = ("block_size", "mask_token_id", "target_layer_ids", "input_embedding_scale")
_OF_DRAFTER += ("output_multiplier", "final_logit_softcapping", *OF_DRAFTER_2)
_CONVOLUTIONS = {
    f"{part}_conv/{leaf}": (f"{part}_conv.{name}",)
    for part in ("attention", "mlp")
    for leaf, name in (
        ("base_kernel", "base_kernel"),
        ("kernel_projection/kernel", "kernel_projection.weight"),
    )
}
_SELECTOR = "candidate_selector"
_CODEBOOKS = tuple(f"{_SELECTOR}.{x}_codebook" for x in ("predecessor", "successor"))
NAMES = Names(
    ends={
        "fc/kernel": ("fc.weight",),
        "hidden_norm/scale": ("hidden_norm.weight",),
        "norm/scale": ("norm.weight",),
        **{name.replace(".", "/"): (name,) for name in _CODEBOOKS},
        f"{_SELECTOR}/hidden_projection/kernel": (f"{_SELECTOR}.hidden_projection.weight",),
    },
    every=NORMS | _CONVOLUTIONS,
    mixers={AttentionSpec: ATTENTION},
    mlps={DenseSpec: MLP},
    layer="layers.{i}.",
    # Some re-exported drafters prefix every tensor, and what dflash 0.1.0 saves is not named as
    # published files are: its codebooks are embeddings, with a weight.
    prefixes=(
        *((f"{lead}{name}.weight", name) for lead in ("model.", "") for name in _CODEBOOKS),
        ("model.", ""),
    ),
)


def with_targets_head(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a drafter without a head of its own; ValueError for another vocabulary."""
    key = "draft_vocab_size"
    value = {"vocab_size": qwen3.DEFAULTS["vocab_size"]} | checked(raw, (key, "vocab_size"))
    if value.get(key, value["vocab_size"]) != value["vocab_size"]:
        raise ValueError(
            f"{key} {value[key]}: of dflash's drafters the head is the target's, with all its "
            f"{value['vocab_size']} tokens; those in the speculators format may bring another"
        )
    return {name: given for name, given in raw.items() if name != key}


def drafter(
    raw: dict[str, Any],
    name: str,
    counted: bool = True,
    defaults: dict[str, Any] = qwen3.DEFAULTS,
) -> DrafterConfig:
    """The config of a drafter; its keys stand in `dflash_config` or at the top level.

    `name` is its architecture: version 1 or 2. `counted`: the file must say how many layers the
    target has, as dflash's own do. `defaults` are those of its layers' class.
    """
    given = checked(raw, ("num_target_layers", "dflash_config", *_OF_DRAFTER))
    nested = given.get("dflash_config", {})
    value = given | {k: v for k, v in checked(nested, _OF_DRAFTER).items() if k in _OF_DRAFTER}
    needed = ("mask_token_id", *(OF_DRAFTER_2 if name == DRAFTER_2 else ()))
    missing = [key for key in needed if key not in value]
    if "num_target_layers" not in value and counted:
        missing.insert(0, "num_target_layers")
    if missing:
        raise ValueError(f"the drafter's config.json lacks {', '.join(missing)}")
    trunk, filled = read_trunk(all_heads(raw, defaults), defaults)
    bias, targets = filled["attention_bias"], value.get("num_target_layers")
    ids = value.get("target_layer_ids")
    if ids is None:
        assert targets is not None
        ids = default_target_layer_ids(targets, trunk["num_layers"])
    cap, scale = value.get("final_logit_softcapping", 0), value.get("input_embedding_scale")
    shared = dict(
        **trunk,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        block_size=value.get("block_size", 16),
        mask_token_id=value["mask_token_id"],
        target_layer_ids=tuple(ids),
        num_target_layers=targets,
        input_embedding_scale=None if scale is None else float(scale),
        output_multiplier=float(value.get("output_multiplier", 1)),
        final_logit_softcapping=float(cap) if cap > 0 else None,
        draft_vocab_size=value.get("draft_vocab_size"),
    )
    sight = _sight(raw, nested, trunk["num_layers"])
    refuse_variants(raw, nested, sight)
    if name == DRAFTER:
        return DrafterConfig.alike(**shared).attending(*sight)
    second = {key: value[key] for key in OF_DRAFTER_2}
    return Drafter2Config.alike(**shared, **second).attending(*sight)


def _sight(raw: dict[str, Any], nested: dict[str, Any], num_layers: int) -> list[dict[str, Any]]:
    """What each layer of a drafter sees: its window, and whether it is causal.

    Qwen3Config's rules for windows; unless `is_causal` says so for all, those layers are causal
    that have a window. dflash 0.1.0 reads the keys only at the top level, not in its `own`.
    """
    misplaced = [key for key in _SIGHT_KEYS if key in nested and nested[key] != raw.get(key)]
    if misplaced:
        raise ValueError(f"dflash_config says {', '.join(misplaced)}: put it at the top level")
    value = checked(raw, (*_SIGHT_KEYS, "max_window_layers"))
    window, is_causal = raw.get("sliding_window", 4096), value.get("is_causal")
    windowed = _windowed_layers(value, num_layers, window)
    if any(windowed) and not SIZE.holds(window):
        raise ValueError(f"sliding_window must be {SIZE.words}, got {shown(window)}")
    return [
        {"window": window if has else None, "causal": has if is_causal is None else is_causal}
        for has in windowed
    ]


def _windowed_layers(value: dict[str, Any], num_layers: int, window: Any) -> list[bool]:
    """Which layers have a sliding window; a `window` of null means none."""
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
