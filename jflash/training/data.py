"""Conversations as arrays: rows of one length, several conversations a row, nothing shared.

A row knows which of its tokens belong together (`segments`), so no loss lets one conversation see
another. This file knows only tokens: chat templates are applied before, and answers end with their
stop token.
"""

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from jflash.system.files import replacing

RowArray = Array | np.ndarray


class Conversation(NamedTuple):
    """A prompt as the model sees it, template included, and the answer to learn, stop included."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


class Rows(NamedTuple):
    """Token rows; the other arrays are about the token at the same place."""

    tokens: Int[RowArray, "R T"]
    positions: Int[RowArray, "R T"]  # within its conversation, from 0
    segments: Int[RowArray, "R T"]  # 1, 2, … within a row; 0 is padding
    supervised: Bool[RowArray, "R T"]  # answer tokens


def pack(conversations: Iterable[Conversation], row_length: int) -> tuple[Rows, int]:
    """Rows on the host, and how many conversations are longer than a row and left out.

    Best fit, longest first: a conversation goes to the row with the least room that holds it.
    ValueError if none is left.
    """
    sized = [(len(c.prompt_ids) + len(c.answer_ids), c) for c in conversations]
    kept = [item for item in sized if item[0] <= row_length]
    dropped = len(sized) - len(kept)
    if not kept:
        raise ValueError(f"no conversation fits rows of {row_length} tokens ({dropped} are longer)")
    kept.sort(key=lambda item: -item[0])

    rows: list[list[Conversation]] = []
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    for size, conversation in kept:
        room = next((r for r in range(size, row_length + 1) if by_room[r]), None)
        if room is None:
            rows.append([])
            room, row = row_length, len(rows) - 1
        else:
            row = by_room[room].pop()
        rows[row].append(conversation)
        by_room[room - size].append(row)
    return _arrays(rows, row_length), dropped


def _arrays(rows: list[list[Conversation]], row_length: int) -> Rows:
    shape = (len(rows), row_length)
    out = Rows(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, bool)))
    for r, row in enumerate(rows):
        start = 0
        for segment, (prompt, answer) in enumerate(row, start=1):
            middle, end = start + len(prompt), start + len(prompt) + len(answer)
            out.tokens[r, start:middle] = prompt
            out.tokens[r, middle:end] = answer
            out.positions[r, start:end] = np.arange(end - start)
            out.segments[r, start:end] = segment
            out.supervised[r, middle:end] = True
            start = end
    return out


def check_tokens(rows: Rows, vocab_size: int) -> None:
    """ValueError for a token outside the vocabulary (a gather would clamp it silently)."""
    for token in (int(np.min(rows.tokens)), int(np.max(rows.tokens))):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size} tokens")


def followed(supervised: Bool[RowArray, "R T"]) -> Bool[RowArray, "R _"]:
    """Which answer tokens another one of the same answer follows: blocks begin at these.

    It is one place shorter than a row. A prompt is never empty, so two supervised tokens side by
    side are of one conversation.
    """
    return supervised[:, :-1] & supervised[:, 1:]


def check_answers(rows: Rows) -> None:
    """ValueError if no answer has two tokens: a block needs one to begin at and one to foresee."""
    if not np.any(followed(rows.supervised)):
        raise ValueError(
            "no answer has two tokens or more, so there is no block to learn: give longer answers"
        )


def describe(rows: Rows, dropped: int) -> None:
    """Prints what a training run is fed."""
    filled = float(np.mean(rows.segments > 0))
    count, length = rows.tokens.shape
    print(
        f"{int(np.max(rows.segments, axis=1).sum())} conversations in {count} rows of {length} "
        f"tokens, {filled:.0%} filled; {dropped} were longer and left out"
    )


def save_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Writes one .npz of all tokens, one conversation after the other, and their lengths.

    The tokens have the smallest type that holds them. They are not compressed: that took half a
    minute for 90,000 answers and saved a third.
    """
    tokens = np.asarray([i for c in conversations for ids in c for i in ids], np.int32)
    tokens = tokens.astype(np.min_scalar_type(tokens.max(initial=0)))
    with replacing(path) as part, part.open("wb") as file:
        np.savez(
            file,
            tokens=tokens,
            prompt_lengths=np.asarray([len(c.prompt_ids) for c in conversations], np.int32),
            answer_lengths=np.asarray([len(c.answer_ids) for c in conversations], np.int32),
        )


def load_conversations(path: Path) -> list[Conversation]:
    """What save_conversations wrote; ValueError if something damaged it."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            tokens = file["tokens"].tolist()
            prompts, answers = file["prompt_lengths"].tolist(), file["answer_lengths"].tolist()
        if len(prompts) != len(answers) or len(tokens) != sum(prompts) + sum(answers):
            raise ValueError(f"{len(tokens)} tokens are not those of its lengths")
    except (TypeError, ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. Without this file the same command makes it anew"
        ) from None
    conversations, start = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        middle, end = start + prompt, start + prompt + answer
        conversations.append(Conversation(tokens[start:middle], tokens[middle:end]))
        start = end
    return conversations


def random_rows(count: int, row_length: int, vocab_size: int) -> Rows:
    """Rows of random answers, for a plan that measures a step and learns nothing."""
    shape = (count, row_length)
    return Rows(
        tokens=np.random.default_rng(0).integers(0, vocab_size, shape, np.int32),
        positions=np.broadcast_to(np.arange(row_length, dtype=np.int32), shape),
        segments=np.ones(shape, np.int32),
        supervised=np.ones(shape, bool),
    )
