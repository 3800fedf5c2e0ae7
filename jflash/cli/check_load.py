"""check-load: compares texts under load with texts of an idle engine."""

import argparse
from collections.abc import Generator
from typing import Any

from jflash.cli.command import require
from jflash.cli.generate import configured, loaded
from jflash.cli.options.pair import shared_note
from jflash.cli.options.values import option_name, refuse
from jflash.generate import Pair
from jflash.io import default_dtype
from jflash.pair import Models
from jflash.proof.cases import load_case
from jflash.proof.devices import shared_pair
from jflash.proof.forms import grammars, letters
from jflash.proof.under_load import Load, compared
from jflash.serving.grammar import Grammar
from jflash.serving.paging.room import pages_within
from jflash.system.device import describe_device, device_memory


def random_pair(args: argparse.Namespace) -> tuple[Pair, list[Grammar]]:
    """Weights of --pair's sizes, whose drafts are hardly ever accepted, and forms of letters."""
    dtype = args.dtype or default_dtype()
    case = load_case(args.pair, dtype, args.seed, {}, args.batch, args.layers, args.drafter_dtype)
    tokenizer, end = letters()
    vocabulary = case.models.target.config.vocab_size
    models, params = case.models, case.params
    check_engine(models, args)
    if args.tensor_parallel > 1:
        shared = args.tensor_parallel, args.experts_over, args.batch
        models, params = shared_pair(models, params, *shared)
    return Pair(models, params), grammars(tokenizer, vocabulary, [end])


def real_pair(args: argparse.Namespace) -> tuple[Pair, list[Grammar]]:
    """The pair of the options, and forms of its tokenizer."""
    files = configured(args, args.batch)
    check_engine(files.models, args)
    tokenizer = files.target.tokenizer()
    vocabulary = files.models.target.config.vocab_size
    forms = grammars(tokenizer, vocabulary, files.target.stop_ids(tokenizer))
    return loaded(files, progress=False), forms


def check_engine(models: Models, args: argparse.Namespace) -> None:
    """ValueError for sizes that the models or the device cannot have."""
    positions = min(config.max_position_embeddings for config in models.configs)
    for name in ("context", "prefill_chunk"):
        size = getattr(args, name)
        why = f"the pair has {positions} positions"
        refuse(size > positions, f"{option_name(name)} {size}: {why}")
    sizes = args.batch, args.context, args.pages
    pages_within(models, *sizes, device_memory(), args.steps_per_call)


def run(args: argparse.Namespace) -> Generator[dict[str, Any], None, int]:
    require("llguidance")
    pair, forms = random_pair(args) if args.pair else real_pair(args)
    sizes = args.prefill_chunk, args.steps_per_call
    load = Load(args.batch, args.context, args.pages, *sizes, args.seed)
    result = compared(pair, args.requests, load, forms)
    yield describe_device() | {
        "check": "load",
        **({"pair": args.pair, "layers": args.layers} if args.pair else {}),
        "dtype": pair.models.dtype,
        "tensor_parallel": args.tensor_parallel,
        **shared_note(args),
        "backends": pair.models.kernels._asdict(),
        **result,
    }
    differ = len(result["differ"])
    print(
        f"{differ} of {args.requests} texts under load differ; {result['preempted']} preempted, "
        f"{result['cached_tokens']} of {result['prompt_tokens']} prompt tokens cached, "
        f"{result['ended'].get('cancelled', 0)} cancelled, {result['pages_lost']} pages lost"
    )
    return 1 if differ or result["pages_lost"] else 0
