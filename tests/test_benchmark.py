"""The benchmark: what it counts, what it times, and what its tables show."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.cli.command import run_command
from jflash.evals import benchmark_case, widths
from jflash.evals.benchmark_case import Task, run_task, save_pair
from jflash.evals.benchmark_report import collect
from jflash.evals.benchmark_tables import TABLES, read_results, with_tables
from jflash.evals.evidence_tables import CELLS
from jflash.evals.floors import Rates, add, draft_work, floor_seconds, verify_work
from jflash.evals.shapes import SHAPES, model_shape
from jflash.evals.step_time import busy_state, compile_run, random_weights, time_run, window_around
from jflash.evals.tables import Result
from jflash.io import load_pair
from jflash.io.names import abstract_params
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, with_context_kernel
from jflash.programs import Shape
from jflash.speculative import Models, Params, speculative_step
from scripts import benchmark_tables
from tests.small_checkpoints import make_pair

ROOT = Path(__file__).parents[1]
H200 = Rates(4.17e12, 790e12)
TASK = Task(
    shape="tiny", target=None, drafter=None, batch=2, context=200, capacity=512, widths=(4,),
    only_step=False, dtype="float32", backends={}, steps=9, repeats=2, prompts=(),
    max_new_tokens=12, stop_token_ids=(),
)  # fmt: skip


def tiny() -> tuple[Models, Params]:
    shape = model_shape("tiny")
    models = Models(Target(shape.target), Drafter(shape.drafter), shape.drafter.block_size)
    target, drafter = random_weights(list(shape), "float32")
    return models, Params(target, with_context_kernel(models.drafter, drafter))


@pytest.mark.parametrize(
    ("name", "entries"),
    [("qwen3-8b", 8_190_735_360), ("qwen3-4b", 4_022_468_096), ("llama-3.1-8b", 8_030_261_248)],
)
def test_shapes_have_the_published_sizes(name, entries):
    target = model_shape(name).target
    assert sum(x.size for x in jax.tree.leaves(abstract_params(target))) == entries


@pytest.mark.parametrize("name", SHAPES)
def test_every_matrix_is_counted_as_often_as_it_is_applied(name):
    target, drafter = model_shape(name)
    leaves = jax.tree.leaves(abstract_params(target))
    matrices = sum(x.size for x in leaves if x.ndim == 2)
    matrices -= 0 if target.tie_embeddings else target.vocab_size * target.hidden_size
    experts = sum(x.size for x in leaves if x.ndim == 3)
    chosen = target.moe.experts_per_token / target.moe.num_experts if target.moe else 0
    work = verify_work(target, 2, 4, 100.0, 2)
    read = 1 - (1 - chosen) ** 8  # by one of 8 rows or more
    assert work.weight_bytes == pytest.approx(2 * (matrices + read * experts), rel=1e-12)
    assert work.weight_operations == pytest.approx(2 * 8 * (matrices + chosen * experts), rel=1e-12)

    leaves = jax.tree.leaves(abstract_params(drafter))
    codebooks = drafter.vocab_size, getattr(drafter, "selector_rank", 0)  # looked up, not applied
    matrices = sum(x.size for x in leaves if x.ndim == 2 and x.shape != codebooks)
    head = target.vocab_size * target.hidden_size
    twice = drafter.num_layers * drafter.hidden_size * 2 * drafter.num_kv_heads * drafter.head_dim
    assert draft_work(drafter, 1, 8, 100.0, 2).weight_bytes == 2 * (matrices + head + twice)


def test_the_floors_of_the_goals():
    target, drafter = model_shape("qwen3-8b")

    def floor(batch: int, context: float) -> float:
        work = add(
            verify_work(target, batch, 16, context, 2), draft_work(drafter, batch, 16, context, 2)
        )
        return 1e3 * floor_seconds(work, H200)

    found = [floor(1, 1024.0), floor(8, 1024.0), floor(32, 1024.0), floor(1, 32768.0)]
    np.testing.assert_allclose(found, [4.5, 4.8, 13.3, 5.8], atol=0.15)
    plain = 1e3 * floor_seconds(verify_work(target, 1, 1, 1024.0, 2), H200)
    assert plain == pytest.approx(3.66, abs=0.03)


def test_behind_a_window_nothing_is_read():
    full, near = (model_shape(name).drafter for name in ("qwen3-8b", "qwen3-8b-window"))
    for context, read in ((1000.0, 5 * 1000), (32768.0, 4 * 2047 + 32768)):
        work = draft_work(near, 2, 16, context, 2)
        written = draft_work(full, 2, 16, 0.0, 2).attention_bytes
        assert work.attention_bytes - written == 2 * read * 2 * 8 * 128 * 2
        assert work.weight_bytes == draft_work(full, 2, 16, context, 2).weight_bytes


def test_operations_agree_with_the_compilers_count():
    """XLA's einsum attends to every slot, so the context counted here is the whole capacity."""
    models, params = tiny()
    window = window_around(200, 512, 8, 4, 1)
    state = busy_state(models, Shape(2, 512, 128, 16, "float32"), window)
    step = jax.jit(lambda p, s: speculative_step(models, p, s)).lower(params, state).compile()
    target, drafter = models.target.config, models.drafter.config
    work = add(
        verify_work(target, 2, 8, 512.0 - 8, 4), draft_work(drafter, 2, 8, 512.0 - 8, 4)
    )  # fmt: skip
    assert work.operations == pytest.approx(step.cost_analysis()["flops"], rel=0.1)


