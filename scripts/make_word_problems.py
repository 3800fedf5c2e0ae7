"""Writes made-up word problems as JSON lines: `question`, `answer` and `source`."""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from jflash.cli.command import Parser, run_command
from jflash.system.files import replacing
from jflash.system.locks import naming
from tiny_pair.word_problems import Split, problems


def make_parser() -> Parser:
    parser = Parser("make_word_problems.py", (__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--split", choices=get_args(Split), default="train")
    # 1 and 2 made the embedded pair, 100 evaluates it.
    parser.add_argument("--seed", type=int, default=3)
    return parser


def main(args: argparse.Namespace) -> None:
    if args.count < 1:
        raise ValueError(f"--count must be at least 1, got {args.count}")
    if args.output.exists():
        raise ValueError(f"{args.output} exists already: remove it or name another file")
    with (
        naming(args.output),
        replacing(args.output) as part,
        part.open("w", encoding="utf-8") as out,
    ):
        for problem in problems(args.split, args.seed, args.count):
            line = {"question": problem.question, "answer": problem.answer}
            out.write(json.dumps(line | {"source": "word-problems"}) + "\n")
    print(f"{args.output}: {args.count} problems")


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
