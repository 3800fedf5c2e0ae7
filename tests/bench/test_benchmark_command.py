"""scripts/benchmark.py: its processes and files, what it calls measured, and what it refuses."""

import json
import signal
import sys

import jax
import pytest

from jflash.bench.steps.report import SHARED
from jflash.cli import benchmark, main
from jflash.cli.interrupts import TERMINATED
from jflash.records.kernels import BACKENDS
from tests.support.reference import PYTHON, needs, path_of
from tests.support.refusals import one_line
from tests.support.small_checkpoints import make_pair


@pytest.fixture
def run_cli(capfd):
    """Runs the command here; the processes that measure are processes. Exit code and outputs."""

    def run(*options: str) -> tuple[int, str, str]:
        try:
            code = main.run("benchmark", options)
        except SystemExit as refused:  # by a process that it started
            assert isinstance(refused.code, int)
            code = refused.code
        return code, *capfd.readouterr()

    return run


def test_the_command(tmp_path, run_cli):
    out = tmp_path / "result.json"
    code, printed, err = run_cli(
        *("--shape", "tiny", "--context", "200", "--capacity", "512", "--only-step"),
        *("--steps", "4", "--repeats", "1", "--acceptance", "3", "--json", str(out)),
    )
    assert code == 0, err
    result = json.loads(out.read_text())
    assert json.loads(printed.splitlines()[-1]) == result
    assert set(result) == {*SHARED, "cases"}
    assert [case["gather_backend"] for case in result["cases"]] == ["xla"] * len(result["cases"])
    assert "CPU" in result["device"] and result["versions"]["jax"] == jax.__version__
    [case] = result["cases"]
    assert case["compile_seconds"]["warm_cache"] < case["compile_seconds"]["from_nothing"]
    # An assumed acceptance says so in its name, in the file and on the screen.
    assert "measured_speed" not in case
    assumed = case["assumed_speed"]
    assert assumed["assumed_tokens_per_second"] == pytest.approx(3e3 / case["step"]["ms"])
    assert [k for k in assumed if "tokens_per_second" in k] == ["assumed_tokens_per_second"]
    assert "at an assumed acceptance of 3 tokens a step, not measured" in printed
    assert "speed_up" not in out.read_text()


@pytest.mark.long
def test_two_devices_each_with_some_experts_whole(run_cli, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    code, printed, err = run_cli(
        *("--shape", "tiny-moe", "--context", "40", "--steps", "2", "--repeats", "1"),
        *("--only-step", "--no-memory", "--tensor-parallel", "2", "--experts-over", "devices"),
    )
    assert code == 0, err
    [case] = json.loads(printed.splitlines()[-1])["cases"]
    assert (case["tensor_parallel"], case["experts_over"]) == (2, "devices")
    assert case["step"]["ms"] > 0


def test_sigterm_takes_the_process_that_measures_and_its_folder_along(tmp_path, monkeypatch):
    """Both stayed, and the child went on with the device."""
    folders, usual = [], lambda *_: None  # which would let the command go on
    child = "import os, signal, sys, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(2); "
    child += "open(sys.argv[1], 'w')"

    def start(_stage, _task, folder):
        folders.append(folder)
        benchmark.call([sys.executable, "-c", child, str(tmp_path / "went-on")])

    monkeypatch.setattr(benchmark, "start", start)
    before = signal.signal(signal.SIGTERM, usual)
    try:
        with pytest.raises(SystemExit) as ended:
            benchmark.measure({}, with_memory=False)
        assert signal.getsignal(signal.SIGTERM) is usual
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == TERMINATED and not folders[0].exists()
    assert not (tmp_path / "went-on").exists()


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    """Case by case: a run that ends early says how many cases it lacks. Here with --beside."""
    out, made = tmp_path / "result.json", []

    def measure(task, with_memory):
        if len(made) == 2:
            raise ValueError("the device is gone")
        made.append((task.shape, task.batch, task.only_step))
        shared = dict.fromkeys((*BACKENDS, "device", "versions", "xla_flags", "date"), "x")
        return shared | {"shape": task.shape, "batch": task.batch, "step": {"ms": float(len(made))}}

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "case_text", lambda case: "")
    monkeypatch.setattr(benchmark, "device_line", lambda case: "")
    argv = ["--shape", "tiny", "--batch", "1,2,4", "--json", str(out), "--beside", "tiny-moe"]
    assert main.run("benchmark", argv) == 2
    left = json.loads(out.read_text())
    assert [case["batch"] for case in left["cases"]] == [1] and left["missing_cases"] == 2
    assert made == [("tiny", 1, False), ("tiny-moe", 1, True)]
    beside = {"shape": "tiny-moe", "step": {"ms": 2.0}, "times_as_long": 0.5}
    assert left["cases"][0]["beside"] == beside


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "give either --shape"),
        ("--shape tiny --target x --drafter y", "give either --shape"),
        ("--target x", "give either --shape"),
        ("--shape huge", "no shape is called 'huge'"),
        ("--shape=", "no shape is called ''"),
        ("--shape tiny --batch 0", "--batch: '0' is no list of numbers from 1"),
        ("--shape tiny --batch one", "'one'"),
        ("--shape tiny --widths 4,9", "--widths (4, 9)"),
        ("--shape tiny --acceptance 9", "--acceptance 9.0"),
        ("--shape tiny --capacity 1000", "--capacity 1000"),
        ("--shape tiny --reference-python p", "--reference-python p without --against"),
        ("--shape tiny --context 600 --capacity 512", "--context 600"),
        ("--shape tiny --context 5000", "--context 5000"),
        ("--shape tiny --prefill 99999", "--prefill 99999: the pair has"),
        ("--shape tiny --prefill-chunk 64", "--prefill-chunk without --prefill"),
        ("--shape tiny --max-new-tokens 5", "--max-new-tokens needs a real pair"),
        ("--shape tiny --prompts p.jsonl", "--prompts needs a real pair"),
        ("--shape tiny --batch 8 --against reference", "--batch 1"),
        ("--shape tiny --no-compilation-cache", "--no-compilation-cache"),
        ("--shape tiny --overwrite", "--overwrite without --json"),
        ("--shape tiny --tensor-parallel 2", "--tensor-parallel 2: give --only-step too"),
        ("--shape tiny --only-step --tensor-parallel 0", "--tensor-parallel 0: at least 1"),
        ("--shape tiny-moe --experts-over devices", "needs --tensor-parallel of 2 or more"),
        (
            "--shape tiny --only-step --tensor-parallel 2 --experts-over devices",
            "--experts-over devices: tiny has no experts",
        ),
        (
            "--shape tiny-moe --beside tiny --only-step --tensor-parallel 2 --experts-over devices",
            "--experts-over devices: tiny has no experts",
        ),
        ("--shape tiny --quantised mxfp4", "mxfp4 is a form of experts, and tiny has none"),
        ("--shape tiny --beside huge", "no shape is called 'huge'"),
        ("--target x --drafter y --beside tiny", "--beside compares random weights"),
        ("--target /nowhere --drafter /nowhere", "/nowhere"),
    ],
)
def test_refusals(options, named, capsys):
    assert main.run("benchmark", options.split()) == 2
    one_line(capsys, named)


