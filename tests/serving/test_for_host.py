"""What the host reads of a program lies in the host's memory when the program ends, on one GPU."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.compiled.shape import Shape
from jflash.generate import Pair
from jflash.pair import Models
from jflash.serving.calls import programs, steps
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.packing import Report
from jflash.serving.calls.steps import for_host
from tests.support.pairs import random_pair


def step(state, given):
    """A program's new state, and its report."""
    return state + given, Report(state * given, given)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair()


@pytest.fixture(scope="module")
def models(pair) -> Models:
    return pair.models


def of_one_gpu(models: Models) -> Models:
    return replace(models, kernels=models.kernels._replace(attention="canonical"))


def test_a_report_lies_in_the_hosts_memory(models):
    state, given = jnp.arange(6.0), jnp.full(6, 3.0)
    kept, report = jax.jit(for_host(of_one_gpu(models), step))(state, given)
    kinds = [x.sharding.memory_kind for x in (kept, report.numbers, report.tops)]
    assert kinds == ["device", "pinned_host", "device"]  # whoever wants `tops` asks for it
    np.testing.assert_array_equal(kept, np.arange(6.0) + 3)
    np.testing.assert_array_equal(report.numbers, np.arange(6.0) * 3)


def test_on_a_cpu_and_over_several_devices_it_stays_where_it_is(models):
    assert for_host(models, step) is step
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("x",))
    assert for_host(replace(of_one_gpu(models), mesh=mesh), step) is step


def test_of_each_program_whose_results_the_host_reads(pair, monkeypatch):
    """The hidden rows of a chunk stay on the device."""

    def not_compiled(submit: Any, lower: Any, function: Any, *given: Any) -> Future:
        (made := Future()).set_result(function)
        return made

    monkeypatch.setattr(programs, "compiling", not_compiled)
    monkeypatch.setattr(programs, "_compile", programs._compile.__wrapped__)
    layout = Layout(Shape.of(2, 256, 16, 128), 8, 2)
    found = programs.compile_programs(of_one_gpu(pair.models), pair.params, layout)
    into = {
        name: {function.func is steps._into_host for function in each.values()}
        for name, each in found._asdict().items()
    }
    read = "whole", "first", "greedy", "drawn"
    assert into == {name: {name in read} for name in (*read, "chunk", "score")}
