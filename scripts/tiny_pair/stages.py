"""The recipe of the embedded pair: a tiny target for grade-school maths, and its DFlash drafter.

Stages, each of which leaves its result on disk and is skipped once it is there:
tokenizer → target (trained, rounded to bfloat16) → answers (by that target) → drafter.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jflash.io import load_pair, load_target, load_tokenizer, save_checkpoint
from jflash.records.decoding import Decoding
from jflash.training.answers import answer_prompts
from jflash.training.data import Conversation, load_conversations, save_conversations
from jflash.training.drafter import train_drafter
from jflash.training.prompts import overlap, read_gsm8k, renumbered
from tiny_pair.recipe import Recipe
from tiny_pair.target_lm import train_target
from tiny_pair.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL,
    encode_texts,
    save_tokenizer,
    train_tokenizer,
)
from tiny_pair.word_problems import problems

STAGES = ("tokenizer", "target", "answers", "drafter")
END_OF_TEXT_ID, END_OF_TURN_ID = SPECIAL.index(END_OF_TEXT), SPECIAL.index(END_OF_TURN)
TOKENIZER_PROBLEMS = 50_000  # more of them teach a tokenizer nothing new
EXAMPLE_SEEDS = {"target": 1, "answers": 2}  # the drafter learns on prompts new to the target


class Workplace(NamedTuple):
    """Folders of a run: the pair to ship, and what it is made of."""

    output: Path
    work: Path

    @property
    def target(self) -> Path:
        return self.output / "target"

    @property
    def drafter(self) -> Path:
        return self.output / "drafter"

    @property
    def tokenizer(self) -> Path:
        return self.work / "tokenizer"

    @property
    def answers(self) -> Path:
        return self.work / "answers.npz"

    def made(self, stage: str) -> bool:
        """Whether a stage has left its result."""
        results = {
            "tokenizer": self.tokenizer / "tokenizer.json",
            "target": self.target / "config.json",
            "answers": self.answers,
            "drafter": self.drafter / "config.json",
        }
        return results[stage].exists()


class Gsm8k(NamedTuple):
    """Files of GSM8K: `train` is learnt from, cleaned of what it shares with `test`."""

    train: Path
    test: Path


def clean_gsm8k(gsm8k: Gsm8k) -> list[tuple[str, str]]:
    """The training set without those that share 13 words in a row with a test question."""
    test = [question for question, _ in read_gsm8k(gsm8k.test)]
    train = read_gsm8k(gsm8k.train)
    shared = set(overlap((question for question, _ in train), test))
    print(f"GSM8K: {len(shared)} of {len(train)} training questions overlap the test set: left out")
    return [(question, answer) for question, answer in train if question not in shared]


def made_up(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Questions and answers of the training split."""
    return ((p.question, p.answer) for p in problems("train", seed, count))


