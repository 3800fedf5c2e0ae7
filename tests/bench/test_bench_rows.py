"""scripts/bench_rows.py: the times of a step by its rows."""

from dataclasses import replace

import jax

from jflash.bench.serving import row_speed
from jflash.budget.row_choice import row_counts
from jflash.cli import main
from jflash.cli.options.pair import DEFAULT_DRAFTER, DEFAULT_TARGET
from jflash.records.kernels import Kernels
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
