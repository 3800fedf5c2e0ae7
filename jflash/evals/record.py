"""What an answer's line must hold, before anything reads it: somebody may have edited the file."""

from math import isfinite
from typing import Any

from jflash.records.decoding import are_whole

PARTS = ("compile", "prefill", "decode")  # of an answer's seconds
KINDS = {
    "index": int, "turn": int, "text": str, "prompt_tokens": int, "finish_reason": str,
    "seconds": dict,
}  # fmt: skip


def missing(record: Any) -> str | None:
    """The name of the first thing that a record lacks, or has as something else; None if none."""
    if not isinstance(record, dict):
        return "every field"
    for name, kind in KINDS.items():
        if type(record.get(name)) is not kind:
            return name
    for name in ("token_ids", "acceptance_lengths"):
        if not are_whole(record.get(name)):
            return name
    if not record["token_ids"]:
        return "token_ids"
    seconds = record["seconds"]
    for part in PARTS:
        if type(seconds.get(part)) not in (int, float) or not isfinite(seconds[part]):
            return f"seconds of {part}"
    if other := seconds.keys() - PARTS:
        return f"seconds of {min(other)}"
    check = record.get("check", ())  # None of what is not judged
    judged = isinstance(check, dict) and isinstance(check.get("rule"), str)
    if check is not None and not (judged and isinstance(check.get("correct"), bool)):
        return "check"
    return None
