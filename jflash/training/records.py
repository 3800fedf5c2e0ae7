"""The records that a drafter learns from: read from a file, without long and held-out ones."""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from jflash.system.json_lines import json_lines
from jflash.training.data import Conversation

Encode = Callable[[str], list[int]]


def read_records(
    path: Path, encode: Encode, encode_answer: Encode, vocab_size: int,
    unread: Collection[int] = (),
) -> list[Conversation]:  # fmt: skip
    """Lines {"prompt" or "prompt_ids", optionally "answer" or "answer_ids"} as token ids.

    A line without an answer gets an empty one. ValueError names the line that does not fit, one
    with an id of `unread` too.
    """
    records = []
    for where, record in json_lines(path):
        if not ("prompt" in record or "prompt_ids" in record):
            raise ValueError(f'{where} has neither "prompt" nor "prompt_ids"')
        for name in ("prompt", "answer"):
            if name in record and f"{name}_ids" in record:
                raise ValueError(f'{where} has both "{name}" and "{name}_ids": give one of them')
        prompt = _ids(record, "prompt", encode, where)
        if not prompt:
            raise ValueError(f"{where}: the prompt is empty")
        answer = _ids(record, "answer", encode_answer, where)
        outside = [i for i in (*prompt, *answer) if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(
                f"{where}: token id {outside[0]} is outside the vocabulary of {vocab_size} tokens"
            )
        images = [i for i in (*prompt, *answer) if i in unread]
        if images:
            raise ValueError(
                f"{where}: token id {images[0]} stands for an image or a video: only text is read"
            )
        records.append(Conversation(prompt, answer))
    if not records:
        raise ValueError(f"{path} holds no record")
    return records


def _ids(record: dict, name: str, encode: Encode, where: str) -> list[int]:
    ids, text = record.get(f"{name}_ids"), record.get(name)
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ValueError(f"{where}: {name}_ids must be a list of integers")
        return ids
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {name} must be a string, got {text!r}")
    try:
        return encode(text) if text else []
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def without_long(records: list[Conversation], longest: int) -> tuple[list[Conversation], int]:
    """The records whose prompt leaves room for a token within `longest`, and how many do not."""
    kept = [r for r in records if len(r.prompt_ids) < longest]
    if not kept:
        shortest = min(len(r.prompt_ids) for r in records)
        raise ValueError(
            f"all {len(records)} prompts are too long for {longest} tokens (the shortest has "
            f"{shortest}): a longer --row-length holds them, if the target has the positions"
        )
    return kept, len(records) - len(kept)


def split_held_out(
    records: list[Conversation], count: int, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """The records to learn, and `count` prompts held out by the seed; equal ones stay together."""
    prompts = list(dict.fromkeys(tuple(r.prompt_ids) for r in records))
    if count >= len(prompts):
        raise ValueError(f"{count} of {len(prompts)} different prompts held out leave none")
    drawn = np.random.default_rng(seed).permutation(len(prompts))[:count]
    held = {prompts[i] for i in drawn}
    return (
        [r for r in records if tuple(r.prompt_ids) not in held],
        [Conversation(list(prompts[i]), []) for i in sorted(drawn)],
    )


def without_held_out(records: list[Conversation], held: list[Conversation]) -> list[Conversation]:
    """The records to learn: those whose prompt is none of `held`. ValueError if none is left."""
    prompts = {tuple(h.prompt_ids) for h in held}
    learnt = [r for r in records if tuple(r.prompt_ids) not in prompts]
    if not learnt:
        raise ValueError(f"all {len(records)} prompts are held out: none is left to learn")
    if len(learnt) < len(records):
        print(f"{len(records) - len(learnt)} of {len(records)} prompts are held out: not learnt")
    return learnt
