"""train: a target's answers to prompts, and the drafter that learns them."""

import argparse
import functools
import hashlib
import shutil
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from jflash.acceptance import is_looping
from jflash.cli.command import INTERRUPTED, Options, require
from jflash.cli.interrupts import first_interrupt
from jflash.cli.jax_setup import configure_jax
from jflash.cli.options.train import (
    answer_samplings,
    train_config,
    train_objective,
    work_folder,
)
from jflash.cli.training_dry_run import dry_run
from jflash.cli.training_run import Prepared, prepare
from jflash.io import (
    default_dtype,
    load_drafter,
    resolve,
    save_checkpoint,
)
from jflash.io.digest import checkpoint_digest
from jflash.records.decoding import Decoding
from jflash.system.files import make_folder
from jflash.system.hosts import Hosts, joined
from jflash.system.locks import locked
from jflash.system.replicas import cluster, made
from jflash.training.answers import answer_into
from jflash.training.data import Conversation, load_conversations, save_conversations
from jflash.training.drafter import train_drafter
from jflash.training.held_out import held_out_evaluation
from jflash.training.recipe import Share, TrainConfig
from jflash.training.records import split_held_out
from jflash.training.steps import device_mesh
from jflash.training.trainer import LOCK, RUN, Evaluation

# Options in which the hosts of a run may differ: where each finds what, and how long it may take.
OWN = (
    *("coordinator", "num_hosts", "host_index", "data", "eval_prompts", "output", "minutes"),
    *("tensor_parallel", "experts_over", "autotune", "memory_fraction", "no_compilation_cache"),
    *("no_cuda_graphs", "no_preallocation"),
)
OWNED = ("training", "answers-*", ".answers-*")  # of a drafter's work folder


def answered(
    args: Options, prepared: Prepared, work: Path, hosts: Hosts
) -> list[Conversation] | None:
    """The conversations to learn, with answers of this call or of an earlier one for the same data.

    Hosts make them together. It returns None while other processes have answers to make.
    """
    records, stops, samplings = prepared.records, prepared.stops, answer_samplings(args)
    seed = args.seed if any(s.temperature for s in samplings) else 0
    weights = checkpoint_digest(resolve(args.target))
    made_with = (args.target, weights, args.max_new_tokens, stops, samplings, seed)
    digest = hashlib.blake2b(repr((records, made_with)).encode(), digest_size=6).hexdigest()
    file = work / f"answers-{digest}.npz"
    if file.exists():
        return load_conversations(file)
    prompts = [r.prompt_ids for r in records if not r.answer_ids]
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=stops, seed=seed)
    decodings = [replace(decoding, sampling=sampling) for sampling in samplings]
    share = Share(hosts.index, hosts.count) if hosts.count > 1 else args.answer_part
    make = functools.partial(
        answer_into, work, f"answers-{digest}", prepared.pair, prompts, decodings,
        batch_size=args.answer_batch, share=share,
    )  # fmt: skip
    answers = make() if prompts else []
    hosts.meet("answers")
    if hosts.count > 1 and prompts:
        answers = make()  # those of all hosts lie there now
    if answers is None:
        return None
    made = iter(answers)
    conversations = [
        Conversation(r.prompt_ids, answer)
        for r in records
        for answer in ([r.answer_ids] if r.answer_ids else islice(made, len(samplings)))
    ]
    if not hosts.index:
        save_conversations(file, conversations)
    return conversations


def without_loops(conversations: list[Conversation], keep: bool) -> list[Conversation]:
    """Leaves out answers that repeat themselves: they are easy to foresee, and teach loops."""
    count = len(conversations)
    ended = conversations if keep else [c for c in conversations if not is_looping(c.answer_ids)]
    if not ended:
        raise ValueError(f"all {count} answers repeat themselves: --keep-looping learns them")
    if len(ended) < count:
        print(f"{count - len(ended)} of {count} answers repeat themselves: left out")
    return ended


def evaluation_for(
    args: Options, prepared: Prepared, learnt: list[Conversation]
) -> tuple[list[Conversation], Evaluation | None]:
    """The conversations to learn, and the evaluation on prompts held out or taken from them."""
    held = prepared.held
    if args.eval_every and not held:
        different = len({tuple(c.prompt_ids) for c in learnt})
        count = min(64, different // 20) if args.held_out is None else args.held_out
        learnt, held = split_held_out(learnt, count, args.seed)
    if not args.eval_every or not held:
        return learnt, None
    print(f"τ on {len(held)} prompts every {args.eval_every} steps")
    evaluation = held_out_evaluation(
        prepared.target, prepared.params, prepared.config, [h.prompt_ids for h in held],
        every=args.eval_every, batch_size=args.eval_batch,
        decoding=Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=prepared.stops),
    )  # fmt: skip
    return learnt, evaluation


