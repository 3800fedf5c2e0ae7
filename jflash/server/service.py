"""The state that a server's requests share, and the engine's requests for each of them."""

import asyncio
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jflash.decoding import Sampling
from jflash.io.foreign import named, one_line
from jflash.io.text import decode, token_ids
from jflash.server import tools
from jflash.server.errors import ApiError, invalid, unsupported
from jflash.server.forms import Form
from jflash.server.harmony import CHANNEL, FINAL, MESSAGE
from jflash.server.metrics import Metrics
from jflash.server.protocol import Asked
from jflash.server.reasoning import CLOSE, OPEN, opened
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammar, Grammars, Opening
from jflash.serving.handle import Handle
from jflash.serving.request import KEYS, Failed, Full, Request

MOST_ANSWERS = 128  # of one HTTP request
MOST_STOPS = 64  # texts of one request
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # OpenAI's
HARMONY_EFFORTS = ("low", "medium", "high")  # gpt-oss always thinks
# Fields that the engine checks, as its messages name them.
CHECKED = {"stop_ids": "stop_token_ids", "logit_bias": "logit_bias", "draft_rule": "draft_rule"}


@dataclass(frozen=True, kw_only=True)
class Service:
    """A loaded engine with its tokenizer. `sampling` has the defaults of a request."""

    engine: Engine
    grammars: Grammars
    tokenizer: Any
    name: str
    version: str
    template: str  # the chat template's source, empty if there is none
    stop_ids: tuple[int, ...]
    sampling: Sampling
    reasoning: bool  # the template's thinking mode
    created: int
    metrics: Metrics
    max_body: int  # bytes
    max_queue: int  # requests that may wait
    request_timeout: float  # seconds, from the submission to the last token
    live: set[Handle] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)  # why the engine gives no more tokens

    @property
    def vocabulary(self) -> int:
        return self.engine.pair.models.target.config.vocab_size

    @functools.cached_property
    def harmony(self) -> bool:
        """Whether answers have gpt-oss's channels."""
        return CHANNEL in self.template

    def marks(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        return token_ids(self.tokenizer, text, add_special_tokens=False)

    def plain_text(self, ids: list[int]) -> str:
        """Tokens as text, without special tokens."""
        return decode(self.tokenizer, ids)

    def answer_text(self, ids: list[int]) -> str:
        """Tokens of a chat's answer as text, with the marks of its channels if it has any."""
        if not self.harmony:
            return self.plain_text(ids)
        with named("the tokenizer fails"):
            return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @functools.cached_property
    def thought_marks(self) -> tuple[int | None, int | None]:
        """The tokens that open and close thoughts; None for a mark of several tokens."""
        ids = [self.marks(mark) for mark in (OPEN, CLOSE)]
        opens, closes = (found[0] if len(found) == 1 else None for found in ids)
        return opens, closes

    @functools.cached_property
    def call_marks(self) -> tuple[str, str]:
        """The marks around a call, as a grammar writes them."""
        return self.grammars.mark(tools.OPEN), self.grammars.mark(tools.CLOSE)

    def token_bytes(self, token: int) -> bytes:
        return self.grammars.token_bytes(token)

    async def grammar(self, form: Form | None, thinks: bool) -> Grammar | None:
        """A form's grammar, compiled off the event loop; it begins after the thoughts if any.

        ApiError, naming the field, for a form that cannot be compiled.
        """
        if form is None:
            return None
        opens = self._opening(form) if thinks else None

        def compiled() -> Grammar:
            return self.grammars.compile(form.kind, form.text, opens)

        try:
            return await asyncio.to_thread(compiled)
        except ValueError as error:
            raise ApiError(
                f"{form.param}: {error}", param=form.param, code="invalid_grammar"
            ) from None

    def _opening(self, form: Form) -> Opening:
        """Where an answer begins after its thoughts."""
        if self.harmony:
            return Opening(self.marks(MESSAGE)[0], after=tuple(self.marks(CHANNEL + FINAL)))
        if self.thought_marks[1] is None:
            raise unsupported(form.param, f"{CLOSE} is not one token: turn the thoughts off")
        return Opening(self.thought_marks[1])

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(
                f"the model {name!r} does not exist: this server has {self.name!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    async def encode(self, text: str, special: bool) -> list[int]:
        """A text's ids, off the event loop; `special` adds the tokenizer's special tokens."""
        try:
            return await asyncio.to_thread(
                token_ids, self.tokenizer, text, add_special_tokens=special
            )
        except ValueError as error:
            raise ApiError(str(error), code="invalid_value") from None

    def submit(self, requests: Sequence[Request], param: str) -> list[Handle]:
        """Submits all or none; ApiError if the engine is full. `param` is the prompt's field."""
        for request in requests:
            self._check(request, param)
        handles = list[Handle]()
        try:
            for request in requests:
                handles.append(self.engine.submit(request))
        except Full as full:
            self._drop(handles)
            self.metrics.rejected.inc()
            raise ApiError(
                f"the server is full: {full}", status=503, code="queue_full",
                headers={"Retry-After": "1"},
            ) from None  # fmt: skip
        except Failed as error:
            raise self.failed(error) from None
        except RuntimeError as error:  # closed while the server ends
            raise ApiError(str(error), status=503, code="shutting_down") from None
        self.live.update(handles)
        return handles

    def failed(self, error: Failed) -> ApiError:
        """The error for the reader of a request; /health reports it from now on."""
        cause = error.__cause__
        why = str(error) if cause is None else f"{error}: {one_line(cause)}"
        self.failures.append(why)
        return ApiError(why, status=503, code="engine_failed")

    def release(self, handles: Sequence[Handle]) -> None:
        """Cancels requests that have no reader any more."""
        self.live.difference_update(handles)
        self._drop(handles)

    def _drop(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            if not handle.ended:
                handle.cancel()

    def _check(self, request: Request, param: str) -> None:
        asked, most = len(request.prompt_ids), self.engine.max_context
        if not asked:
            raise invalid(param, "the prompt is empty: give at least one token")
        outside = [i for i in request.prompt_ids if i >= self.vocabulary]
        if outside:
            raise invalid(param, f"token id {outside[0]} is outside the {self.vocabulary} ids")
        if asked + request.max_tokens > most:
            raise ApiError(
                f"{asked} prompt tokens + {request.max_tokens} new tokens pass the context of "
                f"{most} tokens", param=param, code="context_length_exceeded",
            )  # fmt: skip
        try:
            self.engine.check(request)
        except ValueError as error:
            named = (field for name, field in CHECKED.items() if name in str(error))
            raise ApiError(str(error), param=next(named, None), code="invalid_value") from None


def sampling_of(asked: Asked, default: Sampling) -> Sampling:
    """A request's sampling; at temperature 0 the filters have no effect and are left out."""
    values: dict[str, Any] = {
        name: getattr(default if getattr(asked, name) is None else asked, name)
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    temperature = values.pop("temperature")
    try:
        # Filters are checked at any temperature: 1 stands for all of them here.
        values["top_k"] = max(values["top_k"], 0)  # -1 keeps all tokens, as 0 does
        drawn = Sampling(temperature=temperature or 1.0, **values)
    except ValueError as error:
        raise invalid(str(error).split(" ", 1)[0], str(error)) from None
    return drawn if temperature else Sampling()


def requests_of(
    service: Service,
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    stop_token_ids: Sequence[int] = (),
    n: int = 1,
    limit_name: str = "max_tokens",
    grammar: Grammar | None = None,
    top_logprobs: int | None = None,
) -> list[Request]:
    """The engine's requests, `n` for each prompt. Without `max_tokens` the context is the limit.

    `top_logprobs` None asks for no logprobs at all.
    The samples of a seed differ in their index, as in `jflash.generate`.
    """
    if max_tokens == 0:
        raise invalid(limit_name, "0 must be at least 1")
    if len(prompts) * n > MOST_ANSWERS:
        raise invalid("n", f"{len(prompts)} prompts × {n}: at most {MOST_ANSWERS} answers")
    outside = [i for i in stop_token_ids if i >= service.vocabulary]
    if outside:
        raise invalid("stop_token_ids", f"{outside[0]} is outside the {service.vocabulary} ids")
    if asked.ignore_eos and grammar is not None:
        raise invalid("ignore_eos", "an answer of a given form ends where the form does")
    if asked.prompt_logprobs is not None and asked.stream:
        raise unsupported("prompt_logprobs", "a stream does not give them")
    ends = () if asked.ignore_eos else service.stop_ids
    stop_ids = tuple(dict.fromkeys((*ends, *stop_token_ids)))
    sampling = sampling_of(asked, service.sampling)
    seed = None if asked.seed is None else _seed(asked.seed)
    repetition = asked.repetition_penalty
    try:
        return [
            Request(
                prompt_ids=prompt,
                max_tokens=max_tokens or max(service.engine.max_context - len(prompt), 1),
                stop_ids=stop_ids,
                sampling=sampling,
                seed=seed,
                index=index,
                priority=asked.priority or 0,
                timeout=service.request_timeout,
                speculate=asked.speculation is not False,
                min_tokens=asked.min_tokens or 0,
                logit_bias=_bias(asked.logit_bias or {}),
                repetition_penalty=1.0 if repetition is None else repetition,
                frequency_penalty=asked.frequency_penalty or 0.0,
                presence_penalty=asked.presence_penalty or 0.0,
                logprobs=top_logprobs is not None,
                top_logprobs=top_logprobs or 0,
                prompt_logprobs=asked.prompt_logprobs,
                logprobs_mode="raw" if asked.logprobs_mode is None else asked.logprobs_mode,
                draft_rule=asked.draft_rule,
                cache_salt=asked.cache_salt or "",
                grammar=grammar,
            )
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(n))
        ]
    except ValueError as error:
        raise invalid(str(error).split(" ", 1)[0], str(error)) from None


def _bias(given: dict[str, float]) -> dict[int, float]:
    """By token; JSON's names are texts."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise invalid("logit_bias", f"names must be token ids: {error}") from None


def _seed(seed: int) -> int:
    """Maps any whole number to a seed in the engine's range; seeds within it stay."""
    if 0 <= seed < KEYS:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")


def stops_of(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    if len(stops) > MOST_STOPS:
        raise invalid("stop", f"{len(stops)} texts: at most {MOST_STOPS}")
    return stops


def thinks(service: Service, prompt: str, names: dict[str, Any]) -> bool:
    """Whether thoughts come before the answer: the prompt opens them, or leaves that to the model
    in the thinking mode of its template."""
    if service.harmony or prompt.rstrip().endswith(CLOSE):
        return service.harmony
    mode = "enable_thinking" in service.template and names.get("enable_thinking") is not False
    return opened(prompt) or mode


def thinking(
    service: Service, effort: str | None, names: dict[str, Any], field: str = "reasoning_effort"
) -> dict[str, Any]:
    """The template's variables: the request's `names` override the server's thinking mode. `field`
    is that of `effort`."""
    for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template"):
        if name in names:
            raise invalid(f"chat_template_kwargs.{name}", "cannot be set by a request")
    known: dict[str, Any] = {"enable_thinking": service.reasoning}
    if effort is not None:
        if "enable_thinking" not in service.template and "reasoning_effort" not in service.template:
            raise unsupported(field, "the model's template has no thinking mode")
        efforts = HARMONY_EFFORTS if service.harmony else EFFORTS
        if effort not in efforts:
            raise invalid(field, f"{effort!r} is none of {', '.join(efforts)}")
        known = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return known | names
