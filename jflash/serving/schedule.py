"""The engine's next round: a pure function of the requests, the pages and the clock.

The order of two requests never changes: the smaller priority comes first, then the older one. The
first request is never preempted for another, so every text comes to its end.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Order = tuple[int, int]  # priority, arrival


class Waiting(NamedTuple):
    """A request without a slot; `pages` counts the available pages that it would take."""

    order: Order
    pages: int
    chunks: int = 1
    deadline: float | None = None


class Running(NamedTuple):
    """A request in a slot, with `chunks` of its text still to compute; none while it steps.

    `short` counts the pages that it lacks for the next call, `alone` those that no other job holds.
    `gained`: it has got tokens since it was admitted.
    """

    order: Order
    chunks: int = 0
    short: int = 0
    alone: int = 0
    gained: bool = False
    deadline: float | None = None


class Plan(NamedTuple):
    """The next round's requests, by their order; those in `steps` step after the chunks."""

    expired: tuple[Order, ...]
    preempted: tuple[Order, ...]  # their pages go, and they wait again
    grown: tuple[Order, ...]  # they get the pages that they lack
    admitted: tuple[Order, ...]
    chunks: tuple[Order, ...]  # one for each chunk, in this order
    steps: tuple[Order, ...]


class Pass(NamedTuple):
    """Some tokens of a prompt that are computed at once: the program's size, and their end."""

    size: int
    end: int


def passes(start: int, ends: Sequence[int], sizes: Sequence[int], chunks: int) -> Iterator[Pass]:
    """The next passes over a text from `start` on, of so many chunks of the smallest size.

    `ends` ascend, and a pass stops at each. A larger pass pays if half of it is the text's.
    """
    one, at = min(sizes), start
    budget = chunks * one
    for end in ends:
        while (rest := min(budget, end - at)) > 0:
            size = max(size for size in sizes if size == one or 2 * rest > size)
            at, budget = min(at + size, end), budget - size
            yield Pass(size, at)


def plan(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    *,
    slots: int,
    places: int,
    pages: int,
    clock: float,
    burst: int,
    each: int,
) -> Plan:
    """The next round, with `slots` free slots, `places` for more requests in a call of steps, and
    `pages` available pages.

    At most `burst` chunks run before a call in which requests step, and `each` of one request,
    whose later chunks take ever longer; without such a call, 8 times as many as `burst`. A request
    that lacks pages takes them from the last one that has gained tokens since it was admitted,
    itself included; without such a request it skips this call. Requests are admitted in order, and
    one that does not fit keeps all later ones waiting. One without a place in a call is admitted
    only if a page is left for each that runs, which would preempt it soon. A round that preempts
    admits none.
    """
    expired = [r.order for r in (*waiting, *running) if r.deadline and clock >= r.deadline]
    pages += sum(r.alone for r in running if r.order in expired)
    ending = sum(r.order in expired for r in running)
    slots, places = slots + ending, places + ending
    active = sorted((r for r in running if r.order not in expired), key=lambda r: r.order)
    preempted, grown, paused = list[Order](), list[Order](), list[Order]()
    for r in active:
        if r.chunks or not r.short or r.order in preempted:
            continue
        while pages < r.short and r.order not in preempted:
            victims = [v for v in active if v.gained and v.order not in preempted]
            victims = [v for v in victims if v.order >= r.order]
            if not victims:
                break
            preempted.append(victims[-1].order)
            pages += victims[-1].alone
        if r.order in preempted:
            continue
        if pages < r.short:
            paused.append(r.order)
        else:
            pages -= r.short
            grown.append(r.order)
    admitted = list[Order]()
    if not (preempted or paused):
        for w in sorted(waiting, key=lambda w: w.order):
            if w.order in expired:
                continue
            left = len(active) if len(admitted) >= places else 0
            if len(admitted) >= slots or w.pages + left > pages:
                break
            pages -= w.pages
            admitted.append(w.order)
    staying = [r for r in active if r.order not in preempted]
    steps = [r.order for r in staying if not r.chunks and r.order not in paused]
    entering = [w for w in waiting if w.order in admitted]
    chunks = [
        r.order
        for r in sorted((*staying, *entering), key=lambda r: r.order)
        for _ in range(min(r.chunks, each) if steps else r.chunks)
    ]
    return Plan(
        tuple(expired),
        tuple(preempted),
        tuple(grown),
        tuple(admitted),
        tuple(chunks[: burst if steps else 8 * burst]),
        tuple(steps),
    )
