"""Whether a model thinks before it answers, as its template and the request say."""

import functools
import inspect
from typing import Any

from jflash.server.errors import invalid, unsupported
from jflash.server.reasoning import CLOSE, opened
from jflash.server.service import Service

RESERVED = ("messages", "tools", "tokenizer", "add_generation_prompt", "tokenize")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # OpenAI's
HARMONY_EFFORTS = ("low", "medium", "high")  # gpt-oss always thinks


def thinks(service: Service, prompt: str, names: dict[str, Any]) -> bool:
    """Whether thoughts come before the answer: the prompt opens them, or leaves that to the model
    in the thinking mode of its template."""
    if service.harmony or prompt.rstrip().endswith(CLOSE):
        return service.harmony
    mode = "enable_thinking" in service.template and names.get("enable_thinking") is not False
    return opened(prompt) or mode


@functools.cache
def _options(tokenizer: type) -> frozenset[str]:
    """What a tokenizer's `apply_chat_template` keeps from the template; documents it gives on."""
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    return frozenset(taken) - {"documents", "kwargs"}


def thinking(
    service: Service, effort: str | None, names: dict[str, Any], field: str = "reasoning_effort"
) -> dict[str, Any]:
    """The template's variables: the request's `names` override the server's thinking mode. `field`
    is that of `effort`."""
    for name in names:
        if name in RESERVED or name in _options(type(service.tokenizer)):
            raise invalid(f"chat_template_kwargs.{name}", "cannot be set by a request")
    known: dict[str, Any] = {"enable_thinking": service.reasoning}
    mode = "enable_thinking" in service.template or "reasoning_effort" in service.template
    if effort is not None and (mode or effort != "none"):  # without a mode nothing is thought
        if not mode:
            raise unsupported(field, "the model's template has no thinking mode")
        efforts = HARMONY_EFFORTS if service.harmony else EFFORTS
        if effort not in efforts:
            raise invalid(field, f"{effort!r} is none of {', '.join(efforts)}")
        known = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return known | names
