"""Many prompts through one compiled shape: what a drafter learns from, and what evals count."""

from collections.abc import Sequence

from tqdm import tqdm

from jflash.generate import PREFILL_CHUNK, Generation, Pair, check_request, generate
from jflash.programs import capacity_for


def answer_prompts(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
) -> list[Generation]:
    """Greedy answers in the order of the prompts, decoded in batches of one compiled shape.

    A batch holds prompts of like length; the last repeats a prompt to be full. ValueError for a
    prompt that does not fit, before anything runs.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not prompts:
        raise ValueError("no prompts to answer")
    for prompt in prompts:
        check_request(pair.models, prompt, max_new_tokens, stop_token_ids)
    longest, width = max(map(len, prompts)), pair.models.block_size
    capacity = capacity_for(longest, max_new_tokens, width, PREFILL_CHUNK)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Generation] = {}
    with tqdm(total=len(prompts), desc="answers", unit="prompt") as bar:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            filled = batch + batch[-1:] * (batch_size - len(batch))
            done = generate(
                pair,
                [prompts[i] for i in filled],
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                capacity=capacity,
            )
            answers |= dict(zip(batch, done, strict=False))  # what repeats a prompt falls off
            bar.update(len(batch))
    return [answers[i] for i in range(len(prompts))]
