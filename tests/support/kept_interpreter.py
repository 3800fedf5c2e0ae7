"""Kernels for weights in fragments, in Pallas's interpreter, which knows no threads' registers.

So what threads do in registers is written here in jnp: the conversion and the turned result. The
rest is the kernel's own.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.kept import mosaic as kept_mosaic
from pallas_kernels.matmul.kept import pairs as kept_pairs
from pallas_kernels.matmul.kept.fragments import COLUMNS, DEPTH, PAIRED, Fragments


def converted(ref, w: Fragments):
    """As `kept.mosaic.converted`, of FP8 in one group a tile; thread, word, half, pair."""
    words = ref[...]
    mine = words[: w.code_rows].reshape(4, 128, 4).swapaxes(0, 1).reshape(4, 8, 4, 16, 1, 1)
    if w.narrow:
        place, apart, at_once = map(np.uint32, (0x87808780, 0x00700070, 0x87F087F0))
        first, second = mine & place | mine >> 8 & apart, mine << 4 & at_once
        bits = jnp.concatenate([first, second], axis=-2) >> 16 * jnp.arange(2, dtype=jnp.uint32)
        numbers = lax.bitcast_convert_type(bits << 16, jnp.float32)  # subnormal ones are 0 here
    else:
        shifts = 16 * jnp.arange(2)[:, None] + 8 * jnp.arange(2)
        codes = (mine >> shifts.astype(jnp.uint32) & 255).astype(jnp.uint8)
        numbers = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    numbers = numbers.transpose(0, 4, 1, 3, 2, 5).reshape(COLUMNS, DEPTH)
    scales = lax.bitcast_convert_type(words[w.code_rows], jnp.float32)
    return (numbers * scales[:, None]).astype(jnp.bfloat16)


def store(ref, value):
    ref[...] = value.T


def gate_and_up(value):
    turns = value.reshape(-1, 2, PAIRED, value.shape[1])
    return turns[:, 0].reshape(-1, value.shape[1]), turns[:, 1].reshape(-1, value.shape[1])


@pytest.fixture
def interpreted(monkeypatch):
    launch = functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(plgpu, "kernel", launch)
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    monkeypatch.setattr(kept_mosaic, "converted", converted)
    monkeypatch.setattr(kept_mosaic, "store", store)
    monkeypatch.setattr(kept_pairs, "store", store)
    monkeypatch.setattr(kept_pairs, "gate_and_up", gate_and_up)
