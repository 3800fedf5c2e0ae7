"""What the device was given and the host has not read: it is read in order, and becomes texts."""

from collections import deque
from collections.abc import Callable, Sequence

from jflash.serving.device import Device
from jflash.serving.events import first_token, gained, keep_prompt_scores, tokens_of_calls
from jflash.serving.holdings import Holdings
from jflash.serving.job import Job, Read
from jflash.serving.packing import Taken
from jflash.serving.roster import OnEvent, Roster


class Unread(deque[Read]):
    """In the order in which the device computes them. `count` adds to the loop's counts."""

    def __init__(
        self, device: Device, holdings: Holdings, roster: Roster, count: Callable[..., None]
    ) -> None:
        super().__init__()
        self._device, self._holdings, self._roster = device, holdings, roster
        self._count = count

    def read_next(self, version: int, on_event: OnEvent) -> Read:
        """Waits for a chunk or a call, and hands on what it gives, of this version of the weights.
        That is read."""
        read = self.popleft()
        self._count(**self._device.time.wait_for(read.given))
        given = read.given.result()
        if given.report is not None:
            self._device.learn(read, given.report)
            taken = list(tokens_of_calls(read, given.report, self._device.models.block_size))
            read.count_unread(-read.steps)
            self._gain(taken, version, on_event)
        elif read.job is not None and read.job.reason is None:
            if given.scored is not None:
                keep_prompt_scores(read.job, given, read.count)
            if given.first is not None:
                first = first_token(read.job, given.first, read.index)
                self._gain([(read.job, first)], version, on_event)
        return read

    def _gain(self, given: Sequence[tuple[Job, Taken]], version: int, on_event: OnEvent) -> None:
        """Adds the tokens of some steps to each text; the last one may end it."""
        most = self._device.models.max_accept
        events = [list(gained(job, of_job, most, version)) for job, of_job in given]
        every = [event for of_job in events for event in of_job]
        self._count(  # first, for who sees the last event may ask for the counts
            new_tokens=sum(len(event.token_ids) for event in every),
            drafted=sum(event.drafted for event in every),
            accepted=sum(event.accepted for event in every),
        )
        for (job, _), of_job in zip(given, events, strict=True):
            if of_job:
                job.gained, job.reason = True, of_job[-1].finish_reason
            self._holdings.name(job, len(job.tokens) - 1)
            if job.reason:
                self._roster.leave(job)  # before its last event, as above
            for event in of_job:
                on_event(job, event)
            self._roster.drop_failed([job])
