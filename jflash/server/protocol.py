"""The requests of OpenAI's API as records, read from JSON and checked field by field.

A field that no record names is ignored. One that a record names and the server cannot honour is
refused by its name, unless it holds the value that changes nothing.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from jflash.server import bad_json
from jflash.server.errors import ApiError, invalid, unsupported
from jflash.serving.request import MOST

MANY = 2**63 - 1  # what a client may give for "as many as there are"
Count = Annotated[int, Meta(ge=1, le=MANY)]
Natural = Annotated[int, Meta(ge=0, le=MANY)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Few = Annotated[int, Meta(ge=0, le=MOST)]
Text = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Text], Meta(min_length=1)]
LONGEST = 40  # characters of a wrong value that its error shows
PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's form of an answer; one of them."""

    json: str | dict[str, Any] | bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Asked(Struct, kw_only=True):
    """The fields of all requests for text."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MANY)] | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None  # the smallest runs first
    speculation: bool | None = None  # jflash's: false accepts no draft, so a step gives one token
    min_tokens: Natural | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs_mode: str | None = None  # jflash's: raw or processed
    draft_rule: str | None = None  # jflash's
    cache_salt: Text | None = None  # vLLM's, as are the next ones
    prompt_logprobs: Few | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Completion(Asked, kw_only=True):
    """/v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Natural | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None
    logprobs: Few | None = None  # the number of most probable tokens
    response_format: dict[str, Any] | None = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


class Part(Struct):
    """A piece of a message's content; only text can be read, a refusal's among it."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(Struct, kw_only=True):
    role: Text
    content: str | list[Part] | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None  # what calls were before tool_calls


class Chat(Asked, kw_only=True):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Natural | None = None
    max_completion_tokens: Natural | None = None
    max_output_tokens: Any = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    logprobs: bool | None = None
    top_logprobs: Few | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    store: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Responses(Asked, kw_only=True):
    """/v1/responses, stateless."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    include: list[str] | None = None
    prompt: Any = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None  # comes back
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    stop: Any = None


class Tokenize(Struct, kw_only=True):
    """/tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Detokenize(Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


# Fields that the server knows and cannot honour: the values that change nothing, and why.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "suffix": (("",), "the model only continues a text"),
    "chat_template": ((), "the model's template is used"),
    "modalities": ((["text"],), "the answer is text"),
    "audio": ((), "the answer is text"),
    "functions": (([],), "give tools"),
    "function_call": (("none",), "give tool_choice"),
    "web_search_options": ((), "the server reaches nothing outside itself"),
    "verbosity": (("medium",), "the model has no such control"),
    "store": ((False,), "nothing is stored"),
    "add_generation_prompt": ((True,), "an answer always begins a new message"),
    "continue_final_message": ((False,), "an answer always begins a new message"),
    "previous_response_id": ((), "nothing is stored: send the whole conversation as input"),
    "conversation": ((), "nothing is stored: send the whole conversation as input"),
    "background": ((False,), "nothing is stored"),
    # An item of thoughts has their text, by which a client without a store brings them back.
    "include": (([], ["reasoning.encrypted_content"]), "there is nothing to add"),
    "truncation": (("disabled", "auto"), "a prompt is never cut"),
    "max_tool_calls": ((), "the server calls no tools itself"),
    "bad_words": (([],), "give logit_bias"),
    "allowed_token_ids": ((), "give logit_bias, or a form of the answer"),
    "truncate_prompt_tokens": ((), "a prompt is never cut"),
    "use_beam_search": ((False,), "one text is followed at a time"),
    "length_penalty": ((1,), "one text is followed at a time"),
    "include_stop_str_in_output": ((False,), "an answer ends before its stop"),
    "skip_special_tokens": ((True,), "an answer has none"),
    "return_tokens_as_token_ids": ((False,), "logprobs have the tokens' texts"),
}


# Fields of other routes, and what says the same here.
ELSEWHERE: dict[type, dict[str, str]] = {
    Completion: dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "give max_tokens"),
    Chat: {"max_output_tokens": "give max_completion_tokens"},
    Responses: {
        "messages": "give input",
        "max_tokens": "give max_output_tokens",
        "max_completion_tokens": "give max_output_tokens",
        "response_format": "give text.format",
        "reasoning_effort": "give reasoning.effort",
        "stop": "an answer of this route has no stop texts",
    },
}


def read[R: Struct](body: bytes, kind: type[R]) -> R:
    """The request in a body; ApiError with the field's name for what is wrong."""
    try:
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise named(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(bad_json.why(body, error), code="invalid_json") from None
    for name, why in ELSEWHERE.get(kind, {}).items():
        if getattr(value, name) not in (None, []):
            raise unsupported(name, why)
    for name in kind.__struct_fields__:
        given = getattr(value, name)
        if given is None or name not in NEUTRAL:
            continue
        neutral, why = NEUTRAL[name]
        # 0 equals False for Python.
        if not any(given == v and (type(given) is bool) == (type(v) is bool) for v in neutral):
            raise unsupported(name, why)
    if getattr(value, "stream_options", None) is not None and not getattr(value, "stream", None):
        raise invalid("stream_options", "is only allowed with stream: true")
    return value


def named(message: str, body: bytes, where: str = "") -> ApiError:
    """msgspec's message as an error, with the path of the field as `param`, and with its value.

    `where` is the place of the JSON `body` in the request, if it is a part of one.
    """
    path = PATH.search(message)
    inner, why = (path[1], message[: path.start()]) if path else ("", message)
    value = _value(body, inner) if inner else ""  # none for an object that lacks a field
    missing = re.search(r"missing required field `(\w+)`", message)
    names = [name for name in (where, inner, missing and missing[1]) if name]
    param = ".".join(names).replace(".[", "[")
    text = f"{param}{value}: {why}" if where or inner else message
    return ApiError(text, param=param or None, code="invalid_type")


def _value(body: bytes, path: str) -> str:
    """The number or text at a path of JSON, after a blank; nothing for another or a long one."""
    try:
        value = msgspec.json.decode(body)
        for name, index in re.findall(r"(\w+)|\[(\d*)", path):
            value = value[name or int(index)]
        shown = msgspec.json.encode(value).decode()
    # What comes after the wrong value may be no JSON, or give the name again; a path may have "…".
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return "" if isinstance(value, dict | list) or len(shown) > LONGEST else f" {shown}"
