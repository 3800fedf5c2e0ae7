"""scripts/bench_steps.py: what it times and writes, and what it refuses."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jflash.bench.floors import add, draft_work, verify_work
from jflash.bench.shapes import model_shape
from jflash.bench.steps import case as case_module
from jflash.bench.steps import table as step_table
from jflash.bench.steps.finite import check_timed
from jflash.bench.steps.time import window_around
from jflash.cli import main
from jflash.cli.options.bench_steps import cases_of
from jflash.compiled.shape import Shape, new_state
from jflash.models.decoder import Target
from jflash.pair import Models
from jflash.records.parts import part_of, with_split_outputs
from tests.support.virtual_devices import result, start

SMALL = ["--capacity", "256", "--steps", "2", "--repeats", "2"]


def test_it_times_every_case_at_every_context(tmp_path, capsys):
    file = tmp_path / "steps.json"
    cases = "tiny:2:step,tiny:2:3-rows,tiny:2:float8"
    argv = ["--cases", cases, "--contexts", "40,100", *SMALL, "--json", str(file)]
    argv += ["--in-turn", str(tmp_path / "turns")]
    assert main.run("bench-steps", argv) == 0
    result = json.loads(file.read_text())
    rows = result["step_times"]
    names = ("shape", "batch", "kind", "places", "context")
    each = [(*case.split(":"), "slots")[:4] for case in cases.split(",")]
    assert [tuple(row[name] for name in names) for row in rows] == [
        (s, int(b), kind, places, at) for s, b, kind, places in each for at in (40, 100)
    ]
    for row in rows:
        low, high = sorted(row["ms_of_repeats"])
        assert 0 < row["ms"] == (low + high) / 2
        assert row["floor_ms"] > 0 and "experts_read" not in row
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms"])
    whole, fewer = (row["operations"] for row in rows[0:4:2])
    assert fewer < whole  # 3 rows of 8
    assert (result["capacity"], result["timed_steps"], result["repeats"]) == (256, 2, 2)
    assert result["floors"]["bytes_per_second"] > 0
    assert capsys.readouterr().out.count(" ms, floor ") == len(rows)


ON_FOUR = f"""
import sys
from jflash.cli.main import run
cases = "tiny-moe:2:step:shuffled"
sys.exit(run("bench-steps", ["--cases", cases, "--contexts", "40", *{SMALL},
                             "--tensor-parallel", "4", "--experts-over", "devices"]))
"""


@pytest.mark.long
def test_four_devices_share_a_pair_and_the_floor_is_of_ones_part():
    """In pages, each of two KV heads on two devices; experts are the expected ones."""
    found = result(start(ON_FOUR))
    [step] = found["step_times"]
    for of in (found, step):
        assert (of["tensor_parallel"], of["experts_over"]) == (4, "devices")
    assert (step["kind"], step["places"]) == ("step", "shuffled")
    assert step["ms"] > 0 and "experts_read" not in step
    whole = model_shape("tiny-moe")
    part = whole._replace(target=part_of(whole.target, 4), drafter=part_of(whole.drafter, 4))
    at = window_around(40, 256, 8, 2, 2).context
    for name in ("bytes", "operations"):
        own, all_of = (
            getattr(add(verify_work(x.target, 2, 8, at), draft_work(x.drafter, 2, 8, at)), name)
            for x in (part, whole)
        )
        assert step[name] == own and 0.25 < own / all_of < 0.45


@pytest.mark.long
def test_cases_share_weights_that_lie_alike(monkeypatch):
    """Where devices push, batches of few and of many rows have other parts of a layer than 8."""

    def as_two_that_push(models: Models, batch: int) -> Models:
        if batch == 8:
            return models
        config = with_split_outputs(models.target.config, 2, normed=batch == 32)
        return replace(models, target=Target(config))

    monkeypatch.setattr(case_module, "for_batch", as_two_that_push)
    names = ["1:step", "8:step", "32:step", "1:plain", "1:float8"]
    one, eight, many, plain, rounded = cases_of(",".join(f"qwen3-8b:{name}" for name in names))
    plan = step_table.Plan((one, eight, many, plain, rounded, one), (40,), 256, 2, 2, {})
    assert step_table._with_the_same_weights(plan) == [[one, many, plain], [eight], [rounded]]


def test_it_times_targets_that_are_kept_quantised_and_counts_the_experts_that_are_read(tmp_path):
    file = tmp_path / "steps.json"
    cases = "tiny:1:plain,tiny+fp8:1:plain,tiny-moe+mxfp4:1:plain,tiny-moe+mxfp4:2:step"
    argv = ["--cases", cases, "--contexts", "40", *SMALL, "--json", str(file)]
    assert main.run("bench-steps", [*argv, "--attention-backend", "xla"]) == 0
    whole, kept, one, several = json.loads(file.read_text())["step_times"]
    forms = [row["quantised"] for row in (whole, kept, one, several)]
    assert forms == [None, "fp8", "mxfp4", "mxfp4"]
    assert kept["backends"]["attention"] == "xla"
    assert kept["bytes"] < whole["bytes"]
    assert one["experts_read"] == 2 and "experts_read" not in whole  # one row, two experts a token
    assert 2 < several["experts_read"] <= 8


def test_the_states_of_a_hybrids_timed_steps_stay_finite(tmp_path):
    """Rows that no model makes let a delta net's state grow without bound."""
    file = tmp_path / "steps.json"
    argv = ["--cases", "tiny-hybrid:8:step", "--contexts", "60", *SMALL, "--json", str(file)]
    assert main.run("bench-steps", argv) == 0
    assert len(json.loads(file.read_text())["step_times"]) == 1


