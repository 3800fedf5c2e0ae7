"""What the device was given and the host has not read: it is read in order, and becomes texts.

Whoever waits for events is told of them by `tell`, which the loop calls once the device has its
next work: until then the host's time may be the device's. `tell_ends` does not wait for that: who
waits for a first token sees it, and whoever has an answer may ask again.
"""

from collections import deque
from collections.abc import Callable, Sequence

from jflash.serving.calls.packing import Taken
from jflash.serving.thread.device import Device
from jflash.serving.thread.events import (
    Gain,
    events_of,
    first_token,
    gain,
    keep_prompt_scores,
    tokens_of_calls,
)
from jflash.serving.thread.holdings import Holdings
from jflash.serving.thread.job import Job, Read
from jflash.serving.thread.roster import OnEvents, Roster


class Unread(deque[Read]):
    """In the order in which the device computes them. `count` adds to the loop's counts."""

    def __init__(
        self, device: Device, holdings: Holdings, roster: Roster, count: Callable[..., None]
    ) -> None:
        super().__init__()
        self._device, self._holdings, self._roster = device, holdings, roster
        self._count = count
        self._untold = list[Gain]()

    def read_next(self) -> Read:
        """Waits for a chunk or a call, and adds what it gives to the texts. That is read."""
        read = self.popleft()
        self._count(**self._device.time.wait_for(read.given))
        given = read.given.result()
        if given.report is not None:
            self._device.learn(read, given.report)
            taken = list(tokens_of_calls(read, given.report, self._device.models.block_size))
            read.count_unread(-read.steps)
            self._gain(taken)
        elif read.job is not None and read.job.reason is None:
            if given.scored is not None:
                keep_prompt_scores(read.job, given, read.count)
            if given.first is not None:
                self._gain([(read.job, first_token(read.job, given.first, read.index))])
        return read

    @property
    def ready(self) -> bool:
        """Whether the next one can be read without waiting."""
        given = self[0].given
        if not given.done() or given.exception() is not None:
            return given.done()
        return given.result().dispatched.array.is_ready()

    def _gain(self, given: Sequence[tuple[Job, Taken]]) -> None:
        """Adds the tokens of some steps to each text, whose slot and pages are free if that ends
        it."""
        for job, of_job in given:
            self._untold.append(gain(job, of_job))
            if job.reason or job.seen.pages:  # pages of a window may be given away meanwhile
                self._name(job)
            if job.reason:
                self._roster.leave(job)

    def _name(self, job: Job) -> None:
        """Lets others find its pages whose tokens the host knows, but for the newest token's."""
        self._holdings.name(job, len(job.tokens) - 1)

    def tell_ends(self, version: int, on_events: OnEvents) -> None:
        """`tell`, of the texts that have their first token or their last one since."""
        soon = {id(each.job) for each in self._untold if each.job.reason or each.begins}
        told = [each for each in self._untold if id(each.job) in soon]
        self._untold = [each for each in self._untold if id(each.job) not in soon]
        self._tell(told, version, on_events)

    def tell(self, version: int, on_events: OnEvents) -> None:
        """Hands on what was gained since the last call of this, of this version of the weights."""
        told, self._untold = self._untold, []
        self._tell(told, version, on_events)

    def _tell(self, told: Sequence[Gain], version: int, on_events: OnEvents) -> None:
        most = self._device.models.max_accept
        events = [(gained.job, events_of(gained, most, version)) for gained in told]
        every = [event for _, of_job in events for event in of_job]
        self._count(  # first, for who sees the last event may ask for the counts
            new_tokens=sum(len(event.token_ids) for event in every),
            drafted=sum(event.drafted for event in every),
            accepted=sum(event.accepted for event in every),
        )
        for job, of_job in events:
            if job.slot is not None:
                self._name(job)
            if of_job:
                on_events(job, of_job)
            self._roster.drop_failed([job])
