"""The tables of README, benchmarks/*.md and the cards: what they show, and that they are fresh."""

import json
from pathlib import Path

import pytest

from jflash.cli.command import run_command
from scripts import benchmark_tables
from tables.cells import Result
from tables.devices import several_gpus
from tables.documents import MARKED, TABLES, documents, read_results, with_tables
from tables.evidence import CELLS
from tables.losslessness import right_logits
from tables.step_goals import step_goals
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
    checked = {"shapes": ["p"], "law": "t", "law on a GPU": "benchmarks/w.json"}
    other = {"family": "Qwen8"} | cells | checked | {"law": "u", "law on a GPU": None}
    family = {"families": [{"family": "Qwen9"} | cells | checked, other]}
    long = {"tests": {"t": {"outcome": "passed"}, "u": {"outcome": "failed"}}}
    named = {"a": full, "f": family, "k": kernels, "cpu-long-tests": long}
    return [Result(f"{name}.json", content) for name, content in named.items()]


def of_rows() -> list[Result]:
    speeds = {"plain": 1000.0, "width 4": 2000.0, "width 16": 1250.0, "auto": 2100.0}
    same = {"batch": 8, "prompts": "p", "tau": 2.5, "answers": 9, "same_as_plain": 9}
    runs = [same | {"way": way, "tokens_per_second": s} for way, s in speeds.items()]
    runs.append(runs[-1] | {"tokens_per_second": 1900.0})  # a slower turn
    timed = {"batch": 8, "compile_seconds": 61.0, "step_ms": {"8": 5.0, "16": 6.25}}
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    beside = {"what": "beside a form", "rows": None, "batch": 8, "neighbours": 7}
    beside |= {"tokens_per_second": 900.4, "kept": 0.45, "device_busy": 0.75}
    served = {"what": "questions", "rows": "auto", "batch": 1, "tau": 2.5}
    served |= {"tokens_per_second": 1234.6, "device_busy": 0.985}
    forced = {"what": "forced", "rows": None, "batch": 8, "tau": 6.0, "device_busy": 0.5}
    forced |= {"requests": 32}
    forced |= {"tokens_per_second": 4321.4}
    first = {"what": "first token", "rows": None, "batch": 8, "running": 7}
    first |= {"empty": {"p50_ms": 20.0}, "known": {"p50_ms": 5.0}, "beside": {"p50_ms": 50.0}}
    long = {"what": "long prompt", "rows": None, "batch": 9, "texts": 8, "prompt_tokens": 32000}
    few = forced | {"what": "few texts", "rows": "auto", "requests": 3, "tokens_per_second": 987.6}
    timed_8b = [long | {"stall_ms": 45.0}, first, few, forced | {"rows": "auto"}, forced]
    return [
        Result(
            "a.json", where | {"shape": "qwen3-8b", "serving": [first | {"empty": {"p50_ms": 9.0}}]}
        ),
        Result("a8b.json", where | {"shape": "qwen3-8b", "serving": timed_8b}),  # the last file's
        Result("serving.json", where | {"target": "m", "serving": [beside, served]}),
        Result("rows.json", where | {"target": "m.gguf", "runs": [timed, *runs]}),
        Result("steps.json", where | {"shape": "qwen9", "runs": [timed]}),
    ]


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

    plain = {"baseline": {"speed_up": 2.0, "speed_up_with_prefill": 1.75,
                          "identical_outputs": 3, "answers": 10}}  # fmt: skip
    same = {"same_as": {"identical_outputs": 9, "answers": 10}}
    return [
        summary(2.0, 2.0, {}, temperature=0.5),
        summary(1.0, 1.0, same, drafter="random:1:d"),
        summary(4.39, 5.6, plain),
    ]


def checked() -> Result:
    """What check_lossless.py wrote, what the table shows of it."""
    modes = {"random drafter": {"tokens": 10}, "replay": {"tokens": 200}}
    checks = [{"pair": p, "batch": batch, "modes": modes} for p in "pq" for batch in (1, 8)]
    fault = {"with": {"differences": 3}, "without": {"differences": 0}}
    narrow = {
        "pair": "p", "batch": 8, "sequences": 4, "sequences_that_differ": 3,
        "first_differences_per_1000_tokens": 12.5,
        "equal_tokens_before": {"median": 2.0, "most": 36},
        "nats_at_width_w": {"median": 0.5, "most": 4.0},
        "nats_at_width_1": {"median": 0.25, "most": 2.0},
    }  # fmt: skip
    found = {"tokens": 1234, "differences": 5, "replay_histogram": [9000, 2000, 3000],
             "seconds": 450.0, "width_1": [narrow]}  # fmt: skip
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    return Result("l.json", where | found | {"checks": checks, "planted_fault": fault})


