"""States of targets that do not keep every layer's keys and values: their bytes, by hand.

The sizes are those of the published models' configs, and those of the tiny shapes to the byte.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jflash.bench.floors import verify_work
from jflash.devices.mesh import local, over
from jflash.layers.gather import AXIS
from jflash.memory import memory_budget
from jflash.models.decoder import Target
from jflash.records.specs import MoeSpec
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


@pytest.mark.parametrize(
    ("batch", "capacity", "dtype"), [(2, 1024, "bfloat16"), (3, 512, "float32")]
)
def test_a_tiny_hybrids_caches_to_the_byte(batch, capacity, dtype):
    """Two of three layers are delta nets, of 4 value heads and 2 of keys, each 32."""
    size = {"bfloat16": 2, "float32": 4}[dtype]
    state = 4 * 32 * 32 * 4 + 4  # in float32, and the place that it stands at
    replayed = 32 * (2 * 32 + 4 * 32 + 4 + 4) * 4  # keys, values, decay and beta
    convolved = (16 + 3) * (2 * 2 * 32 + 4 * 32) * size
    slots = capacity * 2 * 2 * 64 * size  # of the layer that attends
    other = 16 * 4 + 1 + 8 + 8 * 4  # stops, done, key; 4 numbers and 4 filters
    found = memory_budget(published("tiny-hybrid", dtype=dtype).plain(), sized(batch, capacity))
    layers = 2 * (state + replayed + convolved) + slots
    assert found.caches == batch * (layers + texts(capacity) + other)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_device_of_several_takes_and_reads_its_part(devices):
    """Qwen3.5-35B-A3B has two KV heads: of four devices each keeps one, and two keep the same."""
    mesh = Mesh(np.asarray(jax.devices() * devices), (AXIS,))
    whole, capacity, context = published("qwen3.5-35b-a3b").plain(), 4096, 1024
    part = over(whole, mesh)
    one, several = (memory_budget(x, sized(1, capacity)) for x in (whole, part))
    slots = 10 * capacity * 2 * 2 * 256 * 2  # keys and values of the layers that attend
    rest = one.caches - slots - texts(capacity)  # states
    found = several.caches - slots // 2 - texts(capacity)
    assert 0 <= found - rest / devices < FEW + 30 * 4
    assert one.weights / devices < several.weights < 1.2 * one.weights / devices
    config = local(part).target.config
    floors = [verify_work(x, 1, 1, float(context)) for x in (whole.target.config, config)]
    [read, states], [own, own_states] = (
        (10 * (context + 1) * 2 * heads * 256 * 2, work.attention_bytes)
        for heads, work in zip((2, 1), floors, strict=True)
    )
    assert own_states - own == pytest.approx((states - read) / devices)
    assert floors[0].weight_bytes / devices < floors[1].weight_bytes
    # Where its part of a last product is small, a device reads all of it.
    assert floors[1].weight_bytes < 1.4 * floors[0].weight_bytes / devices


def test_a_tiny_hybrids_weights_with_shared_experts_to_the_byte():
    """Layers 0 and 2: delta nets, 8 experts of 64, and one of 96 that every token takes."""
    plain = published("tiny-hybrid").plain()

    def weights(shared_size: int | None) -> int:
        moe = MoeSpec(
            num_experts=8, experts_per_token=2, intermediate_size=64, renormalise=True,
            shared_size=shared_size,
        )  # fmt: skip
        target = Target(plain.target.config.with_experts(moe, (0, 2)))
        return memory_budget(replace(plain, target=target), sized()).weights

    delta = 128 * (128 + 128 + 128 + 4 + 4) + 128 * 128 + 4 * 256 + 4 + 4 + 32
    experts, shared = 8 * 3 * 128 * 64 + 8 * 128, 3 * 128 * 96 + 128  # with router and gate
    attending = 128 * (4 + 2 + 2) * 64 + 4 * 64 * 128 + 2 * 64 + 3 * 128 * 192
    ends = 2 * 512 * 128 + 128 + 3 * 2 * 128  # embedding, head and norms
    wider = 2 * 2 * (4 + 4)  # decay and its bias, a number a head, stay in float32
    assert weights(None) == 2 * (2 * (delta + experts) + attending + ends) + wider
    assert weights(96) - weights(None) == 2 * 2 * shared
