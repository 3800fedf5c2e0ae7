"""The plan on literals, and that everybody ends whatever the pages are."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jflash.serving.calls.slots import Window
from jflash.serving.paging.pages import PAGE, Pages, chain
from jflash.serving.paging.sliding import Held, Sliding
from jflash.serving.schedule import Order, Plan, Running, Waiting, plan

NOTHING = Plan((), (), (), (), (), ())
HOW: dict[str, Any] = dict(clock=0.0, burst=2, each=9)


def test_who_waits_comes_in_order():
    waiting = [Waiting((1, 0), 2), Waiting((0, 3), 4), Waiting((0, 1), 3)]
    got = plan(waiting, [], slots=2, places=2, pages=10, clock=0.0, burst=2, each=9)
    assert got == NOTHING._replace(admitted=((0, 1), (0, 3)), chunks=((0, 1), (0, 3)))
    got = plan(waiting, [], slots=3, places=3, pages=6, clock=0.0, burst=2, each=9)
    assert got.admitted == ((0, 1),)  # nobody passes the one that does not fit


def test_a_prompt_that_is_computed_ahead_leaves_pages_to_those_that_step():
    """One to each, or it would soon be preempted for them; so does the last of two that come."""
    running, waiting = [Running((0, 0)), Running((0, 1))], [Waiting((0, 2), 3), Waiting((0, 3), 3)]
    for places, pages, admitted in ((0, 4, 0), (0, 5, 1), (1, 7, 1), (1, 8, 2), (2, 6, 2)):
        got = plan(waiting, running, slots=2, places=places, pages=pages, **HOW)
        assert len(got.admitted) == admitted


def test_chunks_do_not_keep_steps_waiting():
    running = [Running((0, 0)), Running((0, 1), chunks=9)]
    got = plan([], running, slots=0, places=0, pages=0, clock=0.0, burst=2, each=9)
    assert got == NOTHING._replace(chunks=((0, 1),) * 2, steps=((0, 0),))
    got = plan([], running[1:], slots=1, places=1, pages=0, clock=0.0, burst=2, each=9)
    assert got.chunks == ((0, 1),) * 9
    several = [*running, Running((0, 2), chunks=3)]
    got = plan([], several, slots=0, places=0, pages=0, clock=0.0, burst=5, each=4)
    assert got.chunks == ((0, 1),) * 4 + ((0, 2),)  # a long text leaves time to the next


def test_the_last_gives_its_pages():
    old, young = Running((0, 0), short=2, gained=True), Running((0, 1), alone=3, gained=True)
    waiting = [Waiting((0, 2), 1)]
    got = plan(waiting, [young, old], slots=1, places=1, pages=1, clock=0.0, burst=2, each=9)
    assert got == NOTHING._replace(preempted=((0, 1),), grown=((0, 0),), steps=((0, 0),))
    fresh = young._replace(gained=False)  # it came back just now: the old one sits out
    got = plan(
        waiting,
        [fresh, old._replace(gained=False)],
        slots=1,
        places=1,
        pages=1,
        clock=0.0,
        burst=2,
        each=9,
    )
    assert got == NOTHING._replace(steps=((0, 1),))
    needy = young._replace(short=2)  # never an older one for a younger
    got = plan(
        [],
        [old._replace(short=0, alone=9), needy],
        slots=1,
        places=1,
        pages=1,
        clock=0.0,
        burst=2,
        each=9,
    )
    assert got == NOTHING._replace(preempted=((0, 1),), steps=((0, 0),))


def test_time_is_up():
    running = [Running((0, 0), alone=5, deadline=3.0), Running((0, 1), deadline=4.0)]
    waiting = [Waiting((0, 2), 5, 1, 2.0), Waiting((0, 3), 5)]
    got = plan(waiting, running, slots=0, places=0, pages=0, clock=3.0, burst=1, each=9)
    assert got == NOTHING._replace(
        expired=((0, 2), (0, 0)), admitted=((0, 3),), chunks=((0, 3),), steps=((0, 1),)
    )


@dataclass
class Text:
    """A request of the property below, in tokens; a round's step adds at most WIDTH of them."""

    arrival: int
    prompt: int
    new: int
    tokens: int = 0
    left: int = 0  # to compute since it was admitted
    held: int = 0  # pages
    gained: int = 0  # tokens since it was admitted
    known: bool = False  # to the host, a round later, that it has gained

    def needs(self, tokens: int) -> int:
        """The pages of the next round, after so many tokens."""
        return -(-min(self.prompt + self.new, tokens + WIDTH) // IN_PAGE)


WIDTH, IN_PAGE, IN_CHUNK = 3, 2, 4
TEXTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # priority
        st.builds(Text, st.integers(0, 20), st.integers(1, 9), st.integers(1, 12)),
    ),
    min_size=1, max_size=9,
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    texts=TEXTS, slots=st.integers(1, 4), ahead=st.integers(0, 2), spare=st.integers(0, 6),
    burst=st.integers(1, 3),
    gains=st.lists(st.integers(1, WIDTH), min_size=1, max_size=9),
)  # fmt: skip
def test_who_was_preempted_gains_before_the_next_time_and_everybody_ends(
    texts, slots, ahead, spare, burst, gains
):
    """Whoever comes when, with pages for the longest text alone, and some to spare; `slots` texts
    step, and the prompts of more are computed ahead."""
    coming = {(priority, i): text for i, (priority, text) in enumerate(texts)}
    total = spare + max(text.needs(text.prompt + text.new) for text in coming.values())
    waiting, running, gain = dict[Order, Text](), dict[Order, Text](), itertools.cycle(gains)
    for text in coming.values():
        text.tokens = text.prompt
    for clock in itertools.count():
        waiting |= {o: text for o, text in coming.items() if text.arrival == clock}
        got = plan(
            [Waiting(o, t.needs(t.tokens), -(-t.tokens // IN_CHUNK)) for o, t in waiting.items()],
            [
                Running(
                    o, -(-t.left // IN_CHUNK), 0 if t.left else max(0, t.needs(t.tokens) - t.held),
                    t.held, t.known,
                )
                for o, t in running.items()
            ],
            slots=slots + ahead - len(running), places=slots - len(running),
            pages=total - sum(t.held for t in running.values()),
            clock=0.0, burst=burst, each=2,
        )  # fmt: skip
        news = any(t.gained and not t.known for t in running.values())
        moves = got.steps or got.chunks or got.preempted or news
        assert moves or not (waiting or running), "livelock"
        for text in running.values():
            text.known = text.gained > 0
        for order in got.preempted:
            waiting[order] = text = running.pop(order)
            assert text.gained > 0, "it had gained nothing since it came"
            lacked = text.held < text.needs(text.tokens)
            assert lacked or min(got.grown) < order, "it gave its pages to a later one"
            text.held = text.left = 0
        for order in got.grown:
            running[order].held = running[order].needs(running[order].tokens)
        for order in got.admitted:
            running[order] = text = waiting.pop(order)
            text.left, text.held, text.gained = text.tokens, text.needs(text.tokens), 0
            text.known = False
        for order in got.chunks:
            running[order].left = max(0, running[order].left - IN_CHUNK)
        ready = [order for order in dict.fromkeys(got.chunks) if not running[order].left]
        able = sorted((*got.steps, *ready), key=lambda order: (not running[order].gained, order))
        for order in able[:slots]:
            text = running[order]
            more = min(next(gain), text.prompt + text.new - text.tokens)
            text.tokens, text.gained = text.tokens + more, text.gained + more
            assert text.tokens <= text.held * IN_PAGE, "it wrote past its pages"
            if text.tokens == text.prompt + text.new:
                del running[order]
        assert sum(t.held for t in running.values()) <= total
        assert len(running) <= slots + ahead
        if not (waiting or running) and all(text.arrival <= clock for text in coming.values()):
            return


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
