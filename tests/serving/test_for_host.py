"""What the host reads of a program lies in the host's memory when the program ends, on one GPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.pair import Models
from jflash.serving.packing import Report
from jflash.serving.programs import for_host
from tests.support.pairs import random_pair


def step(state, given):
    """A program's new state, and its report."""
    return state + given, Report(state * given, None)


@pytest.fixture(scope="module")
def models() -> Models:
    return random_pair().models


def test_a_report_lies_in_the_hosts_memory(models):
    one_gpu = replace(models, kernels=models.kernels._replace(attention="canonical"))
    state, given = jnp.arange(6.0), jnp.full(6, 3.0)
    kept, report = jax.jit(for_host(one_gpu, step))(state, given)
    assert kept.sharding.memory_kind == "device"
    assert report.numbers.sharding.memory_kind == "pinned_host" and report.tops is None
    np.testing.assert_array_equal(kept, np.arange(6.0) + 3)
    np.testing.assert_array_equal(report.numbers, np.arange(6.0) * 3)


def test_on_a_cpu_and_over_several_devices_it_stays_where_it_is(models):
    assert for_host(models, step) is step
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    several = replace(models, kernels=models.kernels._replace(attention="canonical"), mesh=mesh)
    assert for_host(several, step) is step
