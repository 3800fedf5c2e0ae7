"""Prompts that a chat model writes itself.

The model sees the chat template up to where the user's text begins. Its continuation is a user turn
of the kind that it was trained on (arXiv 2406.08464).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jflash.acceptance import is_looping
from jflash.generate import Pair
from jflash.io.text import decode, through_template
from jflash.records.decoding import Decoding
from jflash.training.answers import answer_into
from jflash.training.prompts import Prompt
from jflash.training.recipe import WHOLE, Share

MARK = "\ue000"  # where the user's text stands when the template is rendered
SHORTEST = 12  # characters: less is a greeting or nothing


def user_prefix(tokenizer: Any, system: str | None = None) -> list[int]:
    """Ids of the chat template up to the user's text; ValueError without a template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: the model cannot write user turns")
    messages = [{"role": "user", "content": MARK}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    before = through_template(tokenizer, messages).split(MARK)[0]
    ids = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError("the chat template puts nothing before the user's text: nothing to go on")
    return ids


def write_prompts(
    pair: Pair, tokenizer: Any, count: int, *, systems: Sequence[str | None], decoding: Decoding,
    batch_size: int, folder: Path, name: str, share: Share = WHOLE,
) -> list[Prompt] | None:  # fmt: skip
    """Samples `count` user turns, the system messages taking turns, and keeps the useful ones.

    A turn is kept if a stop token ended it, it has no loop and it is long enough. A killed run
    resumes from `folder`. None while another share has turns to write.
    """
    prefixes = [user_prefix(tokenizer, system) for system in systems]
    given = [prefixes[i % len(prefixes)] for i in range(count)]
    written = answer_into(folder, name, pair, given, [decoding], batch_size=batch_size, share=share)
    if written is None:
        return None
    stops = set(decoding.stop_token_ids)
    ended = [ids for ids in written if ids[-1] in stops and not is_looping(ids)]
    texts = [decode(tokenizer, ids).strip() for ids in ended]
    return [Prompt(text, "self-written") for text in texts if len(text) >= SHORTEST]
