"""A request on its way through the loop, what of it the device still computes, and counts."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jflash.serving.calls.packing import Report
from jflash.serving.calls.prefill import First
from jflash.serving.calls.some_slots import Stepping
from jflash.serving.grammar import Matcher
from jflash.serving.handle import Handle
from jflash.serving.paging.pages import Name
from jflash.serving.paging.sliding import Held
from jflash.serving.request import FinishReason, Request, Top
from jflash.serving.schedule import Order
from jflash.serving.thread.device_time import Dispatched


@dataclass(kw_only=True, eq=False)
class Job:
    """A request on its way through the loop."""

    handle: Handle
    order: Order
    seed: int
    deadline: float | None
    tokens: list[int]  # the text so far, as the host knows it
    submitted: float = field(default_factory=time.monotonic)
    queued: float | None = None  # seconds until it first ran
    prompt_tokens: int = field(init=False)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    seen: Held = field(default_factory=Held)  # pages of layers with windows
    named: int = 0  # its first pages that are in the prefix index
    names: list[Name] = field(default_factory=list)
    computed: int = 0  # tokens whose chunks were dispatched
    origin: int | None = None  # the place of the copied states that it begins with
    borders: tuple[int, ...] = ()  # positions at which its states are copied
    end: int = 0  # tokens that chunks compute; 0 once they have
    unread: int = 0  # its steps that were dispatched and that the host has not read, at most
    unread_certain: int = 0  # of these, those that are its own, unless it ends before
    stepped: bool = False  # it had a place in a call of steps
    gained: bool = False
    cached: int | None = None  # tokens of the prompt that were cached when it first ran
    matcher: Matcher | None = None  # at the place of `tokens` in the grammar
    drafted: "Future[Given] | None" = None  # with a grammar: what the step gives that drafts for it
    cancelled: bool = False
    reason: FinishReason | Literal["failed"] | None = None  # its handle has the failure
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_tops: list[Top] = field(default_factory=list)
    bias: dict[int, float] = field(init=False)  # as it was when the request was checked

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt_ids)
        self.bias = dict(self.request.logit_bias)

    @property
    def request(self) -> Request:
        return self.handle.request

    @property
    def limit(self) -> int:
        return self.prompt_tokens + self.request.max_tokens

    @property
    def to_compute(self) -> int:
        """The number of tokens that chunks compute: all, without the newest once it has begun."""
        return len(self.tokens) - self.begun

    @property
    def certain(self) -> int:
        """The tokens that the text has at least, unless it ends before, once all that was
        dispatched has run."""
        coming = not self.begun and self.slot is not None and not self.end
        return len(self.tokens) + coming + self.unread_certain

    @property
    def begun(self) -> bool:
        """Whether its first token is known: then chunks commit nothing."""
        return len(self.tokens) > self.prompt_tokens


class Given(NamedTuple):
    """Arrays that the device will fill."""

    dispatched: Dispatched
    first: First | None = None  # of a text, if the chunk is its last
    scored: tuple[Any, Any] | None = None  # logprobs of the prompt's tokens after the chunk's
    report: Report | None = None  # of a call
    drafts: Any = None  # for the texts with a grammar, in the slots' order


class Read(NamedTuple):
    """The results that a dispatched program will give, and the job that they belong to."""

    given: Future[Given]
    job: Job | None = None  # of a chunk
    last: bool = False  # the chunk brings a first token
    index: int = 0  # of the job among those whose first tokens it brings
    count: int = 0  # prompt tokens whose logprobs the chunk brings
    jobs: tuple[Job, ...] = ()  # of a report: those that might step
    slots: tuple[int, ...] = ()  # of these
    steps: int = 0  # of a report
    stepping: Stepping | None = None  # its program

    def count_unread(self, steps: int) -> None:
        """Adds so many steps to those that are on their way. The first requests of a report, as
        many as its program has places for, step for certain, unless they end before."""
        assert self.stepping is not None, "a call"
        for i, job in enumerate(self.jobs):
            job.unread += steps
            if i < self.stepping.slots:
                job.unread_certain += steps
                job.stepped = True


class Counts(NamedTuple):
    """Counts since the loop began."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed: int = 0  # tokens of chunks
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    rounds: int = 0
    chunks: int = 0
    calls: int = 0
    live: int = 0  # live slots, summed over the calls
    prefill_seconds: float = 0.0  # in which the device computed chunks, and steps
    decode_seconds: float = 0.0
    busy_seconds: float = 0.0  # in which the device computed, at most; see device_time
    seen_seconds: float = 0.0  # of these, in which it computed for certain
    host_seconds: float = 0.0  # of rounds, without those in which the host waited for the device
    dispatch_seconds: float = 0.0  # in which a thread beside that one dispatched programs

    @property
    def tokens(self) -> int:
        """Those that chunks computed, and that steps gave."""
        return self.computed + self.new_tokens


class Tally:
    """The counts so far. Who counts knows no loop, so each is freed as soon as nobody holds it."""

    def __init__(self) -> None:
        self.counts = Counts()

    def add(self, **more: int | float) -> None:
        now = {name: getattr(self.counts, name) + value for name, value in more.items()}
        self.counts = self.counts._replace(**now)
