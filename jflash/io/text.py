"""Tokenizers, chat templates and stops: between text and the ids that jflash.generate decodes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jflash.io.foreign import named
from jflash.io.gguf_config import stop_ids
from jflash.io.gguf_file import is_gguf, open_gguf
from jflash.io.gguf_tokenizer import gguf_tokenizer, has_gguf_tokenizer
from jflash.io.hf_config import read_json
from jflash.io.hf_values import said


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder or GGUF file, as transformers'; ValueError if none loads."""
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not has_tokenizer(folder):
        raise ValueError(
            f"{folder} holds no tokenizer: text needs one, token ids (--prompt-ids) do not"
        )
    with named(f"the tokenizer in {folder} does not load"):
        if is_gguf(folder):
            return gguf_tokenizer(open_gguf(folder))
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint folder brings files of a tokenizer, or a GGUF file the metadata."""
    if is_gguf(folder):
        return has_gguf_tokenizer(open_gguf(folder))
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    return any((folder / name).exists() for name in known)


def stop_token_ids(folder: str | Path, tokenizer: Any = None) -> list[int]:
    """End-of-text ids: generation_config's, else config's, else the tokenizer's, else none.

    Of a GGUF file, what its metadata names: the ends of a text, a turn and a message.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return stop_ids(open_gguf(folder))
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            raw = read_json(folder / name)
            with named(str(folder / name)):
                ids = said(raw, ["eos_token_id"]).get("eos_token_id")
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return [int(tokenizer.eos_token_id)]
    return []


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    *,
    system: str | None = None,
    reasoning: bool = False,
    chat_template: bool = True,
    history: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """A prompt's token ids, through the chat template unless told otherwise.

    `history` holds the turns before it, each what the user said and what was answered.
    `reasoning` is what templates call enable_thinking. A base model without a template gets the
    plain text only if `chat_template` is False: silence would change the prompt.
    """
    if not chat_template:
        if system:
            raise ValueError("a system message needs the chat template")
        said = [text for turn in history for text in turn]
        return _ids(tokenizer, "\n\n".join([*said, prompt]), add_special_tokens=True)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: pass --no-chat-template")
    turns = [dict(user=user, assistant=answer).items() for user, answer in history]
    before = [{"role": role, "content": text} for turn in turns for role, text in turn]
    messages = [*before, {"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = through_template(tokenizer, messages, enable_thinking=reasoning)
    return _ids(tokenizer, text, add_special_tokens=False)


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    with named("the tokenizer fails"):
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def through_template(tokenizer: Any, messages: list[dict[str, str]], **names: Any) -> str:
    """The messages up to where the answer begins; `names` are the template's to read.

    ValueError if the template is broken or has no place for them, such as for a system message.
    """
    with named("the chat template refuses"):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **names
        )


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """New tokens as text, special tokens left out."""
    with named("the tokenizer fails"):
        return tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def stop_at_text(tokenizer: Any, stops: Sequence[str]) -> Callable[[list[int]], int | None]:
    """For generate's `stop_when`: how many tokens it takes until one of the texts is complete."""

    def keep(token_ids: list[int]) -> int | None:
        if not any(stop in decode(tokenizer, token_ids) for stop in stops):
            return None
        # Bisection is no use: a byte of the next character can hide the end of the text.
        for count in range(1, len(token_ids) + 1):
            text = decode(tokenizer, token_ids[:count])
            if any(stop in text for stop in stops):
                return count
        return None

    return keep


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the earliest of the stop texts."""
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text
