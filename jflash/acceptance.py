"""Acceptance lengths and endings of many decodings, as plain numbers for a table or a JSON line."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jflash.generate import Generation

LOOP_RUN, LOOP_TIMES = 20, 3


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether some run of 20 tokens occurs 3 times, overlaps counted.

    A looping text is easy to predict and says nothing about how well a drafter works.
    """
    raw = np.asarray(token_ids, np.int32).tobytes()  # bytes hash four times as fast as tuples
    runs = (raw[4 * i : 4 * (i + LOOP_RUN)] for i in range(len(token_ids) - LOOP_RUN + 1))
    return max(Counter(runs).values(), default=0) >= LOOP_TIMES


def ending(generation: Generation) -> str:
    """'looping', else 'limit' (cut by max_new_tokens), else 'ended' (by a stop token)."""
    if is_looping(generation.token_ids):
        return "looping"
    return "ended" if generation.finish_reason == "stop" else "limit"


def acceptance(generations: Sequence[Generation], width: int) -> dict[str, Any]:
    """τ two ways and the histogram of steps that committed 1 … width tokens.

    `tau_pooled` divides by all steps together, `tau_mean_of_means` is the mean over prompts of each
    prompt's mean; None without a step.
    """
    lengths = [length for g in generations for length in g.acceptance_lengths]
    means = [g.mean_acceptance_length for g in generations if g.mean_acceptance_length is not None]
    counts = Counter(lengths)
    return {
        "prompts": len(generations),
        "new_tokens": sum(len(g.token_ids) for g in generations),
        "steps": len(lengths),
        "tau_pooled": sum(lengths) / len(lengths) if lengths else None,
        "tau_mean_of_means": sum(means) / len(means) if means else None,
        "histogram": [counts[i] for i in range(1, width + 1)],
    }


def by_ending(generations: Sequence[Generation], width: int) -> dict[str, Any]:
    """`acceptance` of all answers, of those that ended, and of the rest; and counts of endings."""
    kinds = [ending(g) for g in generations]
    ended = [g for g, kind in zip(generations, kinds, strict=True) if kind == "ended"]
    rest = [g for g, kind in zip(generations, kinds, strict=True) if kind != "ended"]
    return {
        "all": acceptance(generations, width),
        "ended": acceptance(ended, width),
        "limit_or_looping": acceptance(rest, width),
        "endings": {kind: kinds.count(kind) for kind in ("ended", "limit", "looping")},
    }
