"""Makes README's performance tables from benchmarks/*.json; --check only compares.

python scripts/benchmark_tables.py [--check]
"""

import argparse
import sys
from pathlib import Path

from jflash.cli.command import Parser, run_command
from jflash.evals.benchmark_tables import read_results, with_tables

ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> Parser:
    parser = Parser("benchmark_tables.py", (__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if a table is stale")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks", metavar="DIR")
    return parser


def main(args: argparse.Namespace) -> None:
    text = args.readme.read_text(encoding="utf-8")
    made = with_tables(text, read_results(args.results))
    if made == text:
        return
    if args.check:
        print(
            f"{args.readme} and {args.results} disagree: python scripts/benchmark_tables.py",
            file=sys.stderr,
        )
        raise SystemExit(1)
    args.readme.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
