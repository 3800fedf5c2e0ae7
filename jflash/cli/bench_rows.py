"""bench-rows: tokens a second by the rows that a step verifies."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from jflash.bench.serving.row_speed import measured, random_pair, steps_of
from jflash.cli.command import Options
from jflash.cli.options.pair import shared_note
from jflash.evals.datasets import load_problems
from jflash.io import configure_pair, encode_prompt, load_weights
from jflash.records.decoding import Decoding
from jflash.serving.batch import check_batch
from jflash.system.device import describe_device
from jflash.system.locks import in_turn


def run(args: Options) -> Iterator[dict[str, Any]]:
    with in_turn(args.in_turn) as alone:
        yield from (of_pair if args.shape is None else of_shape)(args, alone)


def of_shape(args: Options, alone: Callable[[], None]) -> Iterator[dict[str, Any]]:
    pair = random_pair(args.shape)
    result: dict[str, Any] = describe_device() | {
        "shape": args.shape,
        "backends": pair.models.kernels._asdict(),
        "runs": [],
    }
    for batch in args.batch:
        row = steps_of(pair, batch, args.capacity, alone)
        print(row_text(row), flush=True)
        result["runs"].append(row)
        yield result


def of_pair(args: Options, alone: Callable[[], None]) -> Iterator[dict[str, Any]]:
    files = configure_pair(
        args.target, args.drafter,
        tensor_parallel=args.tensor_parallel, experts_over=args.experts_over,
    )  # fmt: skip
    for width in args.widths:
        replace(files.models, block_size=width)  # refuses one that the drafter lacks
    tokenizer = files.target.tokenizer()
    stops = tuple(files.target.stop_ids(tokenizer))
    prompts = {
        name: [encode_prompt(tokenizer, problem.turns[0]) for problem in load_problems(name, file)]
        for name, file in (("gsm8k", args.gsm8k), ("mt-bench", args.mt_bench))
        if file is not None
    }
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=stops)
    for asked in prompts.values():
        check_batch(files.models, asked, decoding, max(args.batch))
    pair = load_weights(files)
    result: dict[str, Any] = describe_device() | {
        "target": str(args.target).rsplit("/", 1)[-1],
        "backends": pair.models.kernels._asdict(),
        **shared_note(args),
        "max_new_tokens": args.max_new_tokens,
        "runs": [],
    }
    for batch in args.batch:
        count = batch * args.answers
        repeated = {name: list(islice(cycle(all), count)) for name, all in prompts.items()}
        found = measured(pair, repeated, batch, decoding, args.widths, args.rounds, alone)
        for row in found:
            print(row_text(row), flush=True)
            result["runs"].append(row)
            yield result


def row_text(row: dict[str, Any]) -> str:
    if "way" not in row:
        times = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in row["step_ms"].items())
        again = f", again in {row['cached_seconds']:.0f} s" if "cached_seconds" in row else ""
        return (
            f"batch {row['batch']}: compiled in {row['compile_seconds']:.0f} s{again}; ms by rows: "
            f"{times}"
        )
    shares = share_text(row["steps_by_rows"])
    return (
        f"  {row['prompts']:<9} {row['way']:<9} {row['with_prefill']:>8.0f} tokens/s "
        f"({row['tokens_per_second']:.0f} of decoding), τ {row['tau']:.2f}, "
        f"{row['same_as_plain']} of {row['answers']} as plain{shares}"
    )


def share_text(steps: dict[str, int]) -> str:
    """The share of the steps that each number of rows has."""
    all = max(1, sum(steps.values()))
    parts = [f"{rows}: {count / all:.0%}" for rows, count in steps.items()]
    return f"; steps by rows: {', '.join(parts)}" if parts else ""
