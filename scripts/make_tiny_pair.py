"""Makes the embedded pair from nothing: tokenizer, target, the target's answers, drafter.

python scripts/make_tiny_pair.py --output tiny-math [--stage target] [--minutes 9] [--smoke]
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from jflash.cli.command import Parser, run_command
from tiny_pair.recipe import Recipe, full_recipe, smoke_recipe
from tiny_pair.stages import STAGES, Gsm8k, Workplace, make_stage


def make_parser() -> Parser:
    parser = Parser("make_tiny_pair.py", (__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for target/ and drafter/")
    add("--work", type=Path, help="folder for everything else (default: OUTPUT-work)")
    add("--stage", choices=STAGES, help="only this stage (default: all that are missing)")
    add("--smoke", action="store_true", help="tiny sizes and few steps: does it run?")
    add("--minutes", type=float, help="stop training after as long, to be resumed by the next call")
    add("--gsm8k-train", type=Path, help="GSM8K's train.jsonl, to learn from as well")
    add("--gsm8k-test", type=Path, help="GSM8K's test.jsonl, to clean the former of")
    add("--problems", type=int, help="made-up problems for the target")
    add("--answers", type=int, help="made-up prompts that the target answers for the drafter")
    add("--answer-batch", type=int)
    add("--anchors", type=int, help="blocks drawn from a row, each time anew")
    for model in ("target", "drafter"):
        add(f"--{model}-steps", type=int)
        add(f"--{model}-batch", type=int, help="rows a step")
        add(f"--{model}-learning-rate", type=float)
        add(f"--{model}-seed", type=int)
    return parser


def chosen_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with what the command line says otherwise."""
    recipe = smoke_recipe() if args.smoke else full_recipe()
    for model in ("target", "drafter"):
        name = f"{model}_training"
        changes = {
            "steps": getattr(args, f"{model}_steps"),
            "batch_size": getattr(args, f"{model}_batch"),
            "learning_rate": getattr(args, f"{model}_learning_rate"),
            "seed": getattr(args, f"{model}_seed"),
        }
        given = {key: value for key, value in changes.items() if value is not None}
        recipe = replace(recipe, **{name: replace(getattr(recipe, name), **given)})
    changes = {
        key: getattr(args, key) for key in ("problems", "answers", "answer_batch", "anchors")
    }
    return replace(recipe, **{key: value for key, value in changes.items() if value is not None})


def make(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    if args.gsm8k_train and not args.gsm8k_test:
        raise ValueError("--gsm8k-train needs --gsm8k-test, to be cleaned of what they share")
    gsm8k = Gsm8k(args.gsm8k_train, args.gsm8k_test) if args.gsm8k_train else None
    work = args.work or args.output.with_name(args.output.name + "-work")
    place, recipe = Workplace(args.output, work), chosen_recipe(args)

    def should_stop(step: int) -> bool:
        return args.minutes is not None and time.monotonic() - begin > 60 * args.minutes

    for stage in [args.stage] if args.stage else STAGES:
        start = time.monotonic()
        if not make_stage(stage, recipe, place, gsm8k, should_stop):
            print(f"{stage}: stopped after {args.minutes} minutes; the same command goes on")
            return
        print(f"{stage}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), make, None))
