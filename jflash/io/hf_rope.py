"""RoPE of a Hugging Face config: `rope_parameters` (transformers 5) or `rope_theta` and
`rope_scaling` (older files), read as transformers' rope utilities do.

A kind that is not implemented is a ValueError that names it.
"""

import math
from typing import Any

from jflash.io.hf_values import checked, is_number, shown
from jflash.records.specs import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)

DEFAULT_ROPE_THETA = 10000.0
KINDS = ("default", "linear", "llama3", "yarn", "proportional")


def rope_config(
    raw: dict[str, Any],
    max_position_embeddings: int,
    head_dim: int = 0,
    share: float | None = None,
) -> RopeConfig:
    """The RoPE of a config.json; ValueError for what is not supported or makes no sense.

    `share`: the family's partial_rotary_factor, for config.json without one; None: whole heads.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # transformers' order
    nested = [name for name, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"rope_parameters of {', '.join(nested)}: another RoPE for some layers is not supported"
        )
    theta = given.get("rope_theta") or raw.get("rope_theta")
    theta = _number({"rope_theta": theta}, "rope_theta", DEFAULT_ROPE_THETA)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise ValueError(f"rope_type {kind!r} is not supported, only {', '.join(KINDS)}")
    if theta <= 1:
        raise ValueError(f"rope_theta must be above 1, got {theta}")
    if kind == "proportional":
        return RopeConfig(theta=theta, scaling=_proportional(given, raw, head_dim))
    rotary_dim = _rotary_dim(given, raw, head_dim, share)
    if kind == "default":
        return RopeConfig(theta=theta, scaling=None, rotary_dim=rotary_dim)
    if kind == "linear":
        linear = LinearScaling(factor=_number(given, "factor"))
        return RopeConfig(theta=theta, scaling=linear, rotary_dim=rotary_dim)
    checked(given, ["truncate"])
    read = _llama3 if kind == "llama3" else _yarn
    # Some families keep it beside the RoPE parameters, where it takes precedence.
    name = "original_max_position_embeddings"
    given = given | ({name: raw[name]} if raw.get(name) is not None else {})
    scaling = read(given, max_position_embeddings)
    return RopeConfig(theta=theta, scaling=scaling, rotary_dim=rotary_dim)


def rope_by_kind(
    raw: dict[str, Any], kinds: dict[str, dict[str, Any]], head_dims: dict[str, int]
) -> dict[str, RopeConfig]:
    """The RoPE of each kind of layer: its entry of `rope_parameters`, else that of `kinds`.

    An entry without a theta has that of `kinds`, and null is no entry.
    """
    given = checked(raw, ["rope_parameters"]).get("rope_parameters", {})
    given = {name: value for name, value in given.items() if value is not None}
    if kinds.keys() <= given.keys() and given.get("rope_type") == "default":
        del given["rope_type"]  # transformers 5.15 adds it if all layers are of one kind
    strange = [name for name in given if name not in kinds or type(given[name]) is not dict]
    if strange:
        raise ValueError(
            f"rope_parameters must have an object for each of {' and '.join(kinds)}, "
            f"got {', '.join(map(shown, strange))}"
        )
    ropes = {}
    for kind, default in kinds.items():
        own = {k: v for k, v in given.get(kind, default).items() if v is not None}
        own = {"rope_theta": default["rope_theta"]} | own
        _refuse_beside(raw, kind, own)
        most = raw["max_position_embeddings"]
        ropes[kind] = rope_config({"rope_parameters": own}, most, head_dims[kind])
    return ropes


def _refuse_beside(raw: dict[str, Any], kind: str, own: dict[str, Any]) -> None:
    """ValueError for a partial_rotary_factor for all kinds of layers that is not that of `own`.

    transformers puts it in place of a kind's own, unless the kind is rotated by a plain RoPE.
    """
    name, form = "partial_rotary_factor", own.get("rope_type") or own.get("type") or "default"
    if form != "default" and raw.get(name) not in (None, own.get(name, 1.0)):
        raise ValueError(
            f"{name} {shown(raw[name])} beside rope_parameters, whose {kind} has "
            f"{shown(own.get(name, 1.0))}: keep the one that is meant"
        )


def _proportional(given: dict[str, Any], raw: dict[str, Any], head_dim: int) -> ProportionalScaling:
    """How many frequencies turn, as transformers counts them."""
    name = "partial_rotary_factor"
    share = next((p[name] for p in (given, raw) if p.get(name) is not None), 1.0)
    turning = int(share * head_dim // 2) if is_number(share) and share <= 1 else 0
    if not 1 <= turning <= head_dim // 2:
        raise ValueError(f"{name} {share!r} must turn some of the {head_dim // 2} pairs of a head")
    return ProportionalScaling(turning=turning, factor=_number(given, "factor", 1.0))


def _rotary_dim(
    given: dict[str, Any], raw: dict[str, Any], head_dim: int, share: float | None
) -> int | None:
    """How many dims of a head RoPE rotates; None for all. `given` takes precedence over `raw`."""
    name = "partial_rotary_factor"
    places = [place[name] for place in (given, raw) if place.get(name) is not None]
    if share is None:
        if any(value != 1 for value in places):
            raise ValueError(f"{name}: partial rotary embedding is not supported")
        return None
    factor = places[0] if places else share
    dims = int(head_dim * factor) if is_number(factor) and factor <= 1 else 0
    if not 2 <= dims <= head_dim or dims % 2:
        raise ValueError(
            f"{name} {factor!r} must rotate an even number of the {head_dim} dims of a head"
        )
    return None if dims == head_dim else dims


def _llama3(given: dict[str, Any], max_position_embeddings: int) -> Llama3Scaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in names if given.get(name) is None]
    if missing:
        raise ValueError(f"llama3 RoPE scaling lacks {', '.join(missing)}")
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    name = "original_max_position_embeddings"
    return Llama3Scaling(
        factor=_number(given, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_whole(given, name, max_position_embeddings),
    )


def _yarn(given: dict[str, Any], max_position_embeddings: int) -> YarnScaling:
    name = "original_max_position_embeddings"
    original = _whole(given, name, max_position_embeddings)
    factor = _number(given, "factor", max_position_embeddings / original)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        attention_factor=_attention_factor(given, factor),
        truncate=bool(given.get("truncate", True)),  # null is false to transformers
    )


def _attention_factor(given: dict[str, Any], factor: float) -> float:
    """YaRN's, as given or by the factor; DeepSeek and Kimi give the two parts of a ratio."""

    def by_factor(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        above, below = _number(given, "mscale"), _number(given, "mscale_all_dim")
        return by_factor(above) / by_factor(below)
    return by_factor()


def _number(given: dict[str, Any], name: str, default: int | float | None = None) -> float:
    """A number above 0; 0, null and an absent key mean the default."""
    value = given.get(name) or default
    if not is_number(value) or value <= 0:
        raise ValueError(f"RoPE needs the number {name}, above 0, got {given.get(name)!r}")
    return float(value)


def _whole(given: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number above 0."""
    value = _number(given, name, default)
    if value % 1:
        raise ValueError(f"RoPE needs the whole number {name}, got {value}")
    return int(value)