def test_the_window_is_centred_or_as_close_as_the_capacity_allows():
    window = window_around(1024, 2048, 16, 65, 3)
    assert window.context == 1024
    full = window_around(32768, 32768, 16, 64, 3)
    assert full.start + 64 + 16 == 32768 and full.context == full.start - 1 + 31.5
    with pytest.raises(ValueError, match="64 steps at context 8 do not fit"):
        window_around(8, 256, 16, 64, 1)


def test_the_timed_steps_run_at_the_context_over_full_caches():
    models, params = tiny()
    window = window_around(200, 512, 8, 9, 2)
    state = busy_state(models, Shape(2, 512, 128, 16, "float32"), window)
    for leaf in jax.tree.leaves((state.target_cache, state.drafter_cache)):
        assert abs(float(jnp.std(leaf)) - 1) < 0.02 and not (leaf == 0).any()
    before = jax.tree.map(np.asarray, state.target_cache)
    compiled, _ = compile_run(models, params, state)
    seconds, state = time_run(compiled, params, state, window)
    assert len(seconds) == 2 and all(s > 0 for s in seconds)
    assert state.length.tolist() == [window.start + 9] * 2
    assert state.acceptance_lengths[:, :9].tolist() == [[1] * 9] * 2
    written = np.array([np.abs(a - b).max((0, 2, 3)) > 0 for a, b in
                        zip(jax.tree.leaves(before), jax.tree.leaves(state.target_cache),
                            strict=True)])  # fmt: skip
    slots = np.flatnonzero(written.all(0))
    assert slots.tolist() == list(range(window.start - 1, window.start - 1 + 9 + 8 - 1))
    assert window.context == np.mean(range(window.start - 1, window.start - 1 + 9))


