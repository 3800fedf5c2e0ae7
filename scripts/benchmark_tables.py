"""Makes the tables of README and of the model cards from benchmarks/*.json; --check only compares.

python scripts/benchmark_tables.py [--check]
"""

import argparse
import sys
from pathlib import Path

from jflash.cli.command import Parser, run_command
from tables.documents import read_results, with_tables

ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> Parser:
    parser = Parser("benchmark_tables.py", (__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if a table is stale")
    texts = [ROOT / "README.md", *sorted(ROOT.glob("checkpoints/**/README.md"))]
    parser.add_argument("--readme", type=Path, nargs="+", default=texts, metavar="FILE")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks", metavar="DIR")
    return parser


def main(args: argparse.Namespace) -> None:
    results = read_results(args.results)
    for file in args.readme:
        text = file.read_text(encoding="utf-8")
        made = with_tables(text, results)
        if made == text:
            continue
        if args.check:
            print(
                f"{file} and {args.results} disagree: python scripts/benchmark_tables.py",
                file=sys.stderr,
            )
            raise SystemExit(1)
        file.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
