"""The prompts that train_drafter.py learns and evaluates, read and checked before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jflash.cli.command import Options
from jflash.io.text import encode_prompt
from jflash.models.decoder import Target
from jflash.training.data import Conversation
from jflash.training.records import read_records, without_long

NO_TOKENIZER = "the target holds no tokenizer: prompt_ids and answer_ids do without"


def prompt_encoder(args: Options, tokenizer: Any) -> Callable[[str], list[int]]:
    def encode(prompt: str) -> list[int]:
        if tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return encode_prompt(tokenizer, prompt, chat_template=not args.no_chat_template)

    return encode


def read_prompts(
    args: Options, tokenizer: Any, target: Target, stops: list[int]
) -> list[Conversation]:
    """The data's conversations that fit, without answers unless --keep-answers."""

    def encode_answer(text: str) -> list[int]:
        if tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *stops[:1]]

    vocab_size, unread = target.config.vocab_size, target.config.unread_ids
    encode = prompt_encoder(args, tokenizer)
    records = read_records(args.data, encode, encode_answer, vocab_size, unread)
    if not args.keep_answers:
        records = [Conversation(r.prompt_ids, []) for r in records]
    return without_too_long(args.data, records, min(args.row_length, prompt_room(args, target)))


def read_held_out(args: Options, tokenizer: Any, target: Target) -> list[Conversation]:
    """The prompts of --eval-prompts that fit, if it names any."""
    if not args.eval_prompts:
        return []
    encode = prompt_encoder(args, tokenizer)
    vocab_size, unread = target.config.vocab_size, target.config.unread_ids
    records = read_records(args.eval_prompts, encode, lambda _: [], vocab_size, unread)
    return without_too_long(args.eval_prompts, records, prompt_room(args, target))


def prompt_room(args: Options, target: Target) -> int:
    """The longest prompt, and one, that leaves the target's positions for an answer.

    ValueError if an answer leaves none for a prompt.
    """
    positions, new = target.config.max_position_embeddings, args.max_new_tokens
    if new >= positions:
        raise ValueError(f"--max-new-tokens {new}: the target has {positions} positions in all")
    return positions - new + 1


def without_too_long(file: Path, records: list[Conversation], longest: int) -> list[Conversation]:
    try:
        records, dropped = without_long(records, longest)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if dropped:
        print(f"{file}: {dropped} prompts are too long for {longest} tokens: left out")
    return records
