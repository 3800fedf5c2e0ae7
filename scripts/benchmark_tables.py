"""Makes the tables of README, benchmarks/*.md and the model cards from benchmarks/*.json.

python scripts/benchmark_tables.py [--check]
"""

import argparse
import sys
from pathlib import Path

from jflash.cli.command import Parser, run_command
from tables.documents import documents, read_results, with_tables

ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> Parser:
    parser = Parser("benchmark_tables.py", (__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if a table is stale"
    )
    parser.add_argument(
        "--documents", type=Path, nargs="+", default=documents(ROOT), metavar="FILE"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks", metavar="DIR")
    return parser


def main(args: argparse.Namespace) -> int:
    results = read_results(args.results)
    stale = False
    for file in args.documents:
        text = file.read_text(encoding="utf-8")
        made = with_tables(text, results)
        if made == text:
            continue
        if args.check:
            command = "python scripts/benchmark_tables.py"
            print(f"{file} and {args.results} disagree: {command}", file=sys.stderr)
            stale = True
        else:
            file.write_text(made, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