def right() -> Result:
    """What check_logits.py wrote, what the table shows of it."""

    def distance(mean: float, most: float, largest: float, same: float) -> dict[str, float]:
        names = ("mean_nats", "most_nats", "largest_difference", "same_best")
        return dict(zip(names, (mean, most, largest, same), strict=True))

    row = {"batch": 1, "width": 1, "experts_reached": 9.0}
    row |= {"ours": distance(1e-5, 2e-5, 0.5, 1.0), "xla": distance(3e-5, 4e-5, 0.25, 0.5)}
    row |= {"fault": distance(5e-4, 6e-4, 1.0, 0.0)}
    wide = row | {"width": 16, "against": {"ours": distance(7e-5, 8e-5, 0.125, 0.75)}}
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    found = {"shape": "p", "layers": 8, "embedding_scale": 0.02, "right_logits": [row, wide]}
    return Result("r.json", where | found)


def one_arithmetic() -> list[Result]:
    """What check_lossless.py and same_answers.py wrote, what the tables show of it."""
    way = {"compared_tokens": 600, "compared_logits_rows": 500, "compared_kv_rows": 400}
    faults = [{"caught": True}, {"caught": False}]
    pair = {"pair": "p", "tokens": 1000, "compared": [way, way], "faults": faults}
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    law = {"layers": 8, "law": [pair | {"differences": 2, "seconds": 90.0}]}
    ties = {"drafter, batch 1": 9, "drafter, batch 4": 6, "plain, batch 1": 2}
    same = {"answers": 9, "same": ties, "compared": dict.fromkeys(ties, 9) | {"plain, batch 1": 2}}
    return [Result("w.json", where | law), Result("s.json", where | same)]


def timed_beside_vllm() -> Result:
    """A run of vLLM and of jflash, what the tables show of it."""
    plain = {"vllm": {"1": 6, "8": 7}, "jflash": {"1": 4, "8": 5}, "floor": {"8": 3}}
    step = {"vllm": {"1": 4, "8": 9}, "jflash": {"1": 5}, "floor": {}}
    steps = {"shape": "qwen9", "context": 656, "ms": {"plain": plain, "step": step}}
    steps["vllm_tokens_per_second_at_6.05"] = {"with_prefill": {"8": 70}}
    speeds = {"plain": {"vllm": {"4": 800}, "jflash": {"4": 1000}},
              "dflash": {"vllm": {"4": 1000}, "jflash": {"4": 2500}}}  # fmt: skip
    same = {"with_and_without_drafts_at_32": {"of": 9, "vllm": 8, "jflash": 7}}
    pair = {"target": "m", "tokens_per_second": speeds, "same_text": same}
    where = {"device": "GPU", "versions": {"jax": "1", "vllm": "9"}, "date": "today"}
    return Result("v.json", where | {"beside_vllm": {"steps": steps, "pair": pair}})


def whole_steps_of(name: str, ms: float, batch: int) -> Result:
    """What bench_steps.py wrote, what the table shows of it."""
    row = {"shape": "qwen9", "kind": "step", "context": 656, "batch": batch, "ms": ms}
    kept = row | {"quantised": "fp8", "share_of_floor": 0.75}
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    several = row | {"tensor_parallel": 2, "ms": 1.0}  # no table's
    rows = [row, row | {"batch": 64, "ms": ms + 1}, kept, several]
    return Result(name, where | {"step_times": rows})


def traced(name: str, us: float) -> Result:
    """A step with its kernels, of which one has two forms."""
    kernels = [
        ("few_rows_", 2.0, us),
        ("matmul_mosaic_gpu_kernel", 3.0, 600.0),
        ("few_rows", 1.0, 500.0),
    ]
    row = {"shape": "qwen9", "kind": "step", "context": 9, "batch": 1, "ms": 2.5, "kernels_ms": 2.0}
    row["kernels"] = [
        dict(zip(("name", "launches", "us"), kernel, strict=True)) for kernel in kernels
    ]
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "today"}
    several = row | {"tensor_parallel": 2, "ms": 1.0}
    return Result(name, where | {"step_times": [row, several]})


