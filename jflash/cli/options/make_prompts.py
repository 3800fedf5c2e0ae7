"""Collects prompts to train a drafter on: from files, made up, and written by the target.

Every line says its source. What the test sets ask is left out: name them all.
"""

from pathlib import Path

from jflash.cli.command import Options, Parser
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.replicas import check_replicas, replica_options
from jflash.cli.options.values import (
    check_seed,
    option_name,
    refuse,
    refuse_below_file,
    refuse_missing,
    refuse_replacing,
    refuse_unwritable,
)
from jflash.records.decoding import Sampling

# What only a target that writes reads.
WRITING: dict[str, float] = {
    "count": 1000, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 256, "batch": 64,
}  # fmt: skip


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE.jsonl")
    add("--overwrite", action="store_true")
    add("--gsm8k-train", type=Path, metavar="FILE.jsonl")
    add("--variants", type=int, default=0, help="of each GSM8K question, with other numbers")
    add("--questions", type=Path, nargs="*", default=[], metavar="FILE.jsonl", help="any others")
    add("--self-instruct", type=Path, nargs="*", default=[], metavar="FILE.jsonl")
    add("--svamp", type=Path, metavar="FILE.json")
    add("--exclude-test", type=Path, nargs="*", default=[], metavar="FILE", help="test sets")
    add("--written-by", metavar="TARGET", help="checkpoint that writes user turns as well")
    add("--count", type=int, help="user turns that it writes")
    add("--system", action="append", metavar="TEXT", help="system message before them, in turns")
    add("--temperature", type=float)
    add("--top-p", type=float)
    add("--max-new-tokens", type=int, help="of a user turn")
    add("--batch", type=int)
    parser.set_defaults(**WRITING)
    add("--seed", type=int, default=0)
    shared_options(parser, "the target that writes")
    replica_options(parser.add_argument_group("replicas that write user turns"), "target")


def check(args: Options) -> None:
    refuse(args.output.is_dir(), f"--output {args.output} is a folder: give a file")
    refuse_below_file(args.output)
    exists = args.output.exists() and not args.overwrite
    refuse(exists, f"{args.output} exists already: pass --overwrite to replace it")
    for name, least in (("variants", 0), ("count", 1), ("batch", 1), ("max_new_tokens", 1)):
        refuse(getattr(args, name) < least, f"{option_name(name)} must be at least {least}")
    refuse(args.written_by == "", "--written-by '': give a folder, a .gguf file or a hub id")
    sources = [args.gsm8k_train, args.svamp, *args.self_instruct, *args.questions]
    for file in filter(None, [*sources, *args.exclude_test]):
        refuse_missing(file)
        refuse_replacing(args.output, file)
    refuse(not any([*sources, args.written_by]), "no source of prompts: see --help")
    check_seed(args.seed)
    check_replicas(args)
    check_shared(args)
    idle = args.variants and not args.gsm8k_train
    refuse(idle, f"--variants {args.variants} without --gsm8k-train: they are of its questions")
    alone = None if args.tensor_parallel == 1 else args.tensor_parallel
    for name, value in (("replicas", args.replicas), ("tensor_parallel", alone)):
        idle = value is not None and not args.written_by
        why = f"{option_name(name)} {value} without --written-by TARGET: they write its turns"
        refuse(idle, why)
    refuse(args.system and not args.written_by, "--system without --written-by TARGET")
    for name, usual in WRITING.items():
        idle = getattr(args, name) != usual and not args.written_by
        refuse(idle, f"{option_name(name)} {getattr(args, name)} without --written-by TARGET")
    drawing(args)
    most = len(args.system or [None])
    same = args.written_by and args.temperature == 0 and args.count > most
    why = f"--count {args.count} at temperature 0: greedy turns are all the same, one for each "
    refuse(same, why + f"--system, so at most {most}")
    refuse_unwritable(args.output.parent)  # last: it writes for a moment


def drawing(args: Options) -> Sampling:
    """How the target draws user turns."""
    return Sampling(temperature=args.temperature, top_p=args.top_p)
