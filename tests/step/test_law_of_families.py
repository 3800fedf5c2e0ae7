"""The law of every family, on a CPU: its small pair, which the reference recorded, has the bits of
plain decoding at width 1 and batch 1 in other shapes. LOSSLESS.md names these tests.

tests/step/test_one_arithmetic.py has the same of every operation in each run, and that a fault is
caught.
"""

from pathlib import Path

import pytest

from tests.support.attention_checks import ON_GPU
from tests.support.digested import texts, total
from tests.support.pairs import prompts
from tests.support.reference import case_folders, pair

COMMITTED = Path(__file__).parents[1] / "reference" / "cases"


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
@pytest.mark.parametrize("folder", case_folders(pytest.param(COMMITTED, id=COMMITTED.name)))
def test_a_familys_pair_has_plain_decodings_bits(folder: Path):
    """Drafts are the text with mistakes; slots, capacity and chunks are others."""
    both = pair(folder)
    assert both.models.one_arithmetic
    asked = prompts(4, seed=31, low=20, high=140)
    want = texts(both.plain(), 1, asked)
    found = texts(both, 4, asked[::-1], capacity=512, chunk=64, replay=want[::-1])[::-1]
    assert not total(want, found).differ