def whole_steps_in_pages() -> Result:
    """The same over slots and over shuffled pages, and one in pages alone."""
    row = {"shape": "qwen9", "kind": "plain", "context": 656, "batch": 1, "ms": 4.0}
    row["places"] = "slots"
    rows = [row, row | {"places": "shuffled", "ms": 4.1}, row | {"places": "pages", "batch": 2}]
    rows.append(row | {"tensor_parallel": 2, "ms": 1.0})
    where = {"device": "GPU", "versions": {"jax": "1"}, "date": "an earlier day"}
    return Result("x.json", where | {"step_times": rows})


def over_devices() -> Result:
    """A pair at two numbers of texts, and another from before these were told; one found a token
    and rows that differ."""
    same, other = {"tokens": 0, "kv_rows": 0}, {"tokens": 1, "kv_rows": 5}
    first = {
        "compared": [{"devices": 2} | same, {"devices": 4} | other],
        "planted": {"devices": 4, "tokens": 1234, "kv_rows": 7},
    }
    second = {
        "compared": [{"devices": 2} | same],
        "planted": {"devices": 4, "tokens": 9, "kv_rows": 2000},
    }
    old = {"compared": [{"devices": 2} | same], "planted": {"tokens": 8, "kv_rows": 6}}
    pairs = [{"pair": "p", "texts": 4} | first, {"pair": "p", "texts": 32} | second]
    run = {"layers": 3, "quantised": "fp8", "experts_over": "devices"}
    where = {"device": "GPU H9", "versions": {"jax": "1"}, "date": "today"}
    return Result("e.json", where | run | {"devices": [*pairs, {"pair": "tiny-math"} | old]})


