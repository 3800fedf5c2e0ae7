"""Whose events an event loop hands on next."""

import random

from jflash.serving.pipe.turns import Turns


def test_the_soon_ones_go_first_and_each_brings_all_that_came():
    turns, error = Turns(), ValueError("over")
    turns.add(1, [("a",), ("b",)], soon=False)
    turns.add(2, [("c",)], soon=False)
    turns.add(3, [("d",)], soon=True)
    turns.add(1, [("e",)], soon=False)
    turns.add(2, [("f",)], soon=True)  # what came for it goes with it
    turns.add(3, [("g",)], soon=False)
    turns.add(1, error, soon=False)
    assert len(turns) == 3
    assert turns.pop() == (3, [[("d",), ("g",)]])
    assert turns.pop() == (2, [[("c",), ("f",)]])
    assert turns.pop() == (1, [[("a",), ("b",), ("e",)], error])
    assert not turns


def test_nothing_is_lost_or_changes_places():
    """Of each request, however adds and pops follow one another."""
    for seed in range(50):
        draw, turns = random.Random(seed), Turns()
        given, taken, numbers = dict[int, list](), dict[int, list](), [*range(8)]
        for step in range(200):
            if draw.random() < 0.6:
                number, what = draw.choice(numbers), [(step, i) for i in range(draw.randint(1, 3))]
                turns.add(number, list(what), soon=draw.random() < 0.3)
                given.setdefault(number, []).extend(what)
            elif turns:
                number, came = turns.pop()
                assert came and all(came)
                taken.setdefault(number, []).extend(event for what in came for event in what)
                assert taken[number] == given[number], "with all that came"
        while turns:
            number, came = turns.pop()
            taken.setdefault(number, []).extend(event for what in came for event in what)
        assert taken == given
