"""The law's check in words: a line for each comparison and fault, and why it is not passed."""

from collections.abc import Iterator
from typing import Any


def law_lines(law: dict[str, Any]) -> Iterator[str]:
    """A pair's table."""
    verb = "promise" if law["promised"] else "do not promise"
    backends = ", ".join(f"{op} {backend}" for op, backend in law["backends"].items())
    yield (
        f"{law['pair']}: {law['tokens']} tokens of {law['texts']} texts, {law['anchored_tokens']} "
        f"of them by width 1 and batch 1, in {law['seconds']:.0f} s; its operations {verb} one "
        f"arithmetic ({backends})"
    )
    yield from map(comparison_line, law["compared"])
    yield from map(comparison_line, law["faults"])


def comparison_line(each: dict[str, Any]) -> str:
    """One way, or one planted fault."""
    if "way" in each:
        return f"  {each['way']:<76} {_counts(each)}"
    caught = "caught" if each["caught"] else "NOT CAUGHT"
    return f"  planted: {each['fault']}: {caught}, {_counts(each)}"


def _counts(each: dict[str, Any]) -> str:
    pairs = (("tokens", "tokens"), ("logits_rows", "logits rows"), ("kv_rows", "K/V rows"))
    counts = (f"{each[name]} of {each[f'compared_{name}']} {title}" for name, title in pairs)
    return f"differing: {', '.join(counts)}"


def law_failures(law: dict[str, Any]) -> Iterator[str]:
    """Each comparison in which something differs, and each fault that was not caught."""
    for each in law["compared"]:
        if each["first"]:
            yield (
                f"{law['pair']} is not plain decoding's at {each['way']}: {each['tokens']} tokens, "
                f"{each['logits_rows']} logits rows and {each['kv_rows']} K/V rows differ"
            )
        if not each["compared_logits_rows"]:
            yield f"{law['pair']}, {each['way']}: no logits were compared"
    for each in law["faults"]:
        if not each["caught"]:
            yield (
                f"a planted fault was not caught ({each['fault']}): this check would not see a "
                "real one either"
            )


def shortfalls(law: dict[str, Any]) -> Iterator[str]:
    """Texts that are too short to say much."""
    for kind in ("tokens", "anchored_tokens"):
        have, wanted = law[kind], law[f"{kind}_wanted"]
        if have < wanted:
            yield f"{law['pair']}: only {have} {kind.replace('_', ' ')} were decoded, not {wanted}"
