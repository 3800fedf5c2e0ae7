"""What an answer's line must hold, before anything reads it: somebody may have edited the file."""

from math import isfinite
from typing import Any

PARTS = ("compile", "prefill", "decode")  # of an answer's seconds
KINDS = {
    **{"index": int, "turn": int, "text": str, "prompt_tokens": int, "finish_reason": str},
    "seconds": dict,
}


def missing(record: Any) -> str | None:
    """The name of the first thing that a record lacks, or has as something else; None if none."""
    if not isinstance(record, dict):
        return "every field"
    for name, kind in KINDS.items():
        if type(record.get(name)) is not kind:
            return name
    for name, least in (("token_ids", 1), ("acceptance_lengths", 0)):
        value = record.get(name)
        if not isinstance(value, list) or len(value) < least:
            return name
        if any(type(i) is not int or not 0 <= i < 2**31 for i in value):
            return name
    for part in (*PARTS, *record["seconds"]):
        value = record["seconds"].get(part)
        if part not in PARTS or type(value) not in (int, float) or not isfinite(value):
            return f"seconds of {part}"
    check = record.get("check", ())  # None of what is not judged
    judged = isinstance(check, dict) and isinstance(check.get("rule"), str)
    if check is not None and not (judged and isinstance(check.get("correct"), bool)):
        return "check"
    return None
