"""From any form of a checkpoint to ours: parameters by Orbax, config and tokenizer as they were."""

import json
import shutil
from pathlib import Path
from typing import Any

from jflash.io import hf_config
from jflash.io.gguf_file import is_gguf
from jflash.io.load import (
    DTYPES,
    check_params,
    load_params,
    raw_config,
    read_config,
    resolve,
)
from jflash.io.orbax_checkpoint import check_destination, save_orbax, write_whole
from jflash.io.text import has_tokenizer, load_tokenizer

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


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
    check_destination(destination, overwrite)
    folder = resolve(source)
    _check_apart(folder, destination)
    config = read_config(folder, _either)
    check_params(folder, config)
    tokenizer = load_tokenizer(folder) if is_gguf(folder) and has_tokenizer(folder) else None

    def fill(part: Path) -> None:
        if is_gguf(folder):
            _write_json(part / "config.json", raw_config(folder))
        for name in COMPANIONS:
            if (folder / name).exists():
                shutil.copyfile(folder / name, part / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        if dtype is not None:
            _name_dtype(part / "config.json", dtype)
        save_orbax(part, load_params(folder, config, dtype))

    write_whole(destination, overwrite, fill)


def _check_apart(source: Path, destination: Path) -> None:
    """ValueError if writing `destination` would change or replace `source`."""
    ours, theirs = destination.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise ValueError(f"{destination} would change the source {source}: give another DST")


def _either(raw: dict[str, Any]):
    drafter = "DFlash" in hf_config.architecture(raw)
    return (hf_config.drafter_config if drafter else hf_config.target_config)(raw)


def _name_dtype(config: Path, dtype: str) -> None:
    """Corrects what config.json says of the weights; some files call it dtype, some torch_dtype."""
    raw = hf_config.read_json(config)
    said = {key: dtype for key in ("dtype", "torch_dtype") if key in raw}
    _write_json(config, raw | said)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
