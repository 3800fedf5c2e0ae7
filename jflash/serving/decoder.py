"""What a server needs of an engine, wherever it runs, and the engine of this process as that."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jflash.serving.handle import Handle
from jflash.serving.request import Failed, Request
from jflash.serving.stats import Stats

if TYPE_CHECKING:  # a process that only passes requests on has no models
    from jflash.serving.engine import Engine


@runtime_checkable
class Decoder(Protocol):
    """Decodes requests of token ids; see jflash.serving.engine.Engine."""

    @property
    def max_context(self) -> int: ...

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        ...

    async def submit(self, request: Request) -> Handle:
        """Queues a request. ValueError for one that is never served; Full, Failed; RuntimeError
        once closed."""
        ...

    def stats(self) -> Stats: ...

    def unanswered(self) -> int | None:
        """If a request waits to be queued, a count that rises as long as the engine is there; else
        None."""
        ...

    def give_up(self, why: Failed) -> None:
        """Fails the requests that wait to be queued, and all that come."""
        ...

    def close(self) -> None: ...


class Local:
    """An engine of this process."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.max_context = engine.max_context
        self.vocabulary = engine.pair.models.target.config.vocab_size
        self.stats, self.close = engine.stats, engine.close
        self._given_up: Failed | None = None

    async def submit(self, request: Request) -> Handle:
        if self._given_up is not None:
            raise self._given_up
        return self._engine.submit(request)

    def unanswered(self) -> None:
        """It queues a request at once."""

    def give_up(self, why: Failed) -> None:
        self._given_up = why
