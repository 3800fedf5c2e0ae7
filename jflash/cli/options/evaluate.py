"""Evaluate a pair on a data set: accuracy, τ, speed."""

from pathlib import Path

from jflash.cli.command import Options, Parser
from jflash.cli.options.hosts import check_hosts, host_options
from jflash.cli.options.pair import (
    check_oracle,
    check_pair,
    model_options,
    oracle_option,
    prompt_options,
    sampling_options,
)
from jflash.cli.options.replicas import check_replicas, replica_options
from jflash.cli.options.values import at_least_1, refuse, refuse_below_file
from jflash.evals.datasets import DATASETS, REFERENCE_COUNT, REFERENCE_SHUFFLE

AS_REFERENCE = f"--shuffle {REFERENCE_SHUFFLE} --limit {REFERENCE_COUNT}"
STYLES = "reference (the authors', default), plain, hashes (mathematics), tests (mbpp)"
SAME_AS = """a finished run of the same problems, with another drafter or --oracle: exit code 1
unless every answer has the same tokens"""
EXECUTE = """run the programs of humaneval and mbpp with their tests. A program and all that it
starts together are held to 10 s, 2 GiB, 64 processes and 64 MiB of files in a temporary folder,
and ended with it. That is no sandbox: they run as you, may read, write and kill what you may, and
use your network"""


def declare(parser: Parser, dataset: str | None = None) -> None:
    """Declares the options, for one data set if it is given."""
    parser.set_defaults(dataset=dataset)
    model_options(parser.add_argument_group("models"))
    problems = parser.add_argument_group("problems")
    add = problems.add_argument
    if dataset is None:
        add("--dataset", choices=tuple(DATASETS), required=True)
    add("--data", type=Path, metavar="FILE.jsonl", help="instead of the hub's (.gz is read too)")
    add("--limit", type=int, metavar="N", help="the first N problems")
    add("--shuffle", type=int, metavar="SEED", help="the problems, before --limit")
    add("--reference-order", action="store_true", help=f"as the authors: {AS_REFERENCE}")
    add("--prompt-style", default="reference", metavar="NAME", help=STYLES)
    add("--few-shot", type=int, default=0, metavar="K", help="worked examples first")
    add("--few-shot-data", type=Path, metavar="FILE.jsonl", help="where from")
    prompt_options(problems)
    shared = parser.add_argument_group("hosts and replicas")
    host_options(shared)
    replica_options(shared)
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--batch", type=int, default=32, metavar="B", help="default 32")
    sampling_options(decoding, max_new_tokens=512)
    oracle_option(decoding)
    refills = "steps between two refills of finished slots; default: the engine's"
    decoding.add_argument("--steps-per-call", type=int, metavar="N", help=refills)
    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, metavar="DIR", help="default: evaluation-DATASET")
    add("--overwrite", action="store_true", help="forget the run in --output")
    add("--baseline", action="store_true", help="plain decoding of the same prompts as well")
    add("--same-as", type=Path, metavar="DIR", help=SAME_AS)
    add("--execute", action="store_true", help=EXECUTE)


def check(options: Options) -> None:
    o = options
    at_least_1(o, "batch", "max_new_tokens", "steps_per_call")
    ordered = o.limit is not None or o.shuffle is not None
    refuse(o.reference_order and ordered, "--reference-order with --limit or --shuffle: it is both")
    programs = DATASETS[o.dataset].kind == "code"
    refuse(o.execute and not programs, f"--execute: {o.dataset} has no programs")
    refuse(o.few_shot < 0, f"--few-shot {o.few_shot}: 0 or more")
    refuse(o.few_shot_data and not o.few_shot, "--few-shot-data without --few-shot K")
    plain = o.drafter == "none" and o.block_size in (None, 1)
    why = "--baseline with --drafter none: that is plain decoding already"
    refuse(o.baseline and plain, why)
    check_hosts(o)
    check_replicas(o)
    both = o.replicas is not None and o.num_hosts is not None
    refuse(both, f"--replicas {o.replicas} with --num-hosts {o.num_hosts}: Ray has its hosts")
    check_pair(o, drawn=o.temperature > 0)
    check_oracle(o)
    if o.output is not None:
        refuse_below_file(o.output)