def chat_prompts(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Token ids of each question as a user's turn, ready for the assistant's."""
    # The template is rendered once: it is the same for everyone, and slow.
    mark = "\ue000"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(mark)
    return encode_texts(tokenizer, [before + question + after for question in questions])


def conversations(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[Conversation]:
    """Questions and answers as token ids; every answer ends its turn."""
    prompts = chat_prompts(tokenizer, [question for question, _ in pairs])
    answers = encode_texts(tokenizer, [answer for _, answer in pairs])
    return [Conversation(p, [*a, END_OF_TURN_ID]) for p, a in zip(prompts, answers, strict=True)]


def make_tokenizer(recipe: Recipe, place: Workplace, gsm8k: Gsm8k | None) -> None:
    """Stage 1: a vocabulary for these texts."""
    pairs = list(made_up(min(recipe.problems, TOKENIZER_PROBLEMS), EXAMPLE_SEEDS["target"]))
    pairs += clean_gsm8k(gsm8k) if gsm8k else []
    texts = (text for q, a in pairs for text in (f"system\nuser\n{q}", f"assistant\n{a}"))
    config = recipe.target
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
    print(f"tokenizer: {len(tokenizer)} ids")
    save_tokenizer(tokenizer, place.tokenizer)


def make_target(
    recipe: Recipe, place: Workplace, gsm8k: Gsm8k | None, should_stop: Callable[[int], bool]
) -> None:
    """Stage 2: the target, from scratch; saved in bfloat16 with its tokenizer once it is done."""
    tokenizer = load_tokenizer(place.tokenizer)
    found = conversations(tokenizer, list(made_up(recipe.problems, EXAMPLE_SEEDS["target"])))
    if gsm8k:
        found += conversations(tokenizer, clean_gsm8k(gsm8k)) * recipe.gsm8k_repeats
    trained = train_target(
        recipe.target, found, row_length=recipe.row_length, prompt_weight=recipe.prompt_weight,
        training=recipe.target_training, directory=place.work / "target_training",
        should_stop=should_stop,
    )  # fmt: skip
    if trained.step == recipe.target_training.steps:
        save_tokenizer(tokenizer, place.target)
        extra = {"eos_token_id": END_OF_TURN_ID, "pad_token_id": END_OF_TEXT_ID}
        save_checkpoint(place.target, recipe.target, trained.params, extra_config=extra)


def make_answers(recipe: Recipe, place: Workplace, gsm8k: Gsm8k | None) -> None:
    """Stage 3: the rounded target's own answers; those that do not end are left out."""
    questions = [q for q, _ in made_up(recipe.answers, EXAMPLE_SEEDS["answers"])]
    if gsm8k:
        known = [question for question, _ in clean_gsm8k(gsm8k)]
        questions += known
        rng = random.Random(EXAMPLE_SEEDS["answers"])
        questions += [renumbered(q, rng) for q in known for _ in range(recipe.gsm8k_variants)]
    prompts = chat_prompts(load_tokenizer(place.target), questions)
    answers = answer_prompts(
        load_pair(place.target), prompts,
        Decoding(max_new_tokens=recipe.max_new_tokens, stop_token_ids=(END_OF_TURN_ID,)),
        batch_size=recipe.answer_batch,
    )  # fmt: skip
    ended = [
        Conversation(prompt, answer.token_ids)
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.finish_reason == "stop"
    ]
    print(f"answers: {len(ended)} of {len(answers)} end within {recipe.max_new_tokens} tokens")
    # A smoke run's target may never stop; its drafter still needs something to learn.
    kept = ended or [Conversation(p, a.token_ids) for p, a in zip(prompts, answers, strict=True)]
    save_conversations(place.answers, kept)


def make_drafter(recipe: Recipe, place: Workplace, should_stop: Callable[[int], bool]) -> None:
    """Stage 4: the drafter, against the rounded target; saved in bfloat16 once it is done."""
    target, params = load_target(place.target, recipe.drafter_training.compute_dtype)
    trained = train_drafter(
        target, params, recipe.drafter, load_conversations(place.answers),
        row_length=recipe.row_length, anchors=recipe.anchors, training=recipe.drafter_training,
        directory=place.work / "drafter_training", should_stop=should_stop,
    )  # fmt: skip
    if trained.step == recipe.drafter_training.steps:
        save_checkpoint(place.drafter, recipe.drafter, trained.params)


def make_stage(
    stage: str,
    recipe: Recipe,
    place: Workplace,
    gsm8k: Gsm8k | None,
    should_stop: Callable[[int], bool],
) -> bool:
    """Runs one stage unless its result is there; whether it is there now.

    A training that `should_stop` ends leaves a checkpoint, and the same call goes on from it.
    ValueError if an earlier stage is missing.
    """
    if place.made(stage):
        print(f"{stage}: already made")
        return True
    needs = {"target": "tokenizer", "answers": "target", "drafter": "answers"}
    if stage in needs and not place.made(needs[stage]):
        raise ValueError(f"stage {stage} needs the result of stage {needs[stage]} first")
    place.work.mkdir(parents=True, exist_ok=True)
    match stage:
        case "tokenizer":
            make_tokenizer(recipe, place, gsm8k)
        case "target":
            make_target(recipe, place, gsm8k, should_stop)
        case "answers":
            make_answers(recipe, place, gsm8k)
        case "drafter":
            make_drafter(recipe, place, should_stop)
        case _:
            raise ValueError(f"stage {stage!r} is not one of {', '.join(STAGES)}")
    return place.made(stage)
