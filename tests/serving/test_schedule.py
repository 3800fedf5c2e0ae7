"""The plan on literals, and that everybody ends whatever the pages are."""

import random

import pytest

from jflash.serving.pages import PAGE, Pages, chain
from jflash.serving.schedule import Plan, Running, Waiting, plan
from jflash.serving.sliding import Held, Sliding
from jflash.serving.slots import Window

NOTHING = Plan((), (), (), (), (), ())
HOW = dict(slots=2, pages=10, clock=0.0, burst=2, each=9)


def test_who_waits_comes_in_order():
    waiting = [Waiting((1, 0), 2), Waiting((0, 3), 4), Waiting((0, 1), 3)]
    got = plan(waiting, [], slots=2, pages=10, clock=0.0, burst=2, each=9)
    assert got == NOTHING._replace(admitted=((0, 1), (0, 3)), chunks=((0, 1), (0, 3)))
    got = plan(waiting, [], slots=3, pages=6, clock=0.0, burst=2, each=9)
    assert got.admitted == ((0, 1),)  # nobody passes the one that does not fit


def test_chunks_do_not_keep_steps_waiting():
    running = [Running((0, 0)), Running((0, 1), chunks=9)]
    got = plan([], running, slots=0, pages=0, clock=0.0, burst=2, each=9)
    assert got == NOTHING._replace(chunks=((0, 1),) * 2, steps=((0, 0),))
    got = plan([], running[1:], slots=1, pages=0, clock=0.0, burst=2, each=9)
    assert got.chunks == ((0, 1),) * 9
    several = [*running, Running((0, 2), chunks=3)]
    got = plan([], several, slots=0, pages=0, clock=0.0, burst=5, each=4)
    assert got.chunks == ((0, 1),) * 4 + ((0, 2),)  # a long text leaves time to the next


def test_the_last_gives_its_pages():
    old, young = Running((0, 0), short=2, gained=True), Running((0, 1), alone=3, gained=True)
    waiting = [Waiting((0, 2), 1)]
    got = plan(waiting, [young, old], slots=1, pages=1, clock=0.0, burst=2, each=9)
    assert got == NOTHING._replace(preempted=((0, 1),), grown=((0, 0),), steps=((0, 0),))
    fresh = young._replace(gained=False)  # it came back just now: the old one sits out
    got = plan(
        waiting, [fresh, old._replace(gained=False)], slots=1, pages=1, clock=0.0, burst=2, each=9
    )
    assert got == NOTHING._replace(steps=((0, 1),))
    needy = young._replace(short=2)  # never an older one for a younger
    got = plan(
        [], [old._replace(short=0, alone=9), needy], slots=1, pages=1, clock=0.0, burst=2, each=9
    )
    assert got == NOTHING._replace(preempted=((0, 1),), steps=((0, 0),))


def test_time_is_up():
    running = [Running((0, 0), alone=5, deadline=3.0), Running((0, 1), deadline=4.0)]
    waiting = [Waiting((0, 2), 5, 1, 2.0), Waiting((0, 3), 5)]
    got = plan(waiting, running, slots=0, pages=0, clock=3.0, burst=1, each=9)
    assert got == NOTHING._replace(
        expired=((0, 2), (0, 0)), admitted=((0, 3),), chunks=((0, 3),), steps=((0, 1),)
    )


@pytest.mark.parametrize("seed", range(20))
def test_everybody_ends(seed):
    """Requests that grow by a page a call, in a pool that holds the longest of them alone."""
    rng = random.Random(seed)
    goals = {(rng.randrange(2), i): rng.randrange(2, 9) for i in range(8)}
    total = max(goals.values())
    waiting, running = dict.fromkeys(goals, 1), dict[tuple, dict]()
    since = {}
    for _ in range(400):
        free = total - sum(r["held"] for r in running.values())
        got = plan(
            [Waiting(order, held + 1) for order, held in waiting.items()],
            [
                Running(o, 0, max(0, r["done"] + 1 - r["held"]), r["held"], r["gained"])
                for o, r in running.items()
            ],
            slots=3 - len(running), pages=free, clock=0.0, burst=1, each=9,
        )  # fmt: skip
        for order in got.preempted:
            assert since[order] > 0, "it had gained nothing since it came"
            waiting[order] = running.pop(order)["done"]
        for order in got.grown:
            running[order]["held"] += 1
        for order in got.admitted:
            done = waiting.pop(order)
            running[order] = {"done": done, "held": done + 1, "gained": False}
            since[order] = 0
        for order in got.steps:
            r = running[order]
            assert r["held"] > r["done"]
            r["done"], r["gained"] = r["done"] + 1, True
            since[order] += 1
            if r["done"] >= goals[order]:
                del running[order]
        assert sum(r["held"] for r in running.values()) <= total
        if not (waiting or running):
            return
    raise AssertionError(f"{waiting} and {running} are left")


def test_pages_are_found_held_and_given_away():
    pages, text = Pages(4), list(range(3 * PAGE))
    names = chain(text, b"a")
    assert chain(text[: 2 * PAGE], b"a") == names[:2] != chain(text[: 2 * PAGE], b"b")
    assert chain(text, b"a", names[:1]) == names
    first = pages.take(3)
    assert first is not None and pages.take(2) is None and pages.available == 1
    for page, name in zip(first, names, strict=True):
        pages.name(page, name)
    pages.hold(first[:1])
    pages.release(first)
    assert (pages.available, pages.kept, pages.held(first), pages.held_by_one(first)) == (
        3,
        2,
        1,
        1,
    )
    assert pages.find([*names, b""]) == first
    assert pages.take(2) is not None
    assert pages.find(names) == first[:2]  # the end of a text goes first
    pages.release(first[:1])
    pages.forget_all()
    assert pages.find(names) == [] and pages.available == 2
    with pytest.raises(AssertionError, match="once too often"):
        pages.release(first[:1])


def test_a_window_slides_over_its_pages():
    """Pages before it return, named ones are found; a hit ends where all that is seen exists."""
    sliding = Sliding(Window(size=PAGE + 1, pages=6))
    names = chain(list(range(8 * PAGE)), b"")
    held = Held()
    sliding.slide(held, 0, 3)
    assert sorted(held.pages) == [0, 1, 2] and sliding.pages.available == 3
    sliding.name(held, names[:3])
    sliding.slide(held, 2 * PAGE - 1, 4)  # sees positions from PAGE - 1 on
    assert sorted(held.pages) == [0, 1, 2, 3]
    sliding.slide(held, 3 * PAGE, 5)  # from 2 · PAGE on
    assert sorted(held.pages) == [2, 3, 4] and sliding.pages.kept == 2
    row = sliding.row(held, 8).tolist()
    assert row == [0, 0, *(held.pages[i] for i in (2, 3, 4)), 6, 6, 6]
    assert sliding.shortened(names[:5]) == 3  # column 3 has no name yet
    other = sliding.admit(names[:3])
    assert other.pages == {2: held.pages[2]} and sliding.pages.held_by_one(row[2:3]) == 0
    sliding.leave(held)
    assert sliding.pages.available == 5
    sliding.leave(other)
    assert sliding.pages.take(4) is not None  # with column 1's, the least recently used name
    assert [sliding.shortened(names[:n]) for n in (1, 2, 3)] == [1, 1, 3]
    nothing = Sliding(None)
    assert nothing.shortened(names) == 8 and nothing.row(Held(), 8).size == 0
