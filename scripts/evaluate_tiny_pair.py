"""Evaluates a pair made by make_tiny_pair.py: right results, τ, endings, and optionally speed.

python scripts/evaluate_tiny_pair.py --target tiny-math/target --drafter tiny-math/drafter
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jflash.cli.command import Parser, run_command
from jflash.io import (
    PairFiles,
    configure_pair,
    default_dtype,
    load_tokenizer,
    load_weights,
    stop_token_ids,
)
from jflash.memory import check_decoding
from jflash.records.decoding import Decoding
from jflash.system.device import describe_device
from jflash.system.files import write_json
from jflash.training.prompts import read_gsm8k
from tiny_pair.evaluation import (
    EVAL_SEED,
    Limits,
    compare_with_width_1,
    evaluate_questions,
    evaluate_split,
)
from tiny_pair.stages import chat_prompts
from tiny_pair.word_problems import Split, problems

SPLITS: tuple[Split, ...] = ("eval", "held_out")


def make_parser() -> Parser:
    parser = Parser("evaluate_tiny_pair.py", (__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--drafter", type=Path, required=True)
    add("--dtype", choices=("float32", "bfloat16"), help="default: what suits the device")
    add("--drafter-dtype", choices=("float8",), default="", help="default: the pair's")
    add("--block-size", type=int, help="at most the drafter's, which is the default")
    add("--problems", type=int, default=500, help="of each split")
    add("--batch", type=int, default=100)
    add("--max-new-tokens", type=int, default=320)
    add("--gsm8k-test", type=Path, help="GSM8K's test.jsonl: τ on its first questions as well")
    add("--gsm8k-questions", type=int, default=200)
    add("--compare-width-1", action="store_true", help="time decoding without the drafter too")
    add("--timed-prompts", type=int, default=50)
    add("--output", type=Path, help="write all numbers to this JSON file")
    return parser


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("problems", "gsm8k_questions", "timed_prompts"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    questions = []
    if args.gsm8k_test:
        questions = [q for q, _ in read_gsm8k(args.gsm8k_test)[: args.gsm8k_questions]]
    files = configure_pair(
        args.target, args.drafter, dtype=args.dtype, block_size=args.block_size,
        drafter_dtype=args.drafter_dtype, batch=args.batch,
    )  # fmt: skip
    tokenizer = load_tokenizer(args.target)
    check_room(args, files, tokenizer, questions)
    pair = load_weights(files)
    stops = tuple(stop_token_ids(args.target, tokenizer))
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=stops)
    limits = Limits(batch_size=args.batch, decoding=decoding)
    results: dict[str, Any] = describe_device() | {
        "dtype": args.dtype or default_dtype(),
        **({"drafter_dtype": args.drafter_dtype} if args.drafter_dtype else {}),
        "block_size": pair.models.block_size,
        "attention_backend": pair.models.kernels.attention,
        "max_new_tokens": args.max_new_tokens,
    }
    for split in SPLITS:
        results[split] = evaluate_split(pair, tokenizer, split, args.problems, limits)
    if questions:
        results["gsm8k"] = evaluate_questions(pair, tokenizer, questions, limits)
    if args.compare_width_1:
        timed = list(problems("eval", EVAL_SEED, args.timed_prompts))
        results["width_1"] = compare_with_width_1(pair, tokenizer, timed, limits)
    return results


def check_room(
    args: argparse.Namespace, files: PairFiles, tokenizer: Any, questions: Sequence[str]
) -> None:
    """ValueError, before a weight is read, if a batch takes more memory than the device has."""
    count = max(args.problems, args.timed_prompts)
    made_up = [p.question for split in SPLITS for p in problems(split, EVAL_SEED, count)]
    longest = max(map(len, chat_prompts(tokenizer, [*made_up, *questions])))
    check_decoding(files.models, args.batch, longest, args.max_new_tokens)


def number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "-"


def print_table(results: dict[str, Any]) -> None:
    print(f"{'':<10} {'right':>7} {'τ pooled':>9} {'τ means':>8} {'ended':>6} {'limit':>6} "
          f"{'loops':>6} {'τ of those':>10}")  # fmt: skip
    for name in ("eval", "held_out", "gsm8k"):
        if name not in results:
            continue
        r = results[name]
        ended, rest, kinds = r["ended"], r["limit_or_looping"], r["endings"]
        print(
            f"{name:<10} {number(r.get('correct'), '7.1%'):>7} "
            f"{number(ended['tau_pooled'], '9.2f'):>9} "
            f"{number(ended['tau_mean_of_means'], '8.2f'):>8} {kinds['ended']:>6} "
            f"{kinds['limit']:>6} {kinds['looping']:>6} {number(rest['tau_pooled'], '10.2f'):>10}"
        )
    for name in SPLITS:
        shares = results[name]["correct_by_steps"]
        print(f"{name}, right by steps: " + ", ".join(f"{k}: {v:.0%}" for k, v in shares.items()))
        print(f"{name}, steps that committed 1, 2, … tokens: {results[name]['ended']['histogram']}")
    if "width_1" in results:
        w = results["width_1"]
        print(
            f"decoding, median of {w['prompts']} prompts: {w['drafter_tokens_per_second']:.0f} "
            f"tokens/s with the drafter, {w['width_1_tokens_per_second']:.0f} at width 1: "
            f"{w['speed_up']:.2f} ×, same tokens in {w['same_tokens']}"
        )


def main(args: argparse.Namespace) -> None:
    results = evaluate(args)
    print_table(results)
    print(json.dumps(results))
    if args.output:
        write_json(args.output, results)


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
