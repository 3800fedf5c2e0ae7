"""scripts/bench_devices.py: the same step on one device and on two, and what it leaves out."""

import json
import os

import pytest

from jflash.bench.shapes import model_shape
from jflash.cli import bench_devices, main
from jflash.models.params import leaf_paths
from jflash.records.kernels import BACKENDS
from tables.cells import Result
from tables.devices import several_gpus
from tests.support.refusals import one_line


@pytest.mark.long
def test_a_step_on_one_device_and_on_two(tmp_path, monkeypatch, capfd):
    """Two virtual devices: each reads, multiplies and holds half, but for whole last products."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    file = tmp_path / "result.json"
    argv = ["--cases", "tiny:2", "--context", "100", "--steps", "3", "--repeats", "1"]
    assert main.run("bench-devices", [*argv, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    one, two = result["cases"]
    assert [one["tensor_parallel"], two["tensor_parallel"]] == [1, 2]
    last = [
        leaf.size
        for config in model_shape("tiny")
        for path, leaf in leaf_paths(config).items()
        if path.endswith(("/out/kernel", "/down/kernel"))
    ]
    rows = 2 * one["block_size"]
    for what, each in {"bytes": 4, "operations": 2 * rows}.items():
        assert two["step"][what] == one["step"][what] / 2 + sum(last) / 2 * each
    held = [case["memory"]["weights_bytes"] for case in (one, two)]
    assert 0 < held[1] - sum(last) / 2 * 4 - held[0] / 2 < held[0] / 200  # norms lie on both
    assert two["memory"]["caches_bytes"] == one["memory"]["caches_bytes"] / 2
    share = two["step"]["ms"] / one["step"]["ms"]
    assert "against" not in one
    assert two["against"] == {"tensor_parallel": 1, "share_of_time": share}
    assert f"2 devices: {two['step']['ms']:.3f} ms" in (out := capfd.readouterr().out)
    assert f"{share:.3f} × the time of 1" in out


@pytest.fixture
def measured(monkeypatch):
    """The cases that are timed, without a device; too large for fewer devices than `needs`."""
    made, needs = [], {"tiny": 1, "tiny-moe": 2, "tiny-hybrid": 4}

    def measure(task, with_memory):
        made.append((task.shape, task.batch, task.tensor_parallel))
        if task.tensor_parallel < needs[task.shape]:
            raise SystemExit(2)  # as a process that printed why
        shared = dict.fromkeys((*BACKENDS, "device", "versions", "xla_flags", "date"), "x")
        step = {"ms": 8.0 / task.tensor_parallel, "share_of_floor": 0.5}
        fields = {name: getattr(task, name) for name in ("shape", "batch", "context")}
        return shared | fields | {"tensor_parallel": task.tensor_parallel, "step": step}

    monkeypatch.setattr(bench_devices, "measure", measure)
    monkeypatch.setattr(bench_devices, "device_line", lambda case: "")
    return made


def test_what_few_devices_cannot_hold_is_left_out_for_them(measured, capsys):
    assert main.run("bench-devices", ["--cases", "tiny:1,8", "tiny-moe:1"]) == 0
    assert measured[:4] == [("tiny", 1, 1), ("tiny", 1, 2), ("tiny", 8, 1), ("tiny", 8, 2)]
    printed = capsys.readouterr().out
    cases = json.loads(printed.splitlines()[-1])["cases"]
    assert [case["shape"] for case in cases] == ["tiny"] * 4 + ["tiny-moe"]
    assert [case.get("against", {}).get("share_of_time") for case in cases] == [
        *(None, 0.5, None, 0.5),
        None,
    ]
    assert "tiny-moe, batch 1: not on 1, as the line above says" in printed


def test_experts_are_timed_in_each_way_on_several_devices(measured, monkeypatch):
    """Shapes without experts, and one device, have one way."""
    made, measure = [], bench_devices.measure

    def noted(task, with_memory):
        made.append((task.shape, task.tensor_parallel, task.experts_over))
        return measure(task, with_memory) | {"experts_over": task.experts_over}

    monkeypatch.setattr(bench_devices, "measure", noted)
    argv = ["--cases", "tiny:1", "tiny-moe:1", "--experts-over", "columns,devices"]
    *_, done = bench_devices.run(main.make_parser("bench-devices").parse_args(argv))
    one, two, *moe = made
    assert (one, two) == (("tiny", 1, "columns"), ("tiny", 2, "columns"))
    whole = ("tiny-moe", 2, "devices")
    assert moe == [("tiny-moe", 1, "columns"), ("tiny-moe", 2, "columns"), whole]
    lines = [bench_devices.line(case) for case in done["cases"]]
    assert ["experts whole" in line for line in lines] == [False, False, False, True]
    assert "missing_cases" not in done


def test_what_no_number_of_devices_can_hold_ends_the_run_and_keeps_the_rest(measured, tmp_path):
    file = tmp_path / "result.json"
    with pytest.raises(SystemExit, match="2"):
        main.run("bench-devices", ["--cases", "tiny:1", "tiny-hybrid:1", "--json", str(file)])
    left = json.loads(file.read_text())
    assert len(left["cases"]) == 2 and left["missing_cases"] == 2


def test_the_table_has_the_shares_of_one_run(measured):
    argv = ["--cases", "tiny:1", "--devices", "1,2,4"]
    *_, done = bench_devices.run(main.make_parser("bench-devices").parse_args(argv))
    for case in done["cases"]:
        case["shape"] = "qwen3-8b"
    device = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    alone = {"cases": [case | {"batch": 8} for case in done["cases"][:1]]}  # another command's
    text = several_gpus([Result("a.json", done | device), Result("b.json", alone | device)])
    shares = "8.00 ms | 4.00 ms, 0.50 × (goal 0.68 ×) | 2.00 ms, 0.25 × (goal 0.48 ×)"
    assert f"| qwen3-8b, batch 1 | GPU | {shares} |" in text
    row = "| qwen3-32b, batch 1 |  | not measured | not measured | not measured (goal 0.62 ×) |"
    assert row in text
    assert "a.json" in text and "b.json" not in text
    assert " ms" not in several_gpus([Result("b.json", alone | device)])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--cases tiny", "'tiny' is no case such as qwen3-8b:1,32"),
        (
            "--cases tiny+fp9:1",
            "tiny cannot be kept as 'fp9': use one of fp8, fp8-float32, int4, mxfp4",
        ),
        ("--cases tiny:0", "'0' is no list of numbers from 1"),
        ("--cases huge:1", "no shape is called 'huge'"),
        ("--devices 0", "'0' is no list of numbers from 1"),
        ("--cases tiny:1 --context 5000", "--context 5000: tiny has 4096 positions"),
        ("--gathers --steps 5", "--steps with --gathers, which times no steps"),
        ("--cases tiny:1 --experts-over devices", "no case has experts on several --devices"),
        ("--experts-over rows", "'rows': of columns,devices"),
        ("--no-compilation-cache", "--no-compilation-cache"),
    ],
)
def test_refusals(options, named, capsys):
    assert main.run("bench-devices", options.split()) == 2
    one_line(capsys, named)
