"""The routes over an engine that recites a text: what a server does with an answer."""

from dataclasses import fields
from typing import Any

from starlette.testclient import TestClient

from jflash.records.decoding import Sampling
from jflash.server.app import make_app
from jflash.server.metrics import Metrics
from jflash.server.service import Service
from jflash.serving.grammar import Grammars
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Failed, FinishReason, Request
from jflash.serving.stats import SIZES, Stats

NOTHING = {field.name: 0 for field in fields(Stats)} | {
    "pages": 1, "pages_available": 1, "ended": {}, "steps_by_rows": {}, "device_bytes": None,
    "rounds_by_tokens": (0,) * (len(SIZES) + 1),
}  # fmt: skip
MOST_WAITING, SLOTS = 4, 2
QUEUED = 0.25  # seconds for which a request waited


class Reciting:
    """Answers every request with `text`, a token a step; `asked` has the requests."""

    max_context = 200

    def __init__(self, tokenizer: Any) -> None:
        self.text, self.waiting, self.asked = "", 0, list[Request]()
        self.finish: FinishReason = "stop"
        self.tokenizer, self.vocabulary = tokenizer, max(tokenizer.get_vocab().values()) + 1

    def stats(self) -> Stats:
        known: dict[str, Any] = NOTHING | {"waiting": self.waiting}
        return Stats(**known)

    def unanswered(self) -> None: ...

    def give_up(self, why: Failed) -> None: ...

    def close(self) -> None: ...

    async def submit(self, request: Request) -> Handle:
        self.asked.append(request)
        handle, ids = Handle(request, lambda _: None), self.tokenizer(self.text)["input_ids"]
        handle.give([Event((token,), queued=QUEUED) for token in ids[:-1]])
        handle.give([Event((ids[-1],), finish_reason=self.finish, queued=QUEUED)])
        return handle

    def prompt(self) -> str:
        """That of the newest request."""
        return self.tokenizer.decode(self.asked[-1].prompt_ids)


def service_of(engine: Reciting, end: int) -> Service:
    """`end` is the token that ends an answer."""
    tokenizer = engine.tokenizer
    return Service(
        engine=engine, grammars=Grammars(tokenizer, engine.vocabulary, [end]), tokenizer=tokenizer,
        name="small", version="jflash", template=tokenizer.chat_template, stop_ids=(end,),
        sampling=Sampling(), reasoning=True, created=0, max_accept=3, max_body=9000,
        metrics=Metrics("small", 3, engine.stats), max_queue=MOST_WAITING, request_timeout=9.0,
        slots=SLOTS,
    )  # fmt: skip


def client_of(engine: Reciting, end: int) -> TestClient:
    """A client of the routes."""
    return TestClient(make_app(service_of(engine, end)))
