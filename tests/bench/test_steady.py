"""A long burst without its ends."""

import itertools
from types import SimpleNamespace

import pytest

from jflash.bench.serving.steady import Moment, looked_at, steady


def moment(seconds, ended, waiting):
    stats = SimpleNamespace(ended={"length": ended - 1, "stop": 1}, waiting=waiting)
    return Moment(seconds, stats)  # pyright: ignore[reportArgumentType]


def test_from_when_each_slot_has_been_given_again_until_no_request_waits():
    """Three texts had ended before the burst; two slots."""
    ended = [(0, 3, 0), (1, 3, 20), (2, 4, 18), (3, 5, 16), (4, 9, 9), (5, 14, 1), (6, 15, 0)]
    found = steady([moment(*each) for each in ended], 2)
    assert found is not None
    assert [each.seconds for each in found] == [3, 5]


@pytest.mark.parametrize(
    "ended",
    [
        [(0, 1, 0), (1, 3, 5), (2, 6, 1), (3, 9, 0)],  # three ended in between, not eight
        [(0, 1, 0), (1, 2, 0), (2, 20, 0)],  # none waited
    ],
)
def test_a_short_burst_has_only_ends(ended):
    assert steady([moment(*each) for each in ended], 2) is None


def test_moments_are_of_the_block_alone():
    counts = iter(range(1, 1000))
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(ended={"length": next(counts)}))
    with looked_at(engine) as moments:  # pyright: ignore[reportArgumentType]
        while len(moments) < 4:
            pass
    kept = len(moments)
    assert [each.ended for each in moments] == list(range(1, kept + 1))
    assert all(a.seconds < b.seconds for a, b in itertools.pairwise(moments))
