"""What is wrong with a body that is no JSON, where the decoder's own words mislead."""

import json
import re

HALF = re.compile("[\ud800-\udfff]")


def why(body: bytes, error: Exception) -> str:
    """One line; the decoder's unless it would send the client elsewhere."""
    if not body.strip():
        return "the body is empty: send a JSON object"
    if (half := _half_of_a_pair(body)) is not None:
        return (
            f"the body is not JSON: \\u{ord(half):x} is half of a character, as of an emoji that "
            "was cut: send the whole one"
        )
    return f"the body is not JSON: {error}"


def _half_of_a_pair(body: bytes) -> str | None:
    """The first half of a surrogate pair in a body that Python reads: msgspec calls it truncated
    data."""
    try:
        value = json.loads(body)
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    found = HALF.search(text)
    return found and found[0]
