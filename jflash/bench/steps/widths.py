"""Which block width is best: measured step times by width against how many drafts are accepted.

A drafter may run narrower than it was trained: a step then costs less and commits less. How many
rows a step verifies is chosen while it runs, by jflash.budget.row_choice.
"""

from collections.abc import Mapping, Sequence


def geometric_profile(tokens_a_step: float, width: int) -> list[float]:
    """P(at least k drafts are accepted), k = 1 … width - 1, each draft as likely as the last.

    `tokens_a_step` is the mean acceptance length at `width`, bonus included; ValueError outside
    1 … width.
    """
    if not 1 <= tokens_a_step <= width:
        raise ValueError(f"{tokens_a_step} tokens a step: within 1 … {width}")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**k for k in range(width)) < tokens_a_step:
            low = rate
        else:
            high = rate
    return [high**k for k in range(1, width)]


def expected_tokens(accepted: Sequence[float], width: int) -> float:
    """Tokens a step commits at `width`: E[min(a + 1, width)] for a accepted drafts.

    accepted[k - 1] = P(a ≥ k) at a width of at least `width`.
    """
    if not 1 <= width <= len(accepted) + 1:
        raise ValueError(f"width {width}: the profile reaches 1 … {len(accepted) + 1}")
    return 1.0 + sum(accepted[: width - 1])


def best_width(ms: Mapping[int, float], accepted: Sequence[float]) -> int:
    """The width with the most expected tokens a second; the narrower of two that are equal."""
    usable = sorted(width for width in ms if width <= len(accepted) + 1)
    if not usable:
        raise ValueError(f"no width of {sorted(ms)} is within {len(accepted) + 1}")
    return max(usable, key=lambda width: expected_tokens(accepted, width) / ms[width])
