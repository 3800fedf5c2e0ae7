"""Chat templates and tokenizers: from text to the ids that jflash.generate decodes, and back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jflash.io.foreign import named


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    *,
    system: str | None = None,
    reasoning: bool = False,
    effort: str | None = None,
    chat_template: bool = True,
    history: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """A prompt's token ids, by default through the chat template.

    `history` holds the earlier turns as (user's text, answer). `reasoning` is the templates'
    enable_thinking, and `effort` the reasoning_effort of some, as gpt-oss's. A base model without
    a template gets the plain text only if `chat_template` is False: a silent fallback would change
    the prompt.
    """
    if not isinstance(prompt, str):  # a template would write the bytes b'x' as these four letters
        raise ValueError(f"the prompt {prompt!r:.80} must be a text, a str")
    _check_history(history)
    if not chat_template:
        if system:
            raise ValueError("a system message needs the chat template")
        before = [text for turn in history for text in turn]
        return token_ids(tokenizer, "\n\n".join([*before, prompt]), add_special_tokens=True)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: pass --no-chat-template")
    turns = [dict(user=user, assistant=answer).items() for user, answer in history]
    before = [{"role": role, "content": text} for turn in turns for role, text in turn]
    messages = [*before, {"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    names: dict[str, Any] = {"enable_thinking": reasoning}
    if reasoning and not effort and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError("reasoning: the chat template has no enable_thinking")
    if effort is not None:
        if "reasoning_effort" not in str(tokenizer.chat_template):
            raise ValueError(f"reasoning {effort}: the chat template has no reasoning_effort")
        names["reasoning_effort"] = effort
    text = through_template(tokenizer, messages, **names)
    return token_ids(tokenizer, text, add_special_tokens=False)


def _check_history(history: Any) -> None:
    """ValueError unless it has pairs of texts: of a message with a role, the names of its two keys
    would be taken for the user's text and the answer."""
    why = "must be (user's text, answer)"
    if isinstance(history, str) or not isinstance(history, Sequence):
        raise ValueError(f"history {history!r:.80} must be a list, of which each {why}")
    for turn in history:
        pair = isinstance(turn, tuple | list) and len(turn) == 2
        if not (pair and all(isinstance(text, str) for text in turn)):
            raise ValueError(f"history: {turn!r:.80} {why}")


def token_ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """A text's ids, without a chat template."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # the tokenizer's own error does not say what is wrong
        raise ValueError(f"the text is not valid UTF-8: {error}") from None
    with named("the tokenizer fails"):
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def through_template(tokenizer: Any, messages: list[dict[str, Any]], **names: Any) -> str:
    """The prompt up to the beginning of the answer; the template reads `names`.

    ValueError if the template is broken or refuses them, for example a system message.
    """
    with named("the chat template refuses"):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **names
        )


def decode(tokenizer: Any, token_ids: Sequence[int], marks: bool = False) -> str:
    """Tokens as text; `marks` keeps the special ones."""
    with named("the tokenizer fails"):
        if _in_rust(type(tokenizer)):  # in a third of the time: a server decodes every step
            return tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=not marks)
        return tokenizer.decode(
            token_ids, skip_special_tokens=not marks, clean_up_tokenization_spaces=False
        )


@functools.cache
def _in_rust(kind: type) -> bool:
    """Whether transformers would only look at the ids and hand them on."""
    from transformers import PreTrainedTokenizerFast as Fast

    return issubclass(kind, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)


def mark_ids(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """The ids of those texts that are a special token each, which no decoded text has."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if texts else {}
    return [i for i, token in added.items() if token.special and token.content in texts]


def stop_at_text(tokenizer: Any, stops: Sequence[str]) -> Callable[[list[int]], int | None]:
    """For generate's `stop_when`: the number of tokens until one of the texts is complete."""

    def keep(token_ids: list[int]) -> int | None:
        if not any(stop in decode(tokenizer, token_ids) for stop in stops):
            return None
        # Bisection would fail: a byte of the next character can hide the end of the text.
        for count in range(1, len(token_ids) + 1):
            text = decode(tokenizer, token_ids[:count])
            if any(stop in text for stop in stops):
                return count
        return None

    return keep


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the earliest of the stop texts."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
