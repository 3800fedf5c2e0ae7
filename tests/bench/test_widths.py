"""Which block width is best, by numbers made up here."""

import numpy as np
import pytest

from jflash.bench.steps import widths


def test_a_geometric_profile_has_its_mean():
    for mean in (1.0, 3.5, 6.4, 15.9, 16.0):
        accepted = widths.geometric_profile(mean, 16)
        assert widths.expected_tokens(accepted, 16) == pytest.approx(mean)
        assert accepted == sorted(accepted, reverse=True) and len(accepted) == 15
    with pytest.raises(ValueError, match=r"16\.5 tokens a step"):
        widths.geometric_profile(16.5, 16)


def test_expected_tokens_are_the_mean_of_the_cut_acceptance():
    lengths = np.array([0, 0, 1, 3, 3, 7])  # drafts accepted at width 8
    accepted = [float((lengths >= k).mean()) for k in range(1, 8)]
    for width in range(1, 9):
        want = np.minimum(lengths + 1, width).mean()
        assert widths.expected_tokens(accepted, width) == pytest.approx(want)


def test_the_best_width():
    accepted = widths.geometric_profile(4.0, 16)
    assert widths.best_width(dict.fromkeys((4, 8, 16), 5.0), accepted) == 16
    assert widths.best_width({4: 4.0, 8: 8.0, 16: 16.0}, accepted) == 4
    assert widths.best_width({4: 6.0, 8: 6.2, 16: 9.0}, accepted) == 8
    assert widths.best_width({4: 6.0, 8: 6.2, 16: 9.0}, accepted[:3]) == 4
    with pytest.raises(ValueError, match="no width"):
        widths.best_width({8: 1.0}, accepted[:3])
