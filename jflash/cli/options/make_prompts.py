"""The options of make-prompts, and which of them contradict each other."""

import argparse
from pathlib import Path

from jflash.cli.command import Parser
from jflash.cli.options.values import check_seed
from jflash.decoding import Sampling


def make_parser(prog: str = "make_prompts.py") -> Parser:
    parser = Parser(
        prog,
        "Collects prompts to train a drafter on: from files, made up, and written by the target.",
        epilog="Every line says its source. What the test sets ask is left out: name them all.",
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE.jsonl")
    add("--overwrite", action="store_true")
    add("--gsm8k-train", type=Path, metavar="FILE.jsonl")
    add("--variants", type=int, default=0, help="of each GSM8K question, with other numbers")
    add("--questions", type=Path, nargs="*", default=[], metavar="FILE.jsonl", help="any others")
    add("--self-instruct", type=Path, nargs="*", default=[], metavar="FILE.jsonl")
    add("--svamp", type=Path, metavar="FILE.json")
    add("--exclude-test", type=Path, nargs="*", default=[], metavar="FILE", help="test sets")
    add("--written-by", metavar="TARGET", help="checkpoint that writes user turns of its own")
    add("--count", type=int, default=1000, help="user turns that it writes")
    add("--system", action="append", metavar="TEXT", help="system message before them, in turns")
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--max-new-tokens", type=int, default=256, help="of a user turn")
    add("--batch", type=int, default=64)
    add("--seed", type=int, default=0)
    return parser


def check(args: argparse.Namespace) -> None:
    """ValueError for what does not fit, before anything is read."""
    if args.output.exists() and not args.overwrite:
        raise ValueError(f"{args.output} exists already: pass --overwrite to replace it")
    for name, least in (("variants", 0), ("count", 1), ("batch", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}")
    files = [args.gsm8k_train, args.svamp, *args.self_instruct, *args.questions, *args.exclude_test]
    for file in filter(None, files):
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
    if not (any(files[: -len(args.exclude_test) or None]) or args.written_by):
        raise ValueError("no source of prompts: see --help")
    check_seed(args.seed)
    drawing(args)


def drawing(args: argparse.Namespace) -> Sampling:
    """How the target draws user turns."""
    return Sampling(temperature=args.temperature, top_p=args.top_p)
