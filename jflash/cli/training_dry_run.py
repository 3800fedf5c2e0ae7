"""A dry run of train: what the training and its answers would take of memory and time."""

import time

from jflash.cli.command import Options
from jflash.cli.options.train import answer_samplings, train_objective
from jflash.cli.training_run import Prepared
from jflash.records.decoding import Decoding
from jflash.training.answers import answer_prompts
from jflash.training.data import random_rows
from jflash.training.drafter import make_lesson
from jflash.training.recipe import TrainConfig
from jflash.training.trainer import plan_training

MEASURED_TOKENS = 32  # of each answer


def dry_run(args: Options, training: TrainConfig, prepared: Prepared) -> None:
    """Prints memory and time of the training, on made-up rows, and of the answers."""
    config, records, objective = prepared.config, prepared.records, train_objective(args)
    rows = random_rows(args.batch, args.row_length, config.vocab_size)
    lesson = make_lesson(
        prepared.target, config, rows, anchors=args.anchors, training=training,
        objective=objective, backend=args.training_attention,
    )  # fmt: skip
    plan = plan_training(lesson.loss, lesson.start, prepared.whole().params, rows, training)
    print(f"attention of the training: {lesson.identity['attention']}; objective: {objective}")
    print("\n".join(plan))
    tokens = min(MEASURED_TOKENS, args.max_new_tokens)
    few = ([r.prompt_ids for r in records] * args.answer_batch)[: args.answer_batch]
    for _ in range(2):  # the first call compiles
        begin = time.perf_counter()
        decoding = Decoding(max_new_tokens=tokens)
        answer_prompts(prepared.pair, few, decoding, batch_size=args.answer_batch)
        seconds = time.perf_counter() - begin
    total = len(answer_samplings(args)) * sum(not r.answer_ids for r in records)
    at_most = total * args.max_new_tokens * seconds / (len(few) * tokens)
    print(
        f"answers: {total} of at most {args.max_new_tokens} tokens: at most {at_most / 60:.1f} "
        f"minutes at {len(few) * tokens / seconds:.0f} tokens a second, prefill included"
    )
