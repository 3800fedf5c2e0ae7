"""States of targets that do not keep every layer's keys and values: their bytes, by hand.

The sizes are those of the published models' configs.
"""

import pytest

from jflash.memory import memory_budget
from tests.step.test_memory import published, sized


def texts(capacity: int) -> int:
    """Bytes of a sequence's tokens, and of the tokens that each of its steps committed."""
    return 2 * 4 * capacity


FEW = 1000  # bytes of a sequence's other numbers, such as its length


def test_a_sequences_recurrent_states_count():
    """48 of Qwen3.5-27B's 64 layers are delta nets, of 48 value heads and 16 of keys, each 128."""
    plain, capacity = published("qwen3.5-27b").plain(), 4096
    states = 48 * 48 * 128 * 128 * 4  # in float32
    replayed = 48 * 32 * (16 * 128 + 48 * 128 + 48 + 48) * 4  # keys, values, decay and beta
    convolved = 48 * 19 * (2 * 16 * 128 + 48 * 128) * 2  # 16 rows, and 3 before them
    assert round(states / 1e6) == 151 and round(replayed / 1e6) == 51
    slots = capacity * 16 * 2 * 4 * 256 * 2  # keys and values of the other layers
    one, two = (memory_budget(plain, sized(n, capacity)).caches for n in (1, 2))
    found = two - one - slots - texts(capacity)
    assert 0 < found - (states + replayed + convolved) < FEW
    longer = memory_budget(plain, sized(1, 2 * capacity)).caches
    assert longer - one == slots + texts(capacity)  # a state is as large in any context


@pytest.mark.parametrize(("batch", "capacity"), [(1, 4096), (3, 65536)])
def test_a_target_with_windows_takes_rings(batch, capacity):
    """50 of Gemma 4 31B's 60 layers see 1024 tokens; the others have wider heads, but fewer."""
    plain = published("gemma-4-31b").plain()
    full = 10 * capacity * 2 * 4 * 512 * 2
    ring = 1152  # slots: 1024 and a chunk of 128 but for one, rounded up to 64
    rings = 50 * ring * 2 * 16 * 256 * 2
    found = memory_budget(plain, sized(batch, capacity)).caches / batch
    assert 0 < found - full - rings - texts(capacity) < FEW