def test_random_weights_are_no_zeros_and_the_same_each_time():
    shape = list(model_shape("tiny"))
    first, again = random_weights(shape, "bfloat16"), random_weights(shape, "bfloat16")
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert a.dtype == jnp.bfloat16 and bool((a == b).all())
        if a.ndim == 2:
            assert float(jnp.std(a.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
        else:
            assert bool((a == 1).all())


def test_a_case_and_the_saved_pair_hold_the_same_weights(tmp_path):
    task = save_pair(TASK, tmp_path)
    loaded = load_pair(task["target"], task["drafter"], dtype="float32")
    target, drafter = random_weights(list(model_shape("tiny")), "float32")
    stored = {name: loaded.params.drafter[name] for name in drafter}  # no context_kernel
    for a, b in zip(
        jax.tree.leaves((loaded.params.target, stored)),
        jax.tree.leaves((target, drafter)),
        strict=True,
    ):
        assert bool((a == b).all())
    assert len(task["prompts"][0]) + (task["max_new_tokens"] - 1) // 2 == TASK.context


@pytest.fixture(scope="module")
def case() -> dict:
    return run_task("time", TASK)


def test_a_case_of_random_weights(case):
    assert case["shape"] == "tiny" and case["weights"].startswith("random")
    for name in ("plain", "verify", "draft", "step"):
        part = case[name]
        assert part["share_of_floor"] == pytest.approx(part["floor_ms"] / part["ms"])
    assert case["draft"]["ms"] == pytest.approx(case["step"]["ms"] - case["verify"]["ms"])
    assert case["draft"]["floor_ms"] < case["step"]["floor_ms"]
    assert case["draft"]["share_of_step"] == pytest.approx(case["draft"]["ms"] / case["step"]["ms"])
    assert [row["block_size"] for row in case["widths"]] == [4, 8]
    assert case["widths"][1]["ms"] == case["step"]["ms"]
    assert case["compile_seconds"]["from_nothing"] > 0
    entries = sum(x.size for c in model_shape("tiny") for x in jax.tree.leaves(abstract_params(c)))
    assert case["memory"]["weights_bytes"] == 4 * entries
    assert case["memory"]["caches_bytes"] == 4 * (3 + 1) * 2 * 2 * 512 * 2 * 64
    assert "tokens_per_second" not in json.dumps(case)


def test_a_real_pair_is_measured(tmp_path):
    pair = make_pair(tmp_path, monotone=True)
    task = replace(
        TASK, shape=None, target=str(pair.target), drafter=str(pair.drafter), context=100,
        capacity=256, widths=(), only_step=True, prompts=((1, 2, 3), (4, 5)), batch=2,
    )  # fmt: skip
    speed = run_task("time", task)["measured_speed"]
    assert speed["how"].startswith("measured")
    # A pair that always agrees: 12 tokens are one of the prefill, then 4 + 4 + 3.
    assert speed["new_tokens"] == 24 and speed["mean_acceptance_length"] == pytest.approx(11 / 3)
    assert speed["endings"] == {"limit": 2}
    assert speed["same_text_as_plain"] == speed["prompts"] == 2
    ratio = speed["tokens_per_second"] / speed["plain_tokens_per_second"]
    assert speed["speed_up"] == pytest.approx(ratio)


def test_a_shape_that_does_not_fit_the_memory_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(benchmark_case, "device_memory", lambda: 20 * 10**9)
    monkeypatch.setattr(benchmark_case, "measure_rates", lambda dtype: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"takes 3\d\.\d GB .* more than the 20 GB"):
        run_task("time", replace(TASK, shape="qwen3-8b", batch=1))


@pytest.mark.parametrize("stage", ["time", "warm"])
@pytest.mark.parametrize("backend", ["attention", "heads", "matmul"])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_made(backend, stage, monkeypatch):
    monkeypatch.setattr(benchmark_case, "prepare", None)
    name = {"attention": "triton", "heads": "triton", "matmul": "mosaic_gpu"}[backend]
    with pytest.raises(ValueError, match=f"{backend} backend '{name}' .* cpu device: use 'xla'"):
        run_task(stage, replace(TASK, dtype="bfloat16", backends={f"{backend}_backend": name}))


def result(case: dict, device: str = "GPU", **changes) -> dict:
    return collect([case | {"device": device} | changes], None)


def test_auto_reads_the_nearest_table(case, tmp_path, monkeypatch):
    monkeypatch.setattr(widths, "MEASURED", tmp_path)
    rows = {1: (5.0, 5.0), 8: (5.0, 9.0)}  # at batch 8 width 8 costs too much
    for batch, (narrow, wide) in rows.items():
        times = [{"block_size": 4, "ms": narrow}, {"block_size": 8, "ms": wide}]
        content = result(case, batch=batch, widths=times)
        (tmp_path / f"b{batch}.json").write_text(json.dumps(content))
    (tmp_path / "kernels.json").write_text(json.dumps({"device": "GPU", "rows": []}))
    target, drafter = model_shape("tiny")

    def auto(batch: int, device: str = "GPU", itemsize: int = 4, **more) -> widths.Choice:
        return widths.auto_block_size(
            target, drafter, batch=batch, itemsize=itemsize, device=device, **more
        )

    assert [auto(b).block_size for b in (1, 2, 3, 8, 16)] == [8, 8, 4, 4, 4]
    assert "b8.json, batch 8" in auto(16).why
    assert auto(16, accepted=[1.0] * 7).block_size == 8
    assert auto(1, table=tmp_path / "b1.json").block_size == 8
    for refused in (
        lambda: auto(64),
        lambda: auto(1, device="other"),
        lambda: auto(1, itemsize=2),
        lambda: auto(8, table=tmp_path / "b1.json"),
    ):
        with pytest.raises(ValueError, match=r"scripts/benchmark\.py .*--widths"):
            refused()
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        auto(1, table=tmp_path / "none.json")


@pytest.fixture
def results(case) -> list[Result]:
    full = result(case, shape="qwen3-8b", batch=1, context=1024.5)
    full["cases"][0]["memory"] = case["memory"] | {
        "peak_over_weights_and_caches": 0.031,
        "weights_bytes": 700, "caches_bytes": 300, "peak_bytes_while_compiling": 1079,
    }  # fmt: skip
    full["cases"][0]["compile_seconds"] = {"from_nothing": 41.0, "warm_cache": 9.5}
    other = {"shape": "tiny", "step": case["step"]}
    full["cases"][0]["beside"] = other | {"times_as_long": 1.0396}
    full["reference"] = {
        "versions": {"dflash": "0.1.0", "torch": "2"}, "device": "GPU",
        "plain": {"ms_per_step": 50.0}, "dflash": {"ms_per_step": 120.0},
        "times_as_long": {"plain": 11.1, "step": 22.2},
    }  # fmt: skip
    rows = [dict(op="attention", shape="B1", backend="b", us=1.25, share=0.5, error=1e-3),
            dict(op="attention", shape="B1", backend="c", us=2.5, share=0.25, error=2e-3),
            dict(op="attention", shape="B1", backend="d", why="not here")]  # fmt: skip
    kernels = {k: v for k, v in full.items() if k not in ("cases", "reference")} | {"rows": rows}
    cells = dict.fromkeys(CELLS) | {"target": "tests/test_x.py::test_it[cases-pair00]"}
    family = {"families": [{"family": "Qwen9"} | cells]}
    return [Result("a.json", full), Result("f.json", family), Result("k.json", kernels)]


def evaluated() -> list[Result]:
    """Summaries of evaluations as evaluate.py writes them, what the table shows of them."""

    def summary(tau: float, cut: float, more: dict, **settings) -> Result:
        settings = {"dataset": "gsm8k", "drafter": "d", "batch": 32, "temperature": 0.0,
                    "oracle": False, "draft_rule": "sampled"} | settings  # fmt: skip
        ended, rest = {"tau_pooled": tau, "prompts": 8}, {"tau_pooled": cut, "prompts": 2}
        where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
        content = {
            "settings": settings,
            "environment": where,
            "acceptance": {"ended": ended, "limit_or_looping": rest},
            "speed": {"tokens_per_second": 1234.4},
        }
        return Result(f"{tau}.json", content | more)

    plain = {"baseline": {"speed_up": 2.0, "speed_up_with_prefill": 1.75}}
    same = {"same_as": {"identical_outputs": 9, "answers": 10}}
    return [
        summary(2.0, 2.0, {}, temperature=0.5),
        summary(1.0, 1.0, same, drafter="random:1:d"),
        summary(4.39, 5.6, plain),
    ]


def checked() -> Result:
    """What check_lossless.py wrote, what the table shows of it."""
    checks = [{"pair": pair, "batch": batch} for pair in "pq" for batch in (1, 8)]
    fault = {"with": {"differences": 3}, "without": {"differences": 0}}
    found = {"tokens": 1234, "differences": 5, "replay_histogram": [9000, 2000, 3000]}
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    return Result("l.json", where | found | {"checks": checks, "planted_fault": fault})


def test_every_table_shows_its_numbers(results):
    step = results[0].content["cases"][0]["step"]
    shown = {
        "goals": [f"| DFlash step, batch 1 | ≤ 5.1 ms | {step['ms']:.2f} ms |", "3.1 %", "41.0 s",
                  "| the same while compiling from nothing |  | 7.9 % |",
                  "| DFlash step, batch 8 | ≤ 6.2 ms | not measured |", "`benchmarks/a.json`"],
        "steps": ["| qwen3-8b | 1 | 1024 of 512 |", f"{step['ms']:.2f} ms"],
        "widths": ["| ms a step at width | 4 | 8 |", "| batch 1 |"],
        "reference": ["| qwen3-8b, DFlash step | 120.0 |", "22.2 ×"],
        "beside": [f"| qwen3-8b | 1 | {step['ms']:.2f} ms | tiny |", "| 1.040 × |"],
        "pairs": ["Not measured yet."],
        "families": ["| Qwen9 | [yes](tests/test_x.py) | no | no |"],
        "kernels": ["| b, µs | c, µs |", "| attention | B1 | 1.2 | 2.5 | 50.0 % | 1.0e-03 |"],
        "lossless": ["| p, q | 1, 8 | 1,234 | 5 | 2,000 | caught |", "`benchmarks/l.json`"],
        "evaluations": [
            "| gsm8k | greedy | 32 | 4.39 (8) | 5.60 (2) | 1,234 | 2.00 × / 1.75 × |  |",
            "| gsm8k | random drafter | 32 | 1.00 (8) | 1.00 (2) | 1,234 |  | 9 of 10 |",
            "| gsm8k | temperature 0.5, drafts drawn from q | 32 | 2.00 (8) |",
        ],
        "trainings": [
            "| kl, dpace | 4 × 960 | 1,000 | 20 × 8 × 64 | 6e-4 | 1 | 2.50 / 2.25 |  | 1.75 (9) |",
            "| ce, decay, drafter dflash2 | 4 × 960 |",
        ],
        "tiny_pair": [
            "| 9 problems of known templates, new numbers | GPU, float32 | 75.0 % | 100 / 50 "
            "| 3.50 / 3.25 | 7 / 2 / 0 | 1.50 |",
            "| first 8 GSM8K test questions | GPU, float32 |  |  | 2.00 / 2.12 | 8 / 0 / 0 |  |",
        ],
        "tiny_pair_speed": ["| GPU, float32 | 1,234 | 321 | 2.50 × | 49 of 50 |"],
    }  # fmt: skip
    results = [*results, *evaluated(), checked(), trained(), embedded()]
    assert shown.keys() == TABLES.keys()
    for name, parts in shown.items():
        text = f"before\n<!-- table: {name} -->\nold\n<!-- end table -->\nafter"
        made = with_tables(text, results)
        assert made.startswith("before\n") and made.endswith("\nafter") and "old" not in made
        for part in parts:
            assert part in made, made
        assert with_tables(made, results) == made
        assert "Not measured yet." in with_tables(text, []) or name == "goals"


def embedded() -> Result:
    """What evaluate_tiny_pair.py wrote, what the tables show of it."""

    def ended(pooled: float, means: float, kinds: tuple[int, int, int], rest: float | None) -> dict:
        return {
            "ended": {"tau_pooled": pooled, "tau_mean_of_means": means},
            "limit_or_looping": {"tau_pooled": rest},
            "endings": dict(zip(("ended", "limit", "looping"), kinds, strict=True)),
        }

    right = {"correct": 0.75, "correct_by_steps": {"2": 0.5, "1": 1.0}}
    split = ended(3.5, 3.25, (7, 2, 0), 1.5) | right
    speed = {"drafter_tokens_per_second": 1234.4, "width_1_tokens_per_second": 321.0}
    speed |= {"speed_up": 2.5, "same_tokens": 49, "prompts": 50}
    found = {"dtype": "float32", "eval": split, "held_out": split, "width_1": speed}
    found |= {"gsm8k": ended(2.0, 2.125, (8, 0, 0), None)}
    where = {"device": "GPU, 2 cores", "versions": {"jax": "1"}, "date": "today"}
    return Result("e.json", where | found)


def trained() -> Result:
    """Two trainings, the second by an option that has no column."""
    options = "--num-layers 4 --intermediate-size 960 --steps 20 --batch 8 --anchors 64"
    options += " --learning-rate 6e-4"
    looks = [{"tau": 1.5, "tau_ended": 1.25}, {"tau": 2.5, "tau_ended": 2.25}]
    chat = {"mt_bench": {"ended": {"tau": 1.75, "answers": 9}}}
    shared = {"answers": 1000, "gpus": 1, "held_out": looks, "evaluations": chat}
    more = ("--loss kl --position-weights dpace", "--drafter dflash2")
    rows = [shared | {"options": f"{options} {own}"} for own in more]
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    return Result("t.json", where | {"trainings": rows})


def test_bad_tables_are_refused(results):
    with pytest.raises(ValueError, match="no table is called 'speed'"):
        with_tables("<!-- table: speed -->\n<!-- end table -->", results)
    with pytest.raises(ValueError, match="not closed"):
        with_tables("<!-- table: steps -->\n", results)
    with pytest.raises(ValueError, match=r"a\.json, b\.json hold the same case"):
        goals = "<!-- table: goals -->\n<!-- end table -->"
        with_tables(goals, [*results, Result("b.json", results[0].content)])


def test_check_notices_a_stale_readme(results, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(results[0].content))
    readme = tmp_path / "README.md"
    readme.write_text("# x\n<!-- table: steps -->\n<!-- end table -->\n")

    def code(*more: str) -> int:
        argv = ["--readme", str(readme), "--results", str(tmp_path), *more]
        try:
            return run_command(benchmark_tables.make_parser(), benchmark_tables.main, argv)
        except SystemExit as exit:
            return exit.code

    assert [code("--check"), code(), code("--check")] == [1, 0, 0]
    readme.write_text(readme.read_text().replace("qwen3-8b", "qwen3-9b"))
    assert code("--check") == 1


def test_readme_agrees_with_the_results():
    results = read_results(ROOT / "benchmarks")
    for file in (ROOT / "README.md", *ROOT.glob("checkpoints/**/README.md")):
        text = file.read_text(encoding="utf-8")
        assert with_tables(text, results) == text, file
    for file in (ROOT / "benchmarks").glob("*.json"):
        for table in widths.read_tables(file):
            assert math.isfinite(sum(table.ms.values()))
