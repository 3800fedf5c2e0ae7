"""Converts any checkpoint to our form: parameters by Orbax, config and tokenizer unchanged."""

import json
from pathlib import Path
from typing import Any

from jflash.io import hf_config
from jflash.io.checkpoint import open_checkpoint
from jflash.io.load import DTYPES
from jflash.io.orbax_checkpoint import is_orbax, save_orbax
from jflash.io.quantised.scheme import quantisation, unquantised
from jflash.io.whole_folder import check_destination, write_whole
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.system.locks import naming


def convert_checkpoint(
    source: str | Path, destination: str | Path, dtype: str | None = None, overwrite: bool = False
) -> None:
    """Writes the target or drafter at `source` (folder, hub id or GGUF file) in Orbax form.

    Loading it gives the same bits as loading `source`; `dtype` None keeps the stored one.
    ValueError if anything does not fit or cannot be written; nothing half-written stays.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    destination = Path(destination)
    if str(source) and Path(source).exists():  # a hub id's place is known when its files are there
        _check_apart(Path(source), destination)
    _check_converted(destination)
    check_destination(destination, overwrite)
    checkpoint = open_checkpoint(source)
    _check_apart(checkpoint.path, destination)
    fill = checkpoint.check(checkpoint.config(_either))
    companions = checkpoint.companions()

    def write(part: Path) -> None:
        for name, content in companions.items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(content)
        _describe(part / "config.json", dtype)
        save_orbax(part, fill(dtype, False))

    write_whole(destination, overwrite, write)


def _check_converted(destination: Path) -> None:
    """ValueError for a checkpoint in another form: it may be the only copy of its weights."""
    with naming(destination):
        other = (destination / "config.json").exists() and not is_orbax(destination)
    if other:
        why = "a checkpoint that is not a converted one, which is not replaced"
        raise ValueError(f"{destination} holds {why}: give another DST, or remove it first")


def _check_apart(source: Path, destination: Path) -> None:
    """ValueError if writing `destination` would change or replace `source`."""
    ours, theirs = destination.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise ValueError(f"{destination} would change the source {source}: give another DST")


def _either(raw: dict[str, Any]) -> TargetConfig | DrafterConfig:
    if "speculators_model_type" in raw:
        raise ValueError("a drafter in the speculators format is loaded as it is, not converted")
    drafter = hf_config.drafts(hf_config.architecture(raw))
    return (hf_config.drafter_config if drafter else hf_config.target_config)(raw)


def _describe(config: Path, dtype: str | None) -> None:
    """Corrects what config.json says of the weights: their dtype, and that none are quantised."""
    raw = hf_config.read_json(config)
    corrected = {key: dtype for key in ("dtype", "torch_dtype") if dtype and key in raw}
    if corrected or quantisation(raw):
        text = json.dumps(unquantised(raw | corrected), indent=2)
        config.write_text(text + "\n", encoding="utf-8")
