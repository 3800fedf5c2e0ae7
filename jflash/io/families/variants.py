"""Variants of DFlash drafters that other programs compute and jflash does not, refused by name.

A drafter whose variant is ignored loads, and few of its tokens are accepted: nothing says why.
"""

from pathlib import Path
from typing import Any

from jflash.io.hf_values import shown

MASK_ROW = "mask_embedding.pt"
_PLAIN = "only plain DFlash drafts are supported, so take another drafter"
_SINKS = "sinks of drafters are not supported, so take another drafter"
_HALVES = "only heads that turn by halves (true) are supported, so take another drafter"
_WINDOWS = "say windows at the top level, by layer_types, use_sliding_window and sliding_window"
# Key -> what to do about a value that jflash does not compute.
_INSTEAD = {
    "use_swa": _WINDOWS,
    "swa_window_size": _WINDOWS,
    "causal": "say it at the top level, by is_causal, for all layers",
    "attention_sink_bias": _SINKS,
    "add_swa_attention_sink_bias": _SINKS,
    "attention_value_scale": "multiply v_proj's weights and biases by it and remove the key",
    "is_neox_style": _HALVES,
    "rope_is_neox_style": _HALVES,
    "projector_type": _PLAIN,
    "sample_from_anchor": _PLAIN,
    "shift_label": _PLAIN,
}
KEYS = tuple(_INSTEAD)
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "projector_type": ("dflash",),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
}


def refuse_variants(
    raw: dict[str, Any], nested: dict[str, Any], sight: list[dict[str, Any]]
) -> None:
    """ValueError for the first value in a drafter's config that jflash does not compute.

    `nested` is its `dflash_config`. `sight` has the `window` and the `causal` with which each
    layer is computed: `causal` in the file is that of all layers, `use_swa` gives all a window
    where none has one, and `swa_window_size` is the size of those that have one.
    """
    windows, causal = ({each[key] for each in sight} for key in ("window", "causal"))
    computed = _COMPUTED | {
        "use_swa": (False,) if None in windows else (False, True),
        "causal": tuple(causal) if len(causal) == 1 else (),
    }
    if windows != {None}:
        computed["swa_window_size"] = tuple(windows - {None})
    for place, given in (("", raw), (" in dflash_config", nested)):
        for key, known in computed.items():
            value = given.get(key)
            if value is not None and value not in known:
                raise ValueError(f"{key} {shown(value)}{place}: {_INSTEAD[key]}")


def refuse_own_mask(folder: Path) -> None:
    """ValueError if a drafter's folder holds a row of its own for masked places."""
    if (folder / MASK_ROW).exists():
        raise ValueError(
            f"{folder / MASK_ROW}: a drafter's own mask embedding is not supported; remove the "
            "file only if its row is that of mask_token_id in the embedding"
        )
