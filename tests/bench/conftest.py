"""What commands here measure of this machine is measured once in a process."""

import functools

import pytest


@functools.cache
def rates(dtype: str) -> dict[str, float]:
    from jflash.bench.floors import measure_rates

    return measure_rates(dtype)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    from jflash.bench.steps import case
    from jflash.cli import bench_kernels, bench_steps

    for module in (case, bench_kernels, bench_steps):
        monkeypatch.setattr(module, "measure_rates", rates)