def test_it_refuses_times_of_numbers_that_are_not_finite(capsys, monkeypatch):
    prepare = step_table.prepare

    def with_a_nan(*args):
        state, params = prepare(*args)
        out = params.target["layers_1"]["attention"]["out"]
        out["kernel"] = out["kernel"].at[0, 0].set(jnp.nan)
        return state, params

    monkeypatch.setattr(step_table, "prepare", with_a_nan)
    argv = ["--cases", "tiny:1:plain", "--contexts", "40", *SMALL]
    assert main.run("bench-steps", argv) == 2
    why = "tiny:1:plain at 40: the steps left numbers in layer 2 of the target that are not finite"
    assert why in capsys.readouterr().err


def test_a_block_that_reaches_fewer_experts_than_a_token_is_refused():
    models = Models(Target(model_shape("tiny-moe").target), None, 1)
    state = new_state(models, Shape.of(1, 256))
    check_timed("tiny-moe:8:step", models, state, 2.0)
    with pytest.raises(ValueError, match=r"^tiny-moe:8:step: a layer's block reached 1 experts"):
        check_timed("tiny-moe:8:step", models, state, 1.0)


def test_it_refuses_what_does_not_fit_before_it_compiles(capsys, monkeypatch):
    monkeypatch.setattr(step_table, "device_memory", lambda: 10**6)
    assert main.run("bench-steps", ["--cases", "tiny:1:step", "--contexts", "40", *SMALL]) == 2
    assert "the weights by themselves do not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            "--cases tiny:1",
            "'tiny:1' is not SHAPE:BATCH:KIND with a kind of plain, step, float8, N-rows",
        ),
        ("--cases tiny:0:step", "'tiny:0:step' is not SHAPE:BATCH:KIND"),
        (
            "--cases tiny:1:step:rings",
            "'tiny:1:step:rings': a place is one of slots, pages, shuffled",
        ),
        ("--cases tiny:1:int4", "'tiny:1:int4' is not SHAPE:BATCH:KIND"),
        ("--cases tiny:1:0-rows", "'tiny:1:0-rows' is not SHAPE:BATCH:KIND"),
        ("--cases tiny:1:8-rows", "--cases tiny:1:8-rows: a block of tiny has 8 rows"),
        ("--cases qwen9:1:step", "qwen9"),
        (
            "--cases tiny+int2:1:step",
            "tiny cannot be kept as 'int2': use one of fp8, fp8-float32, int4, mxfp4",
        ),
        ("--cases tiny+:1:step", "tiny cannot be kept as ''"),
        ("--cases tiny+mxfp4:1:step", "mxfp4 is a form of experts, and tiny has none"),
        ("--kernels -1", "--kernels -1: 0 or more"),
        ("--tensor-parallel 0", "--tensor-parallel 0: at least 1"),
        ("--cases tiny:1:step --tensor-parallel 99", "over 99 devices: this host has"),
        ("--experts-over devices", "--experts-over devices needs --tensor-parallel of 2 or more"),
        (
            "--cases tiny-moe:1:step,tiny:1:step --tensor-parallel 2 --experts-over devices",
            "--experts-over devices: tiny has no experts",
        ),
        ("--cases tiny:1:step --kernels 9", "--kernels: only a GPU's are traced"),
        ("--capacity 2049", "--capacity 2049: in 64s"),
        (
            "--cases tiny:1:step --contexts 9999",
            "--contexts 9999: 48 steps after it leave 1968 of --capacity 2048",
        ),
    ],
)
def test_it_refuses(capsys, options, why):
    assert main.run("bench-steps", options.split()) == 2
    assert why in capsys.readouterr().err
