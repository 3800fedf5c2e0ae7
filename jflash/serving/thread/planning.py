"""The next round of the requests at hand: what `schedule.plan` must know of each.

This file knows requests and their pages, and no device.
"""

import heapq
import time
from collections.abc import Sequence

from jflash.serving.schedule import Plan, Running, Waiting, plan
from jflash.serving.thread.holdings import Holdings
from jflash.serving.thread.job import Job


def planned(
    waiting: Sequence[Job],
    running: Sequence[Job],
    holdings: Holdings,
    *,
    chunk: int,
    slots: int,
    places: int,
    burst: int,
    each: int,
    still: bool,
) -> Plan:
    """The next round, with `slots` free slots and `places` in calls; `still`: no new text begins.

    Of those that wait only as many are looked at as may find a slot. A request whose time is up
    ends however long the queue is.
    """
    now, queued = time.monotonic(), list[Waiting]()
    coming = [job for job in waiting if job.begun or not still]
    ending = sum(job.deadline is not None and job.deadline <= now for job in (*waiting, *running))
    for job in heapq.nsmallest(slots + ending, coming, key=lambda job: job.order):
        fresh, cached = holdings.fresh(job)
        chunks = -(-(job.to_compute - cached) // chunk)
        queued.append(Waiting(job.order, fresh, chunks, job.deadline))
    late = [job for job in waiting if job.deadline and job.deadline <= now]
    seen = {w.order for w in queued}
    queued += [Waiting(job.order, 0, 0, job.deadline) for job in late if job.order not in seen]
    at_work = [
        Running(
            job.order,
            -(-(job.end - job.computed) // chunk) if job.end else 0,
            0 if job.end else holdings.short(job),
            holdings.pages.held_by_one(job.pages),
            job.gained,
            job.deadline,
        )
        for job in running
    ]
    return plan(
        queued, at_work, slots=slots, places=places, pages=holdings.pages.available, clock=now,
        burst=burst, each=each,
    )  # fmt: skip
