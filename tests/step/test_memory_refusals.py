"""Every command that decodes asks for its memory before a weight is read or made."""

from dataclasses import replace

import pytest

from jflash import memory
from jflash.bench.steps import case as benchmark_case
from jflash.bench.steps.case import Task, run_task
from jflash.cli import main
from jflash.cli.command import run_command
from jflash.io import assemble
from jflash.proof import cases as lossless_cases
from jflash.system.embedded import EMBEDDED_PAIR as TINY_MATH
from scripts import evaluate_tiny_pair
from tests.support.small_checkpoints import edit_config, make_pair


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    """A device of 60 MB, and no weights to be had. 64 MiB of every budget are workspace."""
    monkeypatch.setattr(memory, "device_memory", lambda: 60 * 10**6)
    for module, name in ((assemble, "read_ahead"), (lossless_cases, "random_weights")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("weights were read or made"))


def refused(capsys, what: str) -> None:
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "more than the 0.06 GB that JAX may use" in line]
    assert len(lines) == 1 and what in lines[0], err


def test_evaluate_tiny_pair(capsys):
    argv = ["--target", str(TINY_MATH / "target"), "--drafter", str(TINY_MATH / "drafter")]
    argv += ["--problems", "3", "--timed-prompts", "2", "--batch", "7", "--max-new-tokens", "33"]
    parser = evaluate_tiny_pair.make_parser()
    assert run_command(parser, evaluate_tiny_pair.main, argv) == 2
    refused(capsys, "batch 7 with ")


def test_train_drafter(capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How many apples are there?"}\n')
    argv = ["--target", str(TINY_MATH / "target"), "--data", str(tmp_path / "prompts.jsonl")]
    argv += ["--output", str(tmp_path / "drafter"), "--answer-batch", "9"]
    assert main.run("train", argv) == 2
    refused(capsys, "batch 9 with ")


def test_check_lossless(capsys):
    oracle = ["--checks", "oracle", "--pairs", "tiny-math", "--batches", "2,5"]
    assert main.run("check-lossless", oracle) == 2
    refused(capsys, "batch 5 with 640 tokens")
    assert main.run("check-lossless", ["--pairs", "tiny-math"]) == 2
    refused(capsys, "batch 8 with 640 tokens")


def test_check_lossless_of_random_weights():
    with pytest.raises(ValueError, match=r"batch 3 with 640 tokens .* the weights by themselves"):
        lossless_cases.load_case("qwen3-8b", "bfloat16", 0, {}, 3)


def test_check_lossless_counts_the_planted_faults_long_contexts(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda: None)
    monkeypatch.setattr(lossless_cases, "device_memory", lambda: 60 * 10**6)
    with pytest.raises(ValueError, match="batch 2 with 4096 tokens"):
        lossless_cases.load_case("tiny-math", "float32", 0, {}, 1)


def test_benchmark_counts_the_prompts_that_a_real_pair_decodes(tmp_path, monkeypatch):
    """The timed steps would fit, the answers do not."""
    pair = make_pair(tmp_path)
    for folder in pair:
        edit_config(folder, max_position_embeddings=4000)
    task = Task(
        shape=None, target=str(pair.target), drafter=str(pair.drafter), batch=4, context=100,
        capacity=256, widths=(), only_step=True, dtype="float32", backends={}, steps=9, repeats=2,
        prompts=((1, 2, 3), (4,) * 90), max_new_tokens=3000, stop_token_ids=(),
    )  # fmt: skip
    models = benchmark_case.task_models(task)
    step = memory.Shape.of(4, 256)
    limit = memory.memory_budget(models, step).total
    monkeypatch.setattr(benchmark_case, "device_memory", lambda: limit)
    monkeypatch.setattr(memory, "device_memory", lambda: limit)
    monkeypatch.setattr(benchmark_case, "measure_rates", lambda dtype: pytest.fail("measured"))
    with pytest.raises(ValueError, match="batch 4 with 3090 tokens"):
        run_task("time", task)
    with pytest.raises(pytest.fail.Exception, match="measured"):
        run_task("time", replace(task, max_new_tokens=20))
