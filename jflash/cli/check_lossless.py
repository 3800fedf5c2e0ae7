"""check-lossless: whether greedy decoding is lossless on this device, or where it is not."""

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
from tqdm import tqdm

from jflash.bench.shapes import SHAPES
from jflash.cli.command import Options
from jflash.cli.lossless_text import (
    differences_of,
    fault_line,
    print_oracle,
    print_verdict,
    progress_line,
)
from jflash.cli.options.check_lossless import DEVICES, checks_of, refuse_layers
from jflash.cli.options.results import chosen_backends
from jflash.devices.mesh import tensor_mesh
from jflash.io import default_dtype
from jflash.proof import width_1
from jflash.proof.cases import load_case
from jflash.proof.check import Plan, check_batch, planted_fault, replays_needed
from jflash.proof.devices import FEW, MANY, check_devices, failures_over_devices
from jflash.proof.differences import difference_text
from jflash.proof.kept_forms import TEXTS_KEPT, as_codes, check_kept
from jflash.proof.law import check_law
from jflash.proof.law.forms import CPU, GPU, WHOLE
from jflash.proof.law.text import comparison_line, law_failures, law_lines, shortfalls
from jflash.proof.lossless import CORRUPTION
from jflash.proof.ops import check_ops, failures_of_ops
from jflash.proof.pairs import PAIRS
from jflash.records.parts import OVER
from jflash.system.device import describe_device

DIFFERS = 1
USUAL_LAYERS = 4  # of the default pairs: the check ends in minutes, and the widths are whole


def check(args: Options) -> dict[str, Any]:
    """The whole result as one JSON object; `failures` is empty if all is well."""
    dtype = args.dtype or default_dtype()
    report = {**describe_device(), "dtype": dtype, "seed": args.seed, "layers": args.layers}
    if args.experts_over != OVER[0]:
        report["experts_over"] = args.experts_over
    for name in ("drafter_dtype", "quantised"):
        if vars(args)[name]:
            report[name] = vars(args)[name]
    failed: list[str] = []
    if "law" in checks_of(args):
        report["law"] = [check_pair(name, args, dtype) for name in args.pairs]
        failed += [line for law in report["law"] for line in law_failures(law)]
        failed += [line for law in report["law"] for line in shortfalls(law)]
    if "oracle" in checks_of(args):
        report |= check_oracle(args, dtype)
        failed += failures(report, args)
    if "devices" in checks_of(args):
        by_pair = (_check_devices(name, args, dtype) for name in args.pairs)
        report["devices"] = [result for results in by_pair for result in results]
        failed += [line for each in report["devices"] for line in failures_over_devices(each)]
    if "ops" in checks_of(args):
        report["ops"] = [_check_ops(name, args, dtype) for name in args.pairs]
        failed += [line for each in report["ops"] for line in failures_of_ops(each)]
    if "kept" in checks_of(args):
        report["kept"] = [each for name in args.pairs for each in _check_kept(name, args, dtype)]
        failed += [line for each in report["kept"] for line in law_failures(each)]
    return report | {"failures": failed}


def _check_ops(name: str, args: Options, dtype: str) -> dict[str, Any]:
    """One target's operations, each alone."""
    case = load_case(name, dtype, args.seed, chosen_backends(args), 1, layers=1)

    def note(each: dict[str, Any]) -> None:
        counts = f"{each['differing_rows']} of {each['compared_rows']} rows differ"
        print(f"{name}, {each['op']}: {counts}", flush=True)

    return {"pair": name} | check_ops(case.models, note)


def _check_kept(name: str, args: Options, dtype: str) -> Iterator[dict[str, Any]]:
    """One target in each form of codes."""
    case = load_case(name, dtype, args.seed, chosen_backends(args), TEXTS_KEPT, args.layers)
    for each in check_kept(case, args.seed, dtype):
        print("\n".join(law_lines(each)), flush=True)
        yield each


def _check_devices(name: str, args: Options, dtype: str) -> Iterator[dict[str, Any]]:
    """One pair by several numbers of devices, on GPUs with many texts at once too."""
    both = (FEW,) if jax.default_backend() == "cpu" else (FEW, MANY)
    case = load_case(
        name, dtype, args.seed, chosen_backends(args), max(both), args.layers, args.drafter_dtype
    )
    if args.quantised:
        case = as_codes(case, args.quantised, args.seed)
    how = args.tensor_parallel, args.seed, args.experts_over
    for texts in both:
        result = check_devices(case, *how, texts)
        for each in [*result["compared"], result["planted"]]:
            what = f"planted {each['fault']}" if each is result["planted"] else "gathers"
            counts = f"{each['tokens']} tokens and {each['kv_rows']} rows of keys and values differ"
            print(f"{name}, {texts} texts, {each['devices']} devices, {what}: {counts}", flush=True)
        yield result


def numbers_of_devices(args: Options) -> tuple[int, ...]:
    """Those that are asked for, else the usual ones that are here; ValueError where fewer are."""
    here = jax.local_device_count()
    counts = args.tensor_parallel or tuple(x for x in DEVICES if x <= here) or DEVICES[:1]
    tensor_mesh(max(counts))
    return counts


