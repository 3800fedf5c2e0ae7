"""The tables of README and of the model cards: what they show, and that they are up to date."""

import json
import math
from pathlib import Path

import pytest

from jflash.bench import widths
from jflash.cli.command import run_command
from scripts import benchmark_tables
from tables.cells import Result
from tables.documents import TABLES, read_results, with_tables
from tables.evidence import CELLS
from tables.steps import spent

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results() -> list[Result]:
    """A committed result of one case, with numbers that are easy to find again."""
    full = json.loads((ROOT / "benchmarks/h200-qwen3-8b.json").read_text(encoding="utf-8"))
    case = next(case for case in full["cases"] if case["batch"] == 1)
    full["cases"] = [case]
    case["memory"] |= {
        "peak_over_weights_and_caches": 0.031,
        "weights_bytes": 700, "caches_bytes": 300, "peak_bytes_while_compiling": 1079,
    }  # fmt: skip
    case["compile_seconds"] = {"from_nothing": 41.0, "warm_cache": 9.5}
    case["widths"] = [{"block_size": 4, "ms": 5.0}, {"block_size": 16, "ms": 5.5}]
    other = {"shape": "tiny", "step": case["step"]}
    case["beside"] = other | {"times_as_long": 1.0396}
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
        "steps": ["| qwen3-8b | 1 | 1024 of 2048 |", f"{step['ms']:.2f} ms"],
        "spent": ["Not measured yet."],  # by the test below
        "widths": ["| ms a step at width | 4 | 16 |", "| batch 1 |"],
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


def test_a_verify_stands_beside_what_its_products_take(results):
    full, _, kernels = (r.content for r in results)
    case = full["cases"][0]
    case["verify"]["ms"] = 4.5
    case["floors"] |= {"bytes_per_second": 4e12, "operations_per_second": 1e15}
    products = [f"qwen3-8b-{name}-m16" for name in ("qkv", "out", "gate-up", "down", "head")]
    rows = [{"backend": "tuned", "shape": shape, "us": 10.0} for shape in products]
    rows.append({"backend": "mosaic_gpu", "shape": "qwen3-b1-2k", "us": 5.0})
    kernels["rows"] = rows
    # 36 layers of four products and a head, 15.14 GB of bfloat16 at 4 TB/s.
    assert "| 1 | 4.50 ms | 1.45 ms | 3.78 ms | 261.0 % | 0.18 ms |" in spent(results)
    case["block_size"] = 8  # whose products nobody timed
    assert spent(results) == "Not measured yet."


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
