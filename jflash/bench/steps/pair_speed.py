"""Tokens a second of a real pair on real prompts, beside plain decoding.

`jflash.generate` measures it, without prefill and compilation. It means nothing for random weights.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jflash.acceptance import ending
from jflash.compiled.shape import capacity_for
from jflash.generate import PREFILL_CHUNK, Generation, Pair, generate
from jflash.records.decoding import Decoding


def measured_speed(
    pair: Pair, prompts: Sequence[Sequence[int]], batch: int, decoding: Decoding, repeats: int = 3
) -> dict[str, Any]:
    """Tokens a second over all sequences, with the drafter and at width 1, and their ratio.

    Prompts repeat in turn until they fill whole batches of `batch`. The rates are medians of
    `repeats` runs.
    """
    count = -(-len(prompts) // batch) * batch
    filled = [prompts[i % len(prompts)] for i in range(count)]
    longest = max(map(len, filled))
    # One capacity for both: attention reads the same number of slots.
    capacity = capacity_for(longest, decoding.max_new_tokens, pair.models.block_size, PREFILL_CHUNK)

    def decode(of: Pair) -> list[list[Generation]]:
        batches = [filled[i : i + batch] for i in range(0, count, batch)]
        return [generate(of, prompts, decoding, capacity=capacity) for prompts in batches]

    rates, answers = {}, {}
    for name, of in (("with_drafter", pair), ("plain", pair.plain())):
        decode(of)  # compiles, and touches the device once
        runs = [decode(of) for _ in range(repeats)]
        rates[name] = statistics.median(map(_tokens_per_second, runs))
        answers[name] = [g for batches in runs[0] for g in batches]
    drafted = answers["with_drafter"]
    steps = sum(g.steps for g in drafted)
    both = zip(drafted, answers["plain"], strict=True)
    return {
        "how": "measured: jflash.generate on real prompts, prefill and compilation apart",
        "prompts": count,
        "different_prompts": len(prompts),
        "max_new_tokens": decoding.max_new_tokens,
        "new_tokens": sum(len(g.token_ids) for g in drafted),
        "mean_acceptance_length": sum(sum(g.acceptance_lengths) for g in drafted) / max(1, steps),
        "endings": Counter(ending(g) for g in drafted),  # a looping text is easy to foresee
        "tokens_per_second": rates["with_drafter"],
        "plain_tokens_per_second": rates["plain"],
        "speed_up": rates["with_drafter"] / rates["plain"],
        "same_text_as_plain": sum(a.token_ids == b.token_ids for a, b in both),
    }


def _tokens_per_second(batches: list[list[Generation]]) -> float:
    """Tokens of the steps over the seconds of the steps."""
    tokens = sum(sum(g.acceptance_lengths) for batch in batches for g in batch)
    if not tokens:
        raise ValueError("no prompt has an answer of two tokens: there is nothing to time")
    return tokens / sum(batch[0].seconds.decode for batch in batches)
