"""Trains a DFlash drafter for your target, on prompts that the target itself answers.

A line of --data holds "prompt" (text, put through the target's chat template) or "prompt_ids", and
with --keep-answers also "answer" (text) or "answer_ids" (stop token included). The same command
goes on where it was stopped or killed; OUTPUT-work/training holds the curves.
"""

import argparse
from pathlib import Path
from typing import Any

from jflash.cli.command import Options, Parser
from jflash.cli.options.hosts import check_hosts, host_options
from jflash.cli.options.pair import check_shared, shared_options
from jflash.cli.options.replicas import check_replicas, replica_options
from jflash.cli.options.values import (
    at_least_1,
    check_seed,
    decimals,
    ids,
    option_name,
    refuse,
    refuse_below_file,
    refuse_missing,
    refuse_unwritable,
)
from jflash.records.decoding import Sampling
from jflash.training.recipe import LOSSES, OPTIMIZERS, WEIGHTS, Objective, Share, TrainConfig

# A new drafter's form without options; version 2 takes the second part as well.
EVAL_BATCH = 32
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
FORM = {
    **{"drafter": "dflash", "num_layers": 5, "intermediate_size": None, "block_size": 16},
    **{"target_layer_ids": None, "mask_token_id": None, **SECOND},
}


def declare(parser: Parser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="checkpoint folder, .gguf file or hub id; stays as it is")
    add("--data", type=Path, required=True, metavar="FILE.jsonl", help="a prompt a line")
    add("--output", type=Path, required=True, help="folder for the drafter; OUTPUT-work beside it")
    add("--overwrite", action="store_true", help="replace a finished drafter, forget its training")
    add("--dry-run", action="store_true", help="print what it takes of memory and time, and stop")
    add("--minutes", type=float, help="stop training after as long, to be resumed by the next call")
    answers = parser.add_argument_group("answers")
    _answer_options(answers)
    replica_options(answers, "target")
    host_options(parser.add_argument_group("hosts that share --output"), "target")
    _drafter_options(parser.add_argument_group("drafter").add_argument)
    _training_options(parser.add_argument_group("training").add_argument)
    _evaluation_options(parser.add_argument_group("τ on prompts that are not learnt").add_argument)


def _answer_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--no-chat-template", action="store_true", help="prompts as they are, for base models")
    add("--keep-answers", action="store_true", help="learn the data's answers where it has any")
    add("--max-new-tokens", type=int, default=512, help="of an answer")
    add("--answer-batch", type=int, default=64, help="prompts answered at a time")
    several = "default 0: greedy; of several every prompt is answered at each"
    add("--answer-temperature", type=decimals, default=(0.0,), metavar="T,T…", help=several)
    add("--answers-per-prompt", type=int, default=1, metavar="N", help="at each temperature")
    add("--keep-looping", action="store_true", help="learn answers that repeat themselves too")
    part = "make only part I of N (from 0) of the answers and stop: a process for each GPU"
    add("--answer-part", type=share, default=Share(), metavar="I/N", help=part)
    shared_options(group, "the target while it answers; its training takes it whole")


def _drafter_options(add) -> None:
    begin = "train this one on, a checkpoint folder or hub id, instead of a new one"
    add("--init-from", metavar="DRAFTER", help=begin)
    add("--drafter", choices=("dflash", "dflash2"), help="version 1 or 2; default: dflash")
    add("--num-layers", type=int, help="default: 5")
    add("--intermediate-size", type=int, help="width of the MLP; default: the target's")
    add("--block-size", type=int, help="default: 16")
    add("--target-layer-ids", type=ids, metavar="1,9,17", help="default: the published rule")
    add("--mask-token-id", type=int, help="default: the tokenizer's, or an id that is not used")
    for name, what in (
        ("conv_kernel_size", "rows that a convolution spans"),
        ("conv_group_size", "channels that share a kernel"),
        ("selector_rank", "width of the codebooks"),
        ("selector_top_k", "candidates of a position"),
    ):
        text = f"{what}, of --drafter dflash2; default: {FORM[name]}"
        add(option_name(name), type=int, help=text)


def _training_options(add) -> None:
    paper = Objective()
    add("--row-length", type=int, default=1024, help="tokens; longer conversations are left out")
    add("--anchors", type=int, default=64, help="blocks drawn from a row, each time anew")
    add("--steps", type=int, default=20_000)
    add("--batch", type=int, default=8, help="rows a step, of all GPUs together")
    muon = "muon: along the orthogonal part of each product's gradient, at AdamW's step size"
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help=muon)
    add("--learning-rate", type=float, default=6e-4, help="of either optimizer")
    add("--weight-decay", type=float, default=0.01)
    add("--seed", type=int, default=0)
    add("--checkpoint-every", type=int, default=1000, metavar="STEPS")
    losses = "cross-entropy on the target's token, KL to its distribution, or total variation"
    add("--loss", choices=LOSSES, default=paper.loss, help=losses)
    weights = "exp(-(k-1)/γ), or D-PACE's by the drafter's confidence"
    add("--position-weights", choices=WEIGHTS, default=paper.weights, help=weights)
    add("--decay", type=float, metavar="γ", help="default: the paper's for the block width")
    add("--dpace-alpha", type=float, default=paper.dpace_alpha)
    add("--ce-share", type=float, default=paper.ce_share, help="of --loss tv")
    positions = "of the training, over which the positions of a block come in one by one"
    add("--curriculum", type=float, default=0.0, metavar="SHARE", help=positions)
    add("--selector-weight", type=float, default=paper.selector_weight, help="of its loss, dflash2")
    add("--training-attention", choices=("xla", "cudnn"), help="default: the device's fastest")


