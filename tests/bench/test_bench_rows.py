"""scripts/bench_rows.py: the times of a step by its rows."""

import importlib
from dataclasses import replace

import jax
import pytest

from jflash.bench.serving import row_speed
from jflash.budget.row_choice import row_counts
from jflash.cli import main
from jflash.cli.options.pair import DEFAULT_DRAFTER, DEFAULT_TARGET
from jflash.records.kernels import Kernels
from jflash.serving import batch
from tests.support.pairs import random_pair


def test_it_times_a_step_of_each_number_of_rows(tmp_path, monkeypatch):
    """Programs are made again once nothing else runs, if they are kept on disk."""
    pair, calls = random_pair(), []
    pair = replace(pair, models=replace(pair.models, kernels=Kernels(*["cpu"] * 5)))
    monkeypatch.setattr(row_speed, "forget", lambda: calls.append("forgotten"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        row = row_speed.steps_of(pair, 8, 64, lambda: calls.append("alone"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert [int(rows) for rows in row["step_ms"]] == [*row_counts(8, pair.models.block_size)]
    assert min(row["step_ms"].values()) > 0 and row["batch"] == 8
    assert calls == ["alone", "forgotten"] and {"compile_seconds", "cached_seconds"} < row.keys()


def test_a_width_that_the_drafter_lacks_is_refused_before_the_weights(monkeypatch, capsys):
    monkeypatch.setattr("jflash.cli.bench_rows.load_weights", None)
    pair = ["--target", DEFAULT_TARGET, "--drafter", DEFAULT_DRAFTER, "--gsm8k", "none"]
    assert main.run("bench-rows", [*pair, "--widths", "4,17"]) == 2
    assert "block size 17 must be within 2 … 16" in capsys.readouterr().err


def test_slots_are_those_of_a_shape(capsys):
    pair = ["--target", "a", "--drafter", "b", "--gsm8k", "c"]
    assert main.run("bench-rows", [*pair, "--capacity", "128"]) == 2
    assert "--capacity 128 without --shape" in capsys.readouterr().err
    assert main.run("bench-rows", ["--shape", "tiny", "--rounds", "3"]) == 2
    assert "--rounds with --shape tiny, which decodes no text" in capsys.readouterr().err


MANY = 10**11
PAST = "problem 0: 40 prompt tokens + {} new tokens pass the model's 2048 positions"


@pytest.mark.parametrize(
    ("command", "options", "why"),
    [
        ("bench-rows", "--batch {}", "--answers 3 of {} slots: at most 1000000 in all"),
        ("bench-rows", "--answers {}", "--answers {} of 64 slots: at most 1000000 in all"),
        ("bench-rows", "--max-new-tokens {}", PAST),
        ("bench-rows", "--batch 300000", "max_batch 300000 with"),
        ("bench-serving", "--batch {}", "max_batch {} with"),
        ("bench-serving", "--max-new-tokens {}", PAST),
        ("bench-serving", "--steps-per-call {}", "steps_per_call {}: a sequence has no more"),
        ("same-answers", "--batch {}", "max_batch {} with"),
    ],
)
def test_sizes_that_nothing_holds_are_refused_before_the_weights(
    monkeypatch, capsys, tmp_path, command, options, why
):
    asked = tmp_path / "gsm8k.jsonl"
    asked.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    body = importlib.import_module(f"jflash.cli.{command.replace('-', '_')}")
    monkeypatch.setattr(body, "load_weights", None)
    monkeypatch.setattr(batch, "device_memory", lambda: 10**9)
    argv = ["--target", DEFAULT_TARGET, "--drafter", DEFAULT_DRAFTER, "--gsm8k", str(asked)]
    assert main.run(command, [*argv, *options.format(MANY).split()]) == 2
    assert why.format(MANY) in capsys.readouterr().err
