"""make-prompts: from files, made up, and written by the target itself, to one file."""

import functools
import hashlib
import json
import random
from collections import Counter
from dataclasses import asdict

from jflash.checks import check_request
from jflash.cli.command import Options, require
from jflash.cli.jax_setup import configure_jax
from jflash.cli.options.make_prompts import drawing
from jflash.io import configure_pair, load_weights
from jflash.io.digest import checkpoint_digest
from jflash.records.decoding import Decoding
from jflash.system.lines import whole_file
from jflash.system.replicas import cluster, made
from jflash.training.prompts import (
    Prompt,
    collected,
    gsm8k_prompts,
    question_prompts,
    questions_of_tests,
    self_instruct_prompts,
    svamp_prompts,
)
from jflash.training.recipe import WHOLE, Share
from jflash.training.self_written import user_prefix, write_prompts


def from_files(args: Options) -> list[Prompt]:
    """The prompts of all files; ValueError for a file without one."""
    prompts = list[Prompt]()
    train = functools.partial(gsm8k_prompts, variants=args.variants, seed=args.seed)
    for read, files in (
        (train, filter(None, [args.gsm8k_train])),
        (self_instruct_prompts, args.self_instruct),
        (svamp_prompts, filter(None, [args.svamp])),
        (question_prompts, args.questions),
    ):
        for file in files:
            found = read(file)
            if not found:
                raise ValueError(f"{file} holds no prompt")
            prompts += found
    return prompts


def self_written(args: Options, share: Share = WHOLE) -> list[Prompt] | None:
    """The target's user turns; they stay beside the output, so that a killed run goes on.

    None while another share has turns to write.
    """
    files = configure_pair(
        args.written_by, tensor_parallel=args.tensor_parallel, experts_over=args.experts_over
    )
    checkpoint, sampling = files.target, drawing(args)
    tokenizer = checkpoint.tokenizer()
    new, stops = args.max_new_tokens, checkpoint.stop_ids(tokenizer)
    decoding = Decoding(max_new_tokens=new, stop_token_ids=stops, sampling=sampling, seed=args.seed)
    systems = args.system or [None]
    for system in systems:
        check_request(files.models, user_prefix(tokenizer, system), decoding)
    pair = load_weights(files, progress=True)
    written_by = (args.written_by, checkpoint_digest(checkpoint.path))
    made_with = repr((written_by, systems, asdict(sampling), args.seed, new))
    digest = hashlib.blake2b(made_with.encode(), digest_size=6).hexdigest()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return write_prompts(
        pair, tokenizer, args.count, systems=systems, decoding=decoding,
        batch_size=args.batch, folder=args.output.parent,
        name=f"{args.output.stem}-written-{digest}", share=share,
    )  # fmt: skip


def _part(args: Options, index: int, of: int) -> None:
    configure_jax(args)
    self_written(args, Share(index, of))


def run(args: Options) -> None:
    tests = questions_of_tests(args.exclude_test)
    collection = from_files(args)
    if args.written_by:
        if args.replicas is not None:
            require("ray")
            with cluster(args.ray_address, args.replicas, args.tensor_parallel):
                made(functools.partial(_part, args), args.replicas, args.tensor_parallel)
        written = self_written(args)
        assert written is not None  # all are written, or this process writes them
        print(f"{len(written)} of {args.count} user turns are worth asking")
        collection += written
    if not collection:
        raise ValueError("no source gave a prompt: nothing to write")
    prompts, excluded = collected(collection, tests)
    if not prompts:
        raise ValueError(f"all {len(collection)} prompts are test questions: nothing is left")
    random.Random(args.seed).shuffle(prompts)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(args.output, args.overwrite) as write:
        for text, source in prompts:
            write(json.dumps({"prompt": text, "source": source}, ensure_ascii=False))
    counts = ", ".join(f"{n} {source}" for source, n in Counter(p.source for p in prompts).items())
    print(f"{args.output}: {len(prompts)} prompts ({counts})")
    print(f"{excluded} left out as questions of {len(args.exclude_test)} test set(s)")
