"""Collects prompts to train a drafter on: from files, made up, and written by the target itself.

python scripts/make_prompts.py --output prompts.jsonl --gsm8k-train train.jsonl \
    --exclude-test test.jsonl --written-by DIR --count 5000

Every line says its source. What the test sets ask is left out: name them all.
"""

import argparse
import hashlib
import json
import random
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import jax

from jflash.backends import with_backends
from jflash.cli.command import Parser, run_command
from jflash.files import replacing
from jflash.generate import Pair
from jflash.io import load_target, open_checkpoint
from jflash.io.digest import checkpoint_digest
from jflash.sampling import Sampling
from jflash.speculative import Models, Params
from jflash.training.prompts import (
    Prompt,
    collected,
    gsm8k_prompts,
    question_prompts,
    questions_of_tests,
    self_instruct_prompts,
    svamp_prompts,
)
from jflash.training.self_written import write_prompts


def make_parser() -> Parser:
    parser = Parser("make_prompts.py", (__doc__ or "").split("\n")[0])
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


def check(args: argparse.Namespace) -> Sampling:
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
    return Sampling(temperature=args.temperature, top_p=args.top_p)


def from_files(args: argparse.Namespace) -> list[Prompt]:
    found = gsm8k_prompts(args.gsm8k_train, args.variants, args.seed) if args.gsm8k_train else []
    for file in args.self_instruct:
        found += self_instruct_prompts(file)
    if args.svamp:
        found += svamp_prompts(args.svamp)
    for file in args.questions:
        found += question_prompts(file)
    return found


def self_written(args: argparse.Namespace, sampling: Sampling) -> list[Prompt]:
    """What the target writes; its turns stay beside the output, so that a killed run goes on."""
    checkpoint = open_checkpoint(args.written_by)
    target, params = load_target(checkpoint, progress=True)
    tokenizer = checkpoint.tokenizer()
    models = with_backends(
        Models(target, None, 1), str(params["embedding"].dtype), jax.devices()[0]
    )
    systems = args.system or [None]
    written_by = (args.written_by, checkpoint_digest(checkpoint.path))
    made_with = repr((written_by, systems, asdict(sampling), args.seed, args.max_new_tokens))
    digest = hashlib.blake2b(made_with.encode(), digest_size=6).hexdigest()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return write_prompts(
        Pair(models, Params(params, None)), tokenizer, args.count, systems=systems,
        stop_token_ids=checkpoint.stop_ids(tokenizer), sampling=sampling, seed=args.seed,
        max_new_tokens=args.max_new_tokens, batch_size=args.batch, folder=args.output.parent,
        name=f"{args.output.stem}-written-{digest}",
    )  # fmt: skip


def main(args: argparse.Namespace) -> None:
    sampling = check(args)
    tests = questions_of_tests(args.exclude_test)
    found = from_files(args)
    if args.written_by:
        written = self_written(args, sampling)
        print(f"{len(written)} of {args.count} user turns are worth asking")
        found += written
    if not found:
        raise ValueError("no source gave a prompt: nothing to write")
    prompts, asked = collected(found, tests)
    if not prompts:
        raise ValueError(f"all {len(found)} prompts are test questions: nothing is left")
    random.Random(args.seed).shuffle(prompts)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(args.output) as part, part.open("w", encoding="utf-8") as out:
        for text, source in prompts:
            out.write(json.dumps({"prompt": text, "source": source}, ensure_ascii=False) + "\n")
    counts = ", ".join(f"{n} {source}" for source, n in Counter(p.source for p in prompts).items())
    print(f"{args.output}: {len(prompts)} prompts ({counts})")
    print(f"{asked} left out as questions of {len(args.exclude_test)} test set(s)")


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