def test_a_pair_is_read_without_its_device(tmp_path, monkeypatch, capsys):
    """A GPU's memory is for the processes that measure."""

    def touched(*_):
        raise AssertionError("the device was touched")

    for name in ("devices", "default_backend"):
        monkeypatch.setattr(jax, name, touched)
    pair = make_pair(tmp_path)
    argv = ["--target", str(pair.target), "--drafter", str(pair.drafter), "--context", "9"]
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [1, 2]}\n')
    argv += ["--prompts", str(tmp_path / "in.jsonl"), "--max-new-tokens", "9"]
    tasks = []

    def measure(task, _):
        tasks.append(task)
        raise ValueError("that is all")

    monkeypatch.setattr(benchmark, "measure", measure)
    assert main.run("benchmark", argv) == 2 and "that is all" in capsys.readouterr().err
    assert tasks[0].target == str(pair.target) and tasks[0].prompts == ((1, 2),)


def test_a_reference_that_is_not_installed_is_refused_before_anything_is_timed(tmp_path, run_cli):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    out = tmp_path / "result.json"
    code, printed, err = run_cli(
        *("--shape", "tiny", "--against", "reference", "--json", str(out)),
        *("--reference-python", str(bare)),
    )
    assert code == 2 and printed == "" and not out.exists()
    assert "dflash==0.1.0" in err and err.count("\n") == 1


@pytest.mark.long
@needs(PYTHON)
def test_against_the_reference(tmp_path, run_cli, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of torch, whose threads wait busily
    out = tmp_path / "result.json"
    code, printed, err = run_cli(
        *("--shape", "tiny", "--context", "200", "--capacity", "512", "--no-memory"),
        *("--steps", "12", "--repeats", "2", "--json", str(out)),
        *("--against", "reference", "--reference-python", path_of(PYTHON)),
    )
    assert code == 0, err
    result = json.loads(out.read_text())
    theirs, [ours] = result["reference"], result["cases"]
    assert theirs["versions"]["dflash"] == "0.1.0"
    assert theirs["plain"]["steps"] == theirs["dflash"]["steps"] == 12
    for name, mine in (("plain", "plain"), ("dflash", "step")):
        ratio = theirs[name]["ms_per_step"] / ours[mine]["ms"]
        assert theirs["times_as_long"][mine] == pytest.approx(ratio)
    assert "× jflash's" in printed and "tokens/s" not in printed.split("PyTorch")[1]


@pytest.mark.parametrize(
    "command", ["benchmark", "bench-kernels", "check-lossless", "check-program"]
)
def test_json_without_a_file_is_the_printed_line_alone(command):
    assert main.make_parser(command).parse_args(["--json"]).json is None