def check_pair(name: str, args: Options, dtype: str) -> dict[str, Any]:
    """The law of one pair."""
    form = WHOLE if args.whole else CPU if jax.default_backend() == "cpu" else GPU
    case = load_case(
        name, dtype, args.seed, chosen_backends(args), form.batch, args.layers, args.drafter_dtype
    )
    with tqdm(total=form.comparisons(case.models), desc=name, unit="comparison") as bar:

        def progress(each: dict[str, Any]) -> None:
            bar.update()
            if each.get("first") or not each.get("caught", True):
                bar.write(comparison_line(each), sys.stderr)

        law = check_law(case, form, args.seed, dtype, progress)
    for line in law_lines(law):
        print(line, flush=True)
    return law


def check_oracle(args: Options, dtype: str) -> dict[str, Any]:
    """All drafters against the oracle of one executable, for every pair and batch size."""
    begin, seed, largest = time.perf_counter(), args.seed, args.batches[-1]
    # Tokens in proportion to the batch: all batch sizes run about as many steps.
    shares = sum(PAIRS[name] for name in args.pairs) * sum(args.batches)
    results, seen, fault = [], set(), None
    for name in args.pairs:
        case = load_case(
            name, dtype, seed, chosen_backends(args), largest, args.layers, args.drafter_dtype
        )
        replays = replays_needed(args.tokens, case.models.block_size, args.min_count)
        for batch in args.batches:
            tokens = -(-args.tokens * PAIRS[name] * batch // shares)
            title, narrow = f"{name}, batch {batch}", batch == largest
            plan = Plan(tokens=tokens, replays=replays, seed=seed, dtype=dtype, width_1=narrow)
            with tqdm(total=tokens, desc=title, unit="tok", mininterval=5) as bar:
                result, distinct = check_batch(case, batch, plan, bar.update)
            results.append(result)
            seen |= distinct
            print(progress_line(result), flush=True)
            if result["first_difference"]:
                print(difference_text(result["first_difference"]), flush=True)
        if fault is None:  # once is enough, by the first pair
            fault = planted_fault(case, seed)
            print(fault_line(fault), flush=True)
            for half in ("without", "with"):
                if fault[half]["first_difference"]:
                    print(f"{half} the fault: {difference_text(fault[half]['first_difference'])}")
        del case  # its weights make room for the next pair's
    assert fault is not None
    return {
        "backends": results[0]["backends"],
        "corruption": CORRUPTION,
        "tokens": sum(result["tokens"] for result in results),
        "distinct_tokens": len(seen),
        "replay_histogram": total_histogram(results),
        "differences": sum(map(differences_of, results)),
        "checks": results,
        "planted_fault": fault,
        "width_1": width_1_summaries(results),
        "seconds": time.perf_counter() - begin,
    }


def total_histogram(results: Sequence[dict[str, Any]]) -> list[int]:
    """Steps of all replays that committed 1, 2, … tokens."""
    return [sum(n) for n in zip(*(result["replay_histogram"] for result in results), strict=True)]


def width_1_summaries(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest batch of every pair, decoded at width 1 as well."""
    return [
        {"pair": result["pair"], "batch": result["batch"]}
        | width_1.summary([width_1.Parting(**p) for p in result.pop("width_1")])
        for result in results
        if result["width_1"] is not None
    ]


def failures(report: dict[str, Any], args: Options) -> list[str]:
    """Why the check is not passed, a line each."""
    wrong = []
    if report["differences"]:
        wrong.append(f"not lossless: {report['differences']} differences from the oracles")
    fault = report["planted_fault"]
    without, caught = (fault[half]["differences"] for half in ("without", "with"))
    if without:
        where = f"not lossless at capacity {fault['capacity']}"
        wrong.append(f"{where}: {without} differences from the oracle")
    if not caught:
        wrong.append("the planted fault was not caught: this check would not see a real one either")
    counts = enumerate(report["replay_histogram"], start=1)
    short = ", ".join(f"{length} ({count})" for length, count in counts if count < args.min_count)
    if short:
        wrong.append(f"acceptance lengths seen less than {args.min_count} times: {short}")
    distinct = report["distinct_tokens"]
    if distinct < args.min_distinct:
        wrong.append(f"the outputs have {distinct} distinct tokens, less than {args.min_distinct}")
    return wrong


def run(args: Options) -> Generator[dict[str, Any], None, int]:
    """Its exit code is DIFFERS if the check is not passed."""
    on_cpu = jax.default_backend() == "cpu"
    if args.pairs is None and on_cpu:
        args.pairs = ("tiny-math",)
        refuse_layers(args)
    elif args.pairs is None:
        args.pairs = ("qwen3-8b", "qwen3-coder-30b")
        args.layers = args.layers or USUAL_LAYERS
    large = [name for name in args.pairs if name in SHAPES]
    if large and on_cpu:
        raise ValueError(f"--pairs {large[0]} takes days on a CPU: use --pairs tiny-math here")
    if "devices" in checks_of(args):
        args.tensor_parallel = numbers_of_devices(args)  # refused before anything is compared
    report = check(args)
    if "checks" in report:
        print_oracle(report)
    print_verdict(report)
    yield report
    return DIFFERS if report["failures"] else 0