def test_every_table_shows_its_numbers(results):
    step, plain = (results[0].content["cases"][0][part] for part in ("step", "plain"))
    shown = {
        "goals": [f"| DFlash step, batch 1 | ≤ 5.1 ms | {step['ms']:.2f} ms |", "3.1 %", "41.0 s",
                  "| the same while compiling from nothing |  | 7.9 % |",
                  "| DFlash step, batch 8 | ≤ 6.2 ms | not measured |", "`benchmarks/a.json`"],
        "steps": ["| qwen3-8b | 1 | 1024 of 2048 |", f"{step['ms']:.2f} ms"],
        "whole_steps": [
            "| shape | ms of | context | batch 1 | batch 2 | batch 64 |",
            "| qwen9 | DFlash step | 656 | 7.00 | 8.00 | 9.00 |",  # the last file's of batch 64
            "| qwen9, layers in FP8 | DFlash step | 656 | 7.00 (75.0 %) | 8.00 (75.0 %) |  |",
        ],
        "step_goals": ["| qwen3-8b, DFlash step, batch 1 | 5.2 | not measured |  |  |"],
        "pages": [
            "| qwen9 | plain | 1 | 656 | 4.00 |  | 4.10 (1.025 ×) |\n\nGPU",  # x.json alone
        ],
        "step_kernels": [
            "| qwen9 | DFlash step | 1 | 2.50 | 2.00 | "
            "`few_rows` 1.00 (50.0 %, 3), `matmul` 0.60 (30.0 %, 3) |\n\nGPU, jax 1, today: "
            "`benchmarks/z-2.json`.",
        ],
        "spent": ["Not measured yet."],  # by the test below
        "several_gpus": ["| qwen3-8b, batch 1 |  | not measured | not measured (goal 0.68 ×) |"],
        "widths": ["| ms a step at width | 4 | 16 |", "| batch 1 |"],
        "reference": ["| qwen3-8b, DFlash step | 120.0 |", "22.2 ×"],
        "in_turns": [f"| qwen3-8b | 1 | {step['ms']:.2f} ms | tiny |", "| 1.040 × |"],
        "families": ["| Qwen9 | ✓ | – | – |"],
        "serving": [
            "| the same, rows chosen | 1 |  |  | 1,235 | 98.5 % |\n"
            "| 7 texts beside one in a form, share of those beside a plain one | 8 |  |  "
            "| 900 (45.0 %) | 75.0 % |",
            "| qwen3-8b, 6.00 tokens a step, 32 requests | 8 | 5,600 | 70 | 4,321 | 50.0 % |\n"
            "| the same, rows chosen, 32 requests | 8 |  |  | 4,321 | 50.0 % |\n"
            "| qwen3-8b, 6.00 tokens a step, rows chosen, 3 at once | 8 slots |  |  | 988 "
            "| 50.0 % |\n"
            "| first token, empty | 8 | ≤ 25 ms |  | 20.0 ms |  |\n"
            "| first token, 7 running | 8 | ≤ 60 ms |  | 50.0 ms |  |",
            "| the longest stall of 8 texts beside a prompt of 32,000 tokens | 9 | ≤ 50 ms |  "
            "| 45.0 ms |",
        ],
        "rows": ["| m | p | 8 | 1,000 | 2,000 | 1,250 | 2,100 | 1.05 × | 1.68 × | 2.50 | 9 of 9 |"],
        "row_steps": ["| qwen9 | 8 | 5.00 | 6.25 |  |  |  | 61 s |  |", "`benchmarks/steps.json`",
                      "| m | 8 | 5.00 |"],
        "kernels": ["| b, µs | c, µs |", "| attention | B1 | 1.2 | 2.5 | 50.0 % | 1.0e-03 |"],
        "summary": [
            "| plain step, qwen9, context 656, batch 1 / 8 | 4.00 / 5.00 ms | 6.00 / 7.00 ms |",
            "| DFlash step, qwen9, context 656, batch 1 | 5.00 ms | 4.00 ms | vLLM 9 |",
            f"context 1024, batch 1 | {plain['ms']:.2f} / {step['ms']:.2f} ms | 50.0 / 120.0 ms |",
            "| m, GSM8K, batch 4: plain → DFlash, tokens/s "
            "| 1,000 → 2,500 (2.50 ×) | 800 → 1,000 (1.25 ×) |",
            "answers equal to plain decoding's | 6 of 9 | 8 of 9 | vLLM 9 |",
            "| 840, 5 differ |",
        ],
        "vllm": ["| qwen9, plain | 8 | 7.00 ms | 5.00 ms | 1.40 × | 3.00 ms |",
                 "| qwen9, DFlash | 8 | 9.00 ms |  |  |  |", "`benchmarks/v.json`"],
        "law": ["| p, 8 layers | 1,000 | 2 | 1,200 / 1,000 / 800 | 2 | 1 of 2 | 1.5 |",
                "`benchmarks/w.json`"],
        "law_of_families": ["| Qwen9 | 0 differ | 2 differ: p, ", "| Qwen8 | – | – |"],
        "law_over_devices": [
            "| p, 3 layers, FP8, whole experts | 2, 4 | 4 / 32 | 1 | 5 | 1,234 / 9 | 7 / 2,000 "
            "| H9, today: `e.json` |\n"
            "| tiny-math, FP8, whole experts | 2 | 4 | 0 | 0 | 8 | 6 | H9, today: `e.json` |",
        ],
        "lossless": ["| p, q | 1, 8 | 1,234 | 840 | 5 | 2,000 | caught | 7.5 |",
                     "`benchmarks/l.json`"],
        "width_1": ["| p | 8 | 3 of 4 | 12.5 | 2 / 36 | 0.50 / 4.00 | 0.25 / 2.00 |"],
        "right_logits": [
            "| p, 8 layers, embedding 0.02 | 1 / 1 | 9 | 1.0e-05 / 2.0e-05 | 3.0e-05 / 4.0e-05 "
            "| 0.500 / 0.250 | 100.0% / 50.0% | 5.0e-04 / 6.0e-04 |  |",
            "| 1 / 16 | 9 |", "| 7.0e-05 / 8.0e-05, 0.125, 75.0% |", "`benchmarks/r.json`",
        ],
        "plain_text": ["| gsm8k | 32 | 3 of 10 |"],
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
    results = [
        *(*results, *evaluated(), *one_arithmetic(), checked(), right(), trained(), embedded()),
        *(timed_beside_vllm(), *of_rows(), over_devices()),
        *(whole_steps_of("x-1.json", 7.0, 1), whole_steps_of("x-2.json", 8.0, 2)),
        *(whole_steps_in_pages(), traced("z-1.json", 9.0), traced("z-2.json", 500.0)),
    ]
    assert shown.keys() == TABLES.keys()
    for name, parts in shown.items():
        text = f"before\n<!-- table: {name} -->\nold\n<!-- end table -->\nafter"
        made = with_tables(text, results)
        assert made.startswith("before\n") and made.endswith("\nafter") and "old" not in made
        for part in parts:
            assert part in made, made
        assert with_tables(made, results) == made
        assert "Not measured yet." in with_tables(text, []) or name in ("goals", "several_gpus")


def test_logits_of_devices_that_share_a_target_say_so():
    made = right_logits([Result("r.json", right().content | {"tensor_parallel": 2})])
    assert "| p, 8 layers on 2 devices, embedding 0.02 | 1 / 1 |" in made


def test_steps_stand_beside_their_goals_and_vllms():
    beside = timed_beside_vllm()
    steps = beside.content["beside_vllm"]["steps"]
    steps["shape"] = "qwen3-8b"
    whole = whole_steps_of("x.json", 6.5, 8)
    row = whole.content["step_times"][0]
    whole.content["step_times"] = [row | {"shape": "qwen3-8b"}, row | {
        "shape": "qwen3-8b", "context": 1024, "ms": 8.0}, row | {
        "shape": "qwen3-8b", "context": 1024, "ms": 9.9, "places": "pages"}, row | {
        "shape": "qwen3-8b", "context": 1024, "ms": 9.9, "quantised": "fp8"}, row | {
        "shape": "qwen3-8b", "context": 1024, "ms": 9.9, "tensor_parallel": 2}]  # fmt: skip
    made = step_goals([beside, whole])
    assert "| qwen3-8b, DFlash step, batch 8 | 6.4 | 8.00 (1.25 ×) | 6.50 | 9.00 |" in made
    assert "| qwen3-8b, plain, batch 1 | 4.3 | not measured |  | 6.00 |" in made


def test_steps_of_several_gpus_stand_beside_one_s_by_kind_of_gpu():
    """Two devices in one run, three newer times of bench-steps, and two of another GPU."""
    where = {"versions": {"jax": "1"}, "date": "today"}
    row = {"shape": "qwen3-8b", "batch": 1, "context": 1024}
    one = row | {"tensor_parallel": 1, "step": {"ms": 8.0}}
    two = row | {
        "tensor_parallel": 2, "step": {"ms": 6.0}, "against": {"share_of_time": 0.755},
    }  # fmt: skip
    run = Result("run.json", where | {"device": "NVIDIA X 80GB", "cases": [one, two]})
    row |= {"kind": "step"}
    steps = [row | {"tensor_parallel": 4, "ms": 4.0}, row | {"ms": 7.0}]
    steps += [row | {"tensor_parallel": 4, "ms": 1.0, "kind": "plain"}]
    newer = Result("newer.json", where | {"device": "NVIDIA X 80GB", "step_times": steps})
    of_two = row | {"tensor_parallel": 2, "ms": 3.0}
    other = Result("other.json", where | {"device": "NVIDIA Y", "step_times": [of_two]})
    made = several_gpus([run, newer, other])
    assert (
        "| qwen3-8b, batch 1 | X | 8.00 ms | 6.00 ms, 0.76 × (goal 0.68 ×) "
        "| 4.00 ms, 0.50 × of another run (goal 0.48 ×) |" in made
    )
    assert "| qwen3-8b, batch 1 | Y | not measured | 3.00 ms (goal 0.68 ×) |" in made


def test_a_verify_stands_beside_what_its_products_take(results):
    full, _, kernels, _ = (r.content for r in results)
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
        argv = ["--documents", str(readme), "--results", str(tmp_path), *more]
        return run_command(benchmark_tables.make_parser(), benchmark_tables.main, argv)

    assert [code("--check"), code(), code("--check")] == [1, 0, 0]
    readme.write_text(readme.read_text().replace("qwen3-8b", "qwen3-9b"))
    assert code("--check") == 1


def test_a_check_names_every_stale_document(results, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(results[0].content))
    texts = [tmp_path / f"{name}.md" for name in ("one", "two")]
    for text in texts:
        text.write_text("<!-- table: steps -->\n<!-- end table -->\n")
    argv = ["--documents", *map(str, texts), "--results", str(tmp_path), "--check"]
    assert run_command(benchmark_tables.make_parser(), benchmark_tables.main, argv) == 1
    printed = capsys.readouterr().err
    assert all(f"{text} and {tmp_path} disagree" in printed for text in texts)


def test_documents_agree_with_the_results_and_no_table_is_printed_twice():
    results = read_results(ROOT / "benchmarks")
    printed = []
    for file in documents(ROOT):
        text = file.read_text(encoding="utf-8")
        assert with_tables(text, results) == text, file
        assert "Not measured yet." not in text
        printed += [name for _, name, _, _ in MARKED.findall(text)]
    assert sorted(printed) == sorted(TABLES)