def _evaluation_options(add) -> None:
    other = "none of them is learnt; default: some of the data's"
    add("--eval-prompts", type=Path, metavar="FILE.jsonl", help=other)
    add("--held-out", type=int, metavar="N", help="prompts of the data; default: 5 %%, at most 64")
    add("--eval-every", type=int, default=1000, metavar="STEPS", help="0: never")
    add("--eval-batch", type=int, default=EVAL_BATCH)


def work_folder(output: Path) -> Path:
    """Where the answers and the training of a drafter lie."""
    return output.with_name(output.name + "-work")


def share(text: str) -> Share:
    try:
        index, of = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 0/4") from None
    if not 0 <= index < of:
        raise argparse.ArgumentTypeError(f"{text}: of N parts, at least 1, I is within 0 … N - 1")
    return Share(index, of)


def drafter_form(args: Options) -> dict[str, Any]:
    """The options of a new drafter with their defaults.

    ValueError for one with --init-from, and for one of version 2 with version 1.
    """
    given = {name: getattr(args, name) for name in FORM if getattr(args, name) is not None}
    if args.init_from is not None and given:
        name = option_name(next(iter(given)))
        raise ValueError(f"{name}: the drafter of --init-from is as it is; leave this out")
    for name in SECOND:
        refuse(
            args.drafter != "dflash2" and name in given,
            f"{option_name(name)} without --drafter dflash2",
        )
    return FORM | given


def check(args: Options) -> None:
    at_least_1(args, "answer_batch", "answers_per_prompt", "eval_batch", "max_new_tokens")
    at_least_1(args, "row_length", "steps", "batch", "checkpoint_every")
    for name in ("held_out", "eval_every", "minutes"):
        value = getattr(args, name)
        wrong = value is not None and not value >= 0
        refuse(wrong, f"{option_name(name)} {value}: 0 or more")
    file = args.output.exists() and not args.output.is_dir()
    refuse(file, f"--output {args.output} is a file: the drafter gets a folder")
    unnamed = f"--output {args.output}: give a folder's name, beside which NAME-work may lie"
    refuse(args.output.name in ("", ".."), unnamed)
    refuse_below_file(args.output)
    work = work_folder(args.output)
    file = work.exists() and not work.is_dir()
    refuse(file, f"--output {args.output}: {work} is a file, where its answers would lie: move it")
    check_hosts(args)
    check_replicas(args)
    check_shared(args)
    for name in ("num_hosts", "replicas"):
        value = getattr(args, name)
        others = args.overwrite or args.answer_part.of > 1
        why = f"{option_name(name)} {value} with --overwrite or --answer-part: leave one out"
        refuse(value is not None and others, why)
    both = args.replicas is not None and args.num_hosts is not None
    refuse(both, f"--replicas {args.replicas} with --num-hosts {args.num_hosts}: Ray has its hosts")
    why = "--overwrite with --answer-part: a part would delete the answers of the others; "
    refuse(args.overwrite and args.answer_part.of > 1, why + "give another --output")
    for file in filter(None, (args.data, args.eval_prompts)):
        refuse_missing(file)
    check_seed(args.seed)
    drafter_form(args)
    _check_read(args)
    train_config(args, "float32")
    train_objective(args)
    answer_samplings(args)
    for folder in () if args.dry_run else (args.output, work):  # last: it writes for a moment
        refuse_unwritable(folder)


def _check_read(args: Options) -> None:
    """Refuses what another option leaves unread."""
    first = args.init_from is None and args.drafter != "dflash2"
    for name, unread, other in (
        ("ce_share", args.loss != "tv", "--loss tv"),
        ("dpace_alpha", args.position_weights != "dpace", "--position-weights dpace"),
        ("decay", args.position_weights != "decay", "--position-weights decay"),
        ("selector_weight", first, "--drafter dflash2"),
    ):
        given = unread and getattr(args, name) != getattr(Objective, name)
        refuse(given, f"{option_name(name)} without {other}")
    for name, usual in (("eval_prompts", None), ("held_out", None), ("eval_batch", EVAL_BATCH)):
        given = not args.eval_every and (getattr(args, name) or usual) != usual
        refuse(given, f"{option_name(name)} with --eval-every 0: nothing would be evaluated")
    both = args.eval_prompts and args.held_out
    refuse(both, "--held-out with --eval-prompts: these are the prompts held out")
    several = args.answers_per_prompt > 1 and 0 in args.answer_temperature
    same = "greedy answers to a prompt are all the same"
    refuse(several, f"--answers-per-prompt {args.answers_per_prompt} at temperature 0: {same}")
    refuse(args.answer_temperature.count(0) > 1, f"--answer-temperature has 0 twice: {same}")


def train_config(args: Options, dtype: str) -> TrainConfig:
    """The training's numbers, its products in `dtype`."""
    return TrainConfig(
        steps=args.steps, batch_size=args.batch, optimizer=args.optimizer,
        learning_rate=args.learning_rate, weight_decay=args.weight_decay, seed=args.seed,
        compute_dtype=dtype, checkpoint_every=args.checkpoint_every,
        steps_per_call=min(50, args.checkpoint_every),
    )  # fmt: skip


def train_objective(args: Options) -> Objective:
    return Objective(
        loss=args.loss, weights=args.position_weights, decay=args.decay,
        dpace_alpha=args.dpace_alpha, ce_share=args.ce_share, curriculum=args.curriculum,
        selector_weight=args.selector_weight,
    )  # fmt: skip


def answer_samplings(args: Options) -> list[Sampling]:
    """How each answer to a prompt is drawn."""
    temperatures = [t for t in args.answer_temperature for _ in range(args.answers_per_prompt)]
    return [Sampling(temperature=t) for t in temperatures]
