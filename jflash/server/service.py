"""The state that a server's requests share: an engine, and what is under way in it."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

from jflash.io.foreign import one_line
from jflash.io.harmony import CHANNEL, FINAL, MESSAGE
from jflash.io.text import token_ids
from jflash.server import tools
from jflash.server.about import About
from jflash.server.errors import ApiError, invalid, unsupported
from jflash.server.fitting import Beyond, Encode, fitting_ids
from jflash.server.forms import Form
from jflash.server.metrics import Metrics
from jflash.server.reasoning import CLOSE
from jflash.server.settings import Settings
from jflash.serving.decoder import Decoder
from jflash.serving.grammar import Grammar, Grammars, Opening
from jflash.serving.handle import Handle
from jflash.serving.request import Failed, Full, Request, TooLong
from jflash.serving.tried import TriedGrammars

# Characters, 0.7 ms on a slow core: beside 32 streams a thread's result comes back later than that.
SHORT = 2000
# Tokens, whose numbers take a core 2 ms and more, or messages, which take a template as long.
MANY = 500
COMPILERS = 2  # grammars compiled at once
# Fields that the engine checks, as its messages name them.
CHECKED = {"stop_ids": "stop_token_ids", "logit_bias": "logit_bias", "draft_rule": "draft_rule"}


@dataclass(frozen=True, kw_only=True)
class Service(Settings):
    """An engine with its tokenizer, and the requests that are under way."""

    engine: Decoder
    grammars: Grammars
    metrics: Metrics
    live: set[Handle] = field(default_factory=set)
    pending: set[asyncio.Task] = field(default_factory=set)  # what those without handles wait for
    compilers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(COMPILERS))
    failures: list[str] = field(default_factory=list)  # why the engine gives no more tokens

    @property
    def vocabulary(self) -> int:
        return self.engine.vocabulary

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
            return await self._in_time(self._compiled(compiled))
        except ValueError as error:
            raise ApiError(
                f"{form.param}: {error}", param=form.param, code="invalid_grammar"
            ) from None

    async def _compiled(self, work: Callable[[], Grammar]) -> Grammar:
        """What `work` gives in a thread that no prompt waits for."""
        return await asyncio.get_running_loop().run_in_executor(self.compilers, work)

    async def beside[T](self, count: int, work: Callable[[], T]) -> T:
        """What `work` gives, which so many tokens or messages take: off the event loop if they are
        many."""
        return work() if count <= MANY else await self._in_time(asyncio.to_thread(work))

    async def _in_time[T](self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives. ApiError if a server that ends has cancelled it."""
        self.pending.add(done := asyncio.create_task(work))
        try:
            await asyncio.wait((done,))
        finally:
            self.pending.discard(done)
            done.cancel()
        if done.cancelled():
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        return done.result()

    def _opening(self, form: Form) -> Opening:
        """Where an answer begins after its thoughts."""
        if self.harmony:
            return Opening(self.marks(MESSAGE)[0], after=tuple(self.marks(CHANNEL + FINAL)))
        if self.thought_marks[1] is None:
            raise unsupported(form.param, f"{CLOSE} is not one token: turn the thoughts off")
        return Opening(self.thought_marks[1])

    @functools.cached_property
    def about(self) -> About:
        return About(self.name, self.version, self.created, self.engine.max_context)

    def check_model(self, name: str | None) -> None:
        self.about.check_model(name)

    async def encode(self, text: str, special: bool) -> list[int]:
        """A text's ids; `special` adds the tokenizer's special tokens."""
        return await self._encoded(text, functools.partial(self._ids, special=special))

    async def prompt(self, text: str, special: bool, param: str) -> list[int]:
        """The ids of a text that is to be continued; ApiError, naming the field, for one that
        passes the context, before all of it is tokenised."""
        ids, most = functools.partial(self._ids, special=special), self.engine.max_context
        longest = self.longest_token
        try:
            return await self._encoded(text, lambda text: fitting_ids(ids, longest, text, most))
        except Beyond as error:
            raise _too_long(f"{param}: {error}", param) from None

    def _ids(self, text: str, special: bool) -> list[int]:
        return token_ids(self.tokenizer, text, add_special_tokens=special)

    async def _encoded(self, text: str, encode: Encode) -> list[int]:
        """A text's ids, a long one's off the event loop."""
        try:
            if len(text) <= SHORT:
                return encode(text)
            return await self._in_time(asyncio.to_thread(encode, text))
        except Beyond:
            raise
        except ValueError as error:
            raise ApiError(str(error), code="invalid_value") from None

    async def submit(self, requests: Sequence[Request], param: str) -> list[Handle]:
        """Submits all or none; ApiError for what is never served, or if the engine is full.

        `param` is the prompt's field.
        """
        for request in requests:
            self._check(request, param)
        handles = list[Handle]()

        async def one(request: Request) -> None:
            handles.append(await self.engine.submit(request))

        try:
            for request in requests:
                await self._in_time(one(request))
        except (asyncio.CancelledError, ApiError):
            self._drop(handles)
            raise
        except TooLong as error:
            self._drop(handles)
            raise _too_long(str(error), param) from None
        except ValueError as error:
            self._drop(handles)
            named = (field for name, field in CHECKED.items() if name in str(error))
            raise ApiError(str(error), param=next(named, None), code="invalid_value") from None
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

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """ApiError for a prompt without tokens, with too many, or with one that the target does not
        know."""
        if not ids:
            raise invalid(param, "the prompt is empty: give at least one token")
        count, most = self.vocabulary, self.engine.max_context
        if len(ids) > most:
            raise _too_long(f"{len(ids)} prompt tokens pass the context of {most} tokens", param)
        if outside := [i for i in ids if i >= count]:
            raise invalid(param, f"token id {outside[0]} is outside the {count} ids")

    def _check(self, request: Request, param: str) -> None:
        asked, most = len(request.prompt_ids), self.engine.max_context
        self.check_ids(request.prompt_ids, param)
        if asked + request.max_tokens > most:
            new = request.max_tokens
            why = f"{asked} prompt tokens + {new} new tokens pass the context of {most} tokens"
            raise _too_long(why, param)


def _too_long(why: str, param: str) -> ApiError:
    return ApiError(why, param=param, code="context_length_exceeded")


def service_of(settings: Settings, engine: Decoder) -> Service:
    """A server's state over an engine."""
    known = {field.name: getattr(settings, field.name) for field in fields(Settings)}
    grammars = TriedGrammars(settings.tokenizer, engine.vocabulary, settings.stop_ids)
    metrics = Metrics(settings.name, settings.max_accept, engine.stats)
    return Service(engine=engine, grammars=grammars, metrics=metrics, **known)
