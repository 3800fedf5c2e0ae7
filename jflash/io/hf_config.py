"""config.json of Hugging Face checkpoints to jflash's records: nothing is guessed.

FAMILIES is the one list of families; the module of a family reads its keys.
"""

import json
from pathlib import Path
from typing import Any

from jflash.io.families import (
    dflash,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    muse_assistant,
    muse_glimmer,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    speculators,
)
from jflash.io.families.dflash import (
    DRAFTER,
    DRAFTER_2,
    UNCOUNTED,
    drafter,
    with_targets_head,
)
from jflash.io.hf_values import checked
from jflash.io.names import Names
from jflash.records.config import DrafterConfig, TargetConfig

FAMILIES = (
    qwen3, qwen3_moe, qwen2, llama, mistral, qwen3_5, qwen3_5_moe, qwen3_next, gpt_oss, gemma3,
    minimax_m2, glm4_moe, glm4, gemma4, muse_glimmer,
)  # fmt: skip
TARGETS = {family.ARCHITECTURE: family.MODEL_TYPE for family in FAMILIES}


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
    names = checked(raw, ["architectures"]).get("architectures", [])
    if len(names) != 1:
        raise ValueError(f"config.json must name one architecture, not {names}")
    return names[0]


def target_config(raw: dict[str, Any]) -> TargetConfig:
    """A decoder's config; ValueError for another architecture or an unsupported feature."""
    name = architecture(raw)
    family = _family(name)
    if family is not None:
        tied = family.DEFAULTS["tie_word_embeddings"]
        seen = getattr(family, "UNREAD", {})
        own = text_config(raw, tied, seen) if _sees(family, name) else raw
        if checked(own, ["is_causal"]).get("is_causal") is False:  # as embedding models say it
            raise ValueError(
                "is_causal false: tokens of such a model attend to later ones, so it continues no "
                "text: take a model that generates"
            )
        return family.target(own)
    hint = " (a drafter: give it as --drafter)" if drafts(name) else ""
    raise ValueError(f"unsupported target {_printed(name)}{hint}; supported: {', '.join(TARGETS)}")


def drafts(name: str) -> bool:
    """Whether an architecture is a drafter's."""
    return "DFlash" in name or name == muse_assistant.ARCHITECTURE


def names_of(raw: dict[str, Any]) -> Names:
    """The names of the tensors beside a config.json that one of the readers took."""
    if speculators.MODEL_TYPE in raw:
        return speculators.NAMES
    name = architecture(raw)
    if name == muse_assistant.ARCHITECTURE:
        return muse_assistant.NAMES
    family = _family(name)
    return dflash.NAMES if family is None else family.NAMES


def _family(name: str) -> Any:
    """The module of the family whose architecture this is; None if it is no target's."""
    for f in FAMILIES:
        if name == f.ARCHITECTURE or _sees(f, name):
            return f
    return None


def _sees(family: Any, name: str) -> bool:
    """Whether an architecture is that of the family's vision models, which have a text_config."""
    return name in (getattr(family, "SEEING", None), *getattr(family, "ALIKE", ()))


def text_config(raw: dict[str, Any], tied: bool, unread: dict[str, int]) -> dict[str, Any]:
    """The text model's config in that of a vision-language model, with the shared keys added.

    Where the whole config does not say it, `tied` is whether the head is the embedding, and
    `unread` has the ids that stand for images, videos and sound, by their keys.
    """
    whole = checked(raw, ("text_config", "tie_word_embeddings", "quantization_config"))
    if "text_config" not in whole:
        raise ValueError(f"config.json of {architecture(raw)} lacks text_config")
    kept = ["quantization_config", "image_token_index"]
    kept += [f"{kind}_token_id" for kind in ("image", "video", "audio")]
    text = whole["text_config"]
    shared = {"tie_word_embeddings": whole.get("tie_word_embeddings", tied)}
    shared |= {key: token for key, token in unread.items() if text.get(key) is None}
    return text | shared | {key: whole[key] for key in kept if key in whole}


def drafter_config(raw: dict[str, Any]) -> DrafterConfig:
    """A drafter's config, version 1 or 2; ValueError for another or an unsupported feature."""
    if speculators.MODEL_TYPE in raw:
        raw = speculators.flat(raw)
        defaults = speculators.defaults(raw)
        return drafter(raw, architecture(raw), counted=False, defaults=defaults)
    name = architecture(raw)
    if name == muse_assistant.ARCHITECTURE:
        raw = with_targets_head(muse_assistant.flat(raw))
        return drafter(raw, DRAFTER, counted=False)
    if name not in (DRAFTER, DRAFTER_2):
        known = ", ".join((DRAFTER, DRAFTER_2, muse_assistant.ARCHITECTURE))
        raise ValueError(f"unsupported drafter {_printed(name)}; supported: {known}")
    counted = raw.get("model_type") != UNCOUNTED
    return drafter(with_targets_head(raw), name, counted=counted)


def _printed(name: str) -> str:
    """A name from a file, in one line."""
    return " ".join(name.split())
