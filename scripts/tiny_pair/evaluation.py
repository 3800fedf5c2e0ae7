"""How good the embedded pair is: right results, acceptance lengths, speed against width 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jflash.acceptance import by_ending
from jflash.compiled.shape import capacity_for
from jflash.generate import PREFILL_CHUNK, Generation, Pair, generate
from jflash.io.text import decode
from jflash.records.decoding import Decoding
from jflash.training.answers import answer_prompts
from tiny_pair.stages import chat_prompts
from tiny_pair.word_problems import Problem, Split, is_correct, problems

EVAL_SEED = 100


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How prompts are decoded."""

    batch_size: int
    decoding: Decoding


def evaluate_split(
    pair: Pair, tokenizer: Any, split: Split, count: int, limits: Limits
) -> dict[str, Any]:
    """Share of right results (in all, by steps, by template) and acceptance of `count` problems."""
    asked = list(problems(split, EVAL_SEED, count))
    answers = _answer(pair, tokenizer, [p.question for p in asked], limits)
    right = [
        is_correct(decode(tokenizer, answer.token_ids), problem)
        for problem, answer in zip(asked, answers, strict=True)
    ]
    return {
        "correct": sum(right) / len(right),
        "correct_by_steps": _shares(right, [str(p.steps) for p in asked]),
        "correct_by_template": _shares(right, [p.template for p in asked]),
        **by_ending(answers, pair.models.block_size),
    }


def evaluate_questions(
    pair: Pair, tokenizer: Any, questions: Sequence[str], limits: Limits
) -> dict[str, Any]:
    """Acceptance on questions whose answers nobody judges."""
    answers = _answer(pair, tokenizer, list(questions), limits)
    return by_ending(answers, pair.models.block_size)


def compare_with_width_1(
    pair: Pair, tokenizer: Any, asked: Sequence[Problem], limits: Limits
) -> dict[str, Any]:
    """Seconds of decoding (prefill apart) with the drafter and of the target alone at width 1.

    One prompt at a time, the two in turns, so that a busy machine slows both. Medians over prompts
    of tokens a second, and of the ratio of one prompt's two times per token.
    """
    alone = pair.plain()
    prompts = chat_prompts(tokenizer, [p.question for p in asked])
    longest, width = max(map(len, prompts)), pair.models.block_size
    # One capacity for both: attention reads the same number of slots.
    capacity = capacity_for(longest, limits.decoding.max_new_tokens, width, PREFILL_CHUNK)

    def timed(of: Pair, prompt: list[int]) -> Generation:
        return generate(of, [prompt], limits.decoding, capacity=capacity)[0]

    for of in (pair, alone):  # compiles, and touches the device once
        timed(of, prompts[0])
    both = [(timed(pair, prompt), timed(alone, prompt)) for prompt in prompts]
    both = [(a, b) for a, b in both if a.steps and b.steps]
    if not both:
        raise ValueError("no prompt has an answer of two tokens: there is nothing to time")
    rates = [(_rate(a), _rate(b)) for a, b in both]
    return {
        "prompts": len(both),
        "drafter_tokens_per_second": median(a for a, _ in rates),
        "width_1_tokens_per_second": median(b for _, b in rates),
        "speed_up": median(a / b for a, b in rates),
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in both),
    }


def _answer(pair: Pair, tokenizer: Any, questions: list[str], limits: Limits) -> list[Generation]:
    return answer_prompts(
        pair, chat_prompts(tokenizer, questions), limits.decoding, batch_size=limits.batch_size
    )


def _shares(right: list[bool], groups: list[str]) -> dict[str, float]:
    found: dict[str, list[bool]] = {}
    for value, group in zip(right, groups, strict=True):
        found.setdefault(group, []).append(value)
    return {group: sum(found[group]) / len(found[group]) for group in sorted(found)}


def _rate(generation: Generation) -> float:
    """Tokens a second of the steps: the prefill's token belongs to none."""
    return (len(generation.token_ids) - 1) / generation.seconds.decode
