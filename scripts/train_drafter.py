"""Trains a DFlash drafter for a target of yours, on prompts that the target answers itself.

python scripts/train_drafter.py --target DIR --data prompts.jsonl --output drafter --num-layers 5

A line of the data holds "prompt" (text, put through the target's chat template) or "prompt_ids",
and with --keep-answers also "answer" (text) or "answer_ids" (stop token included).
"""

import argparse
import hashlib
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jflash.backends import with_backends
from jflash.cli.command import Parser, run_command
from jflash.generate import Pair
from jflash.io import (
    default_dtype,
    load_target,
    load_tokenizer,
    resolve,
    save_checkpoint,
    stop_token_ids,
)
from jflash.io.text import encode_prompt
from jflash.speculative import Models, Params
from jflash.training.answers import answer_prompts
from jflash.training.data import Conversation, load_conversations, save_conversations
from jflash.training.drafter import (
    default_mask_token_id,
    drafter_config_for,
    read_records,
    train_drafter,
)
from jflash.training.trainer import TrainConfig


def make_parser() -> Parser:
    parser = Parser("train_drafter.py", (__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--target", required=True, help="checkpoint folder or hub id; stays as it is")
    add("--data", type=Path, required=True, metavar="FILE.jsonl", help="a prompt a line")
    add("--keep-answers", action="store_true", help="learn the data's answers where it has any")
    add("--output", type=Path, required=True, help="folder for the drafter; OUTPUT-work beside it")
    add("--overwrite", action="store_true", help="replace a finished drafter, forget its training")
    add("--minutes", type=float, help="stop training after as long, to be resumed by the next call")
    add("--num-layers", type=int, default=5)
    add("--block-size", type=int, default=16)
    add("--target-layer-ids", type=layer_ids, metavar="1,9,17", help="default: the published rule")
    add("--mask-token-id", type=int, help="default: the tokenizer's, or its first unused id")
    add("--max-new-tokens", type=int, default=512, help="of an answer")
    add("--answer-batch", type=int, default=64, help="prompts answered at a time")
    add("--row-length", type=int, default=1024, help="tokens; longer conversations are left out")
    add("--anchors", type=int, default=64, help="blocks drawn from a row, each time anew")
    add("--steps", type=int, default=20_000)
    add("--batch", type=int, default=8, help="rows a step")
    add("--learning-rate", type=float, default=6e-4)
    add("--weight-decay", type=float, default=0.01)
    add("--seed", type=int, default=0)
    return parser


def layer_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def answered(
    args: argparse.Namespace, pair: Pair, tokenizer: Any, work: Path
) -> list[Conversation]:
    """The conversations to learn, answers made now or by an earlier call for the same data."""
    stops = stop_token_ids(resolve(args.target), tokenizer)
    made_with = (args.target, args.keep_answers, args.max_new_tokens, stops)
    digest = hashlib.blake2b(args.data.read_bytes() + repr(made_with).encode(), digest_size=6)
    file = work / f"answers-{digest.hexdigest()}.npz"
    if file.exists():
        return load_conversations(file)

    def encode_answer(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *stops[:1]]

    records = read_records(args.data, partial(encode_prompt, tokenizer), encode_answer)
    asked = [i for i, r in enumerate(records) if not (args.keep_answers and r.answer_ids)]
    if asked:
        answers = answer_prompts(
            pair, [records[i].prompt_ids for i in asked], batch_size=args.answer_batch,
            max_new_tokens=args.max_new_tokens, stop_token_ids=stops,
        )  # fmt: skip
        for i, answer in zip(asked, answers, strict=True):
            records[i] = Conversation(records[i].prompt_ids, answer.token_ids)
    save_conversations(file, records)
    return records


def main(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    training = TrainConfig(
        steps=args.steps, batch_size=args.batch, learning_rate=args.learning_rate,
        weight_decay=args.weight_decay, seed=args.seed, compute_dtype=default_dtype(),
    )  # fmt: skip
    work = args.output.with_name(args.output.name + "-work")
    finished = args.output / "config.json"
    if finished.exists() and not args.overwrite:
        raise ValueError(f"{args.output} exists already: pass --overwrite to replace it")
    if not args.data.is_file():
        raise ValueError(f"{args.data}: no such file")
    target, params = load_target(args.target, progress=True)
    tokenizer = load_tokenizer(args.target)
    vocab_size = target.config.vocab_size
    mask = args.mask_token_id
    config = drafter_config_for(
        target.config,
        num_layers=args.num_layers,
        block_size=args.block_size,
        mask_token_id=default_mask_token_id(tokenizer, vocab_size) if mask is None else mask,
        target_layer_ids=args.target_layer_ids,
    )
    if finished.exists():  # gone first, so that an interrupted replacement is resumed
        finished.unlink()
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    dtype = str(params["embedding"].dtype)
    models = with_backends(Models(target, None, 1), dtype, jax.devices()[0])
    pair = Pair(models, Params(params, None))
    conversations = answered(args, pair, tokenizer, work)

    def should_stop(step: int) -> bool:
        return args.minutes is not None and time.monotonic() - begin > 60 * args.minutes

    trained = train_drafter(
        target, params, config, conversations, row_length=args.row_length, anchors=args.anchors,
        training=training, directory=work / "training", should_stop=should_stop,
    )  # fmt: skip
    if trained.step < args.steps:
        print(f"stopped at step {trained.step} of {args.steps}; the same command goes on")
        return
    save_checkpoint(args.output, config, trained.params)
    last = trained.history[-1]
    loss, length = last["loss"], last["acceptance_length"]
    print(f"{args.output}: loss {loss:.3f}, acceptance length {length:.2f} on training data")


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