def run(args: Options) -> None:
    try:
        with joined(args.coordinator, args.num_hosts, args.host_index) as hosts:
            train(args, hosts)
    except KeyboardInterrupt:
        if not args.dry_run:
            print("\ninterrupted; the same command goes on", file=sys.stderr)
        raise


def answer_by_replicas(args: Options) -> None:
    """Makes all answers, each replica its part, before this process touches a device."""
    require("ray")
    with cluster(args.ray_address, args.replicas, args.tensor_parallel):
        made(functools.partial(_part, args), args.replicas, args.tensor_parallel)


def _part(args: Options, index: int, of: int) -> None:
    configure_jax(args)
    share = Share(index, of)
    train(argparse.Namespace(**vars(args) | {"replicas": None, "answer_part": share}), Hosts())


def check_outside(work: Path, args: Options) -> None:
    """ValueError for what the training reads in a folder of which --overwrite removes things."""
    for option in ("data", "eval_prompts", "target", "init_from"):
        given = getattr(args, option)
        if given is not None and work.resolve() in Path(given).resolve().parents:
            name = "--" + option.replace("_", "-")
            raise ValueError(f"{name} {given} lies in {work}, which --overwrite empties: move it")


def train(args: Options, hosts: Hosts) -> None:
    begin = time.monotonic()
    work = work_folder(args.output)
    learns = args.dry_run or (work / "training" / RUN).exists()  # it has all answers, or needs none
    if args.replicas is not None and not learns:
        answer_by_replicas(args)
    training = train_config(args, default_dtype())
    if args.answer_part.of == 1:
        device_mesh(args.batch)  # refuses a batch that the devices cannot share
    finished = args.output / "config.json"
    if finished.exists() and not (args.overwrite or args.dry_run):
        raise ValueError(f"{args.output} exists already: pass --overwrite to replace it")
    if finished.exists():
        check_outside(work, args)
    prepared = prepare(args)
    hosts.agree(host_settings(args, prepared))
    if args.dry_run:
        dry_run(args, training, prepared)
        return
    make_folder(work)
    if finished.exists():  # removed last, so that no call resumes the old training
        (work / "training").mkdir(exist_ok=True)
        with locked(work / "training" / LOCK, work):
            empty(work)
        finished.unlink()
    found = answered(args, prepared, work, hosts)
    if found is None or args.answer_part.of > 1:
        print(f"part {args.answer_part.index} of {args.answer_part.of} of the answers is made")
        return
    conversations = without_loops(found, args.keep_looping)
    learn(args, training, prepared.whole(free=True), conversations, work, begin)


def empty(folder: Path) -> None:
    """Removes the answers and the training in a folder, which may be a link and hold other things.

    They may be of a killed run: half of a file of answers too.
    """
    for found in [found for name in OWNED for found in folder.glob(name)]:
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()


def learn(
    args: Options, training: TrainConfig, prepared: Prepared,
    found: list[Conversation], work: Path, begin: float,
) -> None:  # fmt: skip
    """Trains on the answers, and saves the drafter when it is finished."""
    learnt, evaluation = evaluation_for(args, prepared, found)
    start = None
    if args.init_from is not None:
        _, start = load_drafter(args.init_from, "float32", progress=True)
    with first_interrupt() as interrupted:
        trained = train_drafter(
            prepared.target, prepared.params, prepared.config, learnt,
            row_length=args.row_length, anchors=args.anchors, training=training,
            directory=work / "training", objective=train_objective(args),
            should_stop=lambda step: interrupted() or out_of_time(args.minutes, begin),
            backend=args.training_attention, start=start, evaluation=evaluation,
        )  # fmt: skip
    if jax.process_index():
        return
    if trained.step < args.steps:
        print(f"stopped at step {trained.step} of {args.steps}; the same command goes on")
        if interrupted():
            raise SystemExit(INTERRUPTED)
        return
    save_checkpoint(args.output, prepared.config, trained.params)
    report(args.output, trained.history)


def host_settings(args: Options, prepared: Prepared) -> dict[str, Any]:
    """What all hosts must have alike, or they would wait for answers and steps of one another."""
    options = {name: value for name, value in vars(args).items() if name not in OWN}
    read = repr((prepared.records, prepared.held)).encode()
    return options | {"prompts": hashlib.blake2b(read, digest_size=6).hexdigest()}


def out_of_time(minutes: float | None, begin: float) -> bool:
    return minutes is not None and time.monotonic() - begin > 60 * minutes


def report(output: Path, history: list[dict[str, Any]]) -> None:
    last = history[-1] if history else {}
    if not all(isinstance(last.get(name), float) for name in ("loss", "acceptance_length")):
        print(f"{output}: saved")  # the curve was removed from a finished training, or edited
        return
    text = f"loss {last['loss']:.3f}, acceptance length {last['acceptance_length']:.2f} in training"
    if "tau" in last:
        text += f"; τ {last['tau']:.2f} on prompts that it did not learn"
    print(f"{output}: {text}")
