"""same-answers: a real pair's answers in several ways, each beside plain decoding's."""

from collections.abc import Generator
from typing import Any

from jflash.cli.command import Options
from jflash.cli.options.pair import shared_note
from jflash.evals.datasets import load_problems
from jflash.io import configure_pair, encode_prompt, load_weights
from jflash.proof.same_answers import REFERENCE_BATCH, compared
from jflash.records.decoding import Decoding
from jflash.serving.batch import check_batch
from jflash.system.device import describe_device

DIFFERENT = 1


def run(args: Options) -> Generator[dict[str, Any], None, int]:
    files = configure_pair(
        args.target, args.drafter, dtype=args.dtype,
        tensor_parallel=args.tensor_parallel, experts_over=args.experts_over,
    )  # fmt: skip
    tokenizer = files.target.tokenizer()
    stops = tuple(files.target.stop_ids(tokenizer))
    problems = load_problems("gsm8k", args.gsm8k)[: args.questions]
    prompts = [encode_prompt(tokenizer, problem.turns[0]) for problem in problems]
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=stops)
    check_batch(files.models, prompts, decoding, args.batch)
    pair = load_weights(files)
    about = describe_device() | {
        "check": "same-answers",
        "target": str(args.target).rsplit("/", 1)[-1],
        "dtype": pair.models.dtype,
        **shared_note(args),
        "backends": pair.models.kernels._asdict(),
    }
    newest: dict[str, Any] = {}
    for newest in compared(pair, prompts, args.batch, decoding, anchored=args.anchored):
        yield about | newest
    counts = {name: (same, newest["compared"][name]) for name, same in newest["same"].items()}
    for name, (same, of) in counts.items():
        print(f"{name}: {same} of {of} answers are plain decoding's, batch {REFERENCE_BATCH}")
    return DIFFERENT if any(same < of for same, of in counts.values()) else 0
