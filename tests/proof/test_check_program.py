"""check-program: its report and exit code, and what it refuses.

What it checks is tests/proof/test_gates.py's; here the check itself is replaced.
"""

import json

import jax
import pytest
from flax import linen as nn

from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli import check_program, main
from jflash.layers.gather import AXIS
from jflash.proof.devices import FAULTS
from jflash.proof.program.gates import Result
from jflash.proof.program.step_program import cut
from tests.support.described_gpu import H200, device_mesh
from tests.support.refusals import one_line

SMALL = ["--shape", "tiny", "--capacity", "512"]
FINE = Result("one command buffer", 61, "61 launches", ())
NO_COPY = Result("no copy of a cache", 0, "0 copies", ())
COPIES = NO_COPY._replace(
    value=5, measured="5 copies", offences=tuple(f"copy.{i} in the loop" for i in range(5))
)


def run(*argv: str) -> int:
    return main.run("check-program", [*SMALL, *argv])


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(check_program, "leave_program_cache", lambda: None)


@pytest.mark.parametrize("broken", ["", "step B=2"])
def test_the_report(on_gpu, broken, monkeypatch, capsys, tmp_path):
    """Exit code 1 if one program of all breaks one gate; screen and file name it."""
    seen = []

    def check_one(program):
        batch = len(program.arguments[1].sequences.length)
        seen.append((program.models.drafter is not None, batch))
        return [FINE, COPIES if broken and seen[-1] == (True, 2) else NO_COPY], 12.34

    monkeypatch.setattr(check_program, "check_one", check_one)
    file = tmp_path / "report.json"
    code = run("--batch", "1,2", "--json", str(file))
    assert code == (check_program.FAILED if broken else 0)
    assert seen == [(False, 1), (False, 2), (True, 1), (True, 2)]
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert json.loads(out.splitlines()[-1]) == report
    assert list(report["programs"]) == ["plain B=1", "plain B=2", "step B=1", "step B=2"]
    assert report["failed"] == bool(broken) and report["heads_backend"] == "cpu"
    passed = {name: all(g["passed"] for k, g in gates.items() if k != "compile_seconds")
              for name, gates in report["programs"].items()}  # fmt: skip
    assert [name for name, well in passed.items() if not well] == ([broken] if broken else [])
    assert (
        out.count("compiled in 12 s") == 4
        and out.count("  ok     one command buffer  61 launches\n") == 4
    )
    if broken:
        assert "  FAILED no copy of a cache  5 copies\n" in out
        assert "copy.2 in the loop" in out and "copy.3" not in out.rpartition("\n{")[0]
        assert "and 2 more" in out
        assert len(report["programs"][broken][COPIES.gate]["offences"]) == 5


@pytest.fixture
def two_h200s(monkeypatch):
    """Described ones, until the programs are made."""
    monkeypatch.setattr(jax, "local_devices", lambda: list(device_mesh(H200, 2, AXIS).devices.flat))
    monkeypatch.setattr(jax, "devices", lambda: list(device_mesh(H200, 2, AXIS).devices.flat))
    monkeypatch.setitem(SHAPES, "small", cut(model_shape("qwen3-coder-30b"), 1, 1))


@pytest.mark.long
def test_the_step_of_two_gpus_is_held_to_the_gates(two_h200s, monkeypatch):
    """They push what they exchange. A planted sum of what each adds up of its experts is found."""
    argv = ["--shape", "small", "--batch", "1", "--capacity", "512"]
    argv += ["--tensor-parallel", "2", "--experts-over", "devices"]
    made = check_program.programs(main.make_parser("check-program").parse_args(argv))
    monkeypatch.undo()
    assert list(made) == ["plain B=1", "step B=1"]
    for program in made.values():
        models = program.models
        assert models.mesh is not None and models.mesh.size == 2
        assert models.kernels.gather == "push"
        assert [moe.over for moe in models.target.config.experts] == ["devices"]
    results, _ = check_program.check_one(made["plain B=1"])
    assert results[-1].gate == "only gathers"
    assert all(result.passed for result in results), results
    with nn.intercept_methods(FAULTS["devices"]):
        *_, crossing = check_program.check_one(made["plain B=1"])[0]
    assert any("all-reduce" in offence for offence in crossing.offences)


def test_the_report_of_devices_that_share_the_pair_says_so(on_gpu, monkeypatch, capsys):
    monkeypatch.setattr(check_program, "tensor_mesh", lambda n: device_mesh(H200, n, AXIS))
    monkeypatch.setattr(check_program, "check_one", lambda _: ([FINE], 1.0))
    assert run("--batch", "1", "--tensor-parallel", "2") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["tensor_parallel"], report["experts_over"]) == (2, "columns")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--tensor-parallel 0", "--tensor-parallel 0: at least 1"),
        ("--tensor-parallel 99", "over 99 devices: this host has"),
        ("--experts-over devices", "--experts-over devices needs --tensor-parallel of 2 or more"),
        ("--shape huge", "no shape is called 'huge'"),
        ("--capacity 1000", "--capacity 1000"),
        ("--batch 0", "'0' is no list"),
        ("--overwrite", "--overwrite without --json"),
        ("--json /nowhere/report.json", "cannot write /nowhere"),
        ("--attention-backend mosaic_gpu", "9.x, and this is a cpu device: use 'cpu'"),
        ("--matmul-backend canonical", "matmul backend 'canonical' needs"),
        ("--heads-backend triton", "heads backend 'triton' needs"),
    ],
)
def test_refusals(on_gpu, options, named, capsys):
    assert run(*options.split()) == 2
    one_line(capsys, named)


def test_without_a_gpu_it_says_so(capsys):
    assert run() == 2
    one_line(capsys, "NVIDIA GPU")
