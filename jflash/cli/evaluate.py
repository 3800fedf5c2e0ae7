"""evaluate: a data set through the engine, to a folder of answers and what they amount to."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jflash.cli.command import gpu_notice, require
from jflash.cli.generate import configured, that_draw
from jflash.cli.options.pair import drafter_name, sampling
from jflash.decoding import Decoding
from jflash.device import describe_device, device_name
from jflash.engine import STEPS_PER_CALL
from jflash.evals.datasets import (
    DATASETS,
    NEXT_EXAMPLE,
    REFERENCE_COUNT,
    REFERENCE_SHUFFLE,
    Problem,
    load_examples,
    load_problems,
)
from jflash.evals.evaluation import (
    Evaluation,
    answer_all,
    check_fits,
    digest,
    execute_all,
    longest_capacity,
    with_results,
)
from jflash.evals.folder import (
    check_settings,
    finished_answers,
    open_folder,
    read_answers,
)
from jflash.evals.plots import write_plots
from jflash.evals.report import table
from jflash.evals.summary import differences, summarise
from jflash.files import write_text
from jflash.io import (
    PairFiles,
    encode_prompt,
    load_weights,
)
from jflash.io.digest import checkpoint_digest
from jflash.memory import check_memory, device_memory
from jflash.programs import Shape

DIFFERENT = 1  # exit code: answers have other tokens than those of --same-as


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a command will do, checked before a weight is read."""

    dataset: str
    files: PairFiles
    evaluation: Evaluation
    settings: dict[str, Any]


def run(options: argparse.Namespace) -> None:
    name = options.dataset
    require("matplotlib", *["math_verify"] * (DATASETS[name].kind == "math"))
    if options.steps_per_call is None:
        options.steps_per_call = STEPS_PER_CALL
    todo = _prepare(options, name)
    folder = options.output or Path(f"evaluation-{name}")
    if not options.overwrite:
        check_settings(folder, todo.settings)
    others = finished_answers(options.same_as, todo.settings) if options.same_as else []
    notice = gpu_notice()
    if notice:
        print(notice, file=sys.stderr)
    _check_device(todo)
    with open_folder(folder, todo.settings, options.overwrite):
        _announce(folder, options.baseline)
        try:
            summary = _evaluate(todo, folder, options, others)
        except KeyboardInterrupt:
            print(f"\ninterrupted; the same command goes on from {folder}", file=sys.stderr)
            raise
    print(table(summary))
    print(f"\n{folder}: summary.json, answers.jsonl and pictures")
    if others and summary["same_as"]["identical_outputs"] < len(others):
        raise SystemExit(DIFFERENT)


def _problems(options: argparse.Namespace, name: str) -> list[Problem]:
    examples = []
    if options.few_shot:
        examples = load_examples(name, options.few_shot, options.few_shot_data)
    reference = options.reference_order
    return load_problems(
        name,
        options.data,
        style=options.prompt_style,
        examples=examples,
        shuffle=REFERENCE_SHUFFLE if reference else options.shuffle,
        limit=REFERENCE_COUNT if reference else options.limit,
    )


def _prepare(options: argparse.Namespace, name: str) -> Run:
    """Data, configs and tokenizer; ValueError for what the models cannot serve."""
    way = sampling(options)
    problems = _problems(options, name)
    files = configured(options, options.batch)
    tokenizer = files.target.tokenizer()
    decoding = Decoding(
        sampling=way,
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=files.target.stop_ids(tokenizer),
        seed=options.seed,
        oracle=options.oracle,
    )
    files = that_draw(files, [decoding], options.draft_rule)
    evaluation = Evaluation(
        problems=problems,
        encode=_encoder(options, tokenizer),
        tokenizer=tokenizer,
        decoding=decoding,
        batch_size=options.batch,
        steps_per_call=options.steps_per_call,
        ends=(NEXT_EXAMPLE,) if options.no_chat_template else (),
    )
    check_fits(evaluation, files.models)
    return Run(
        dataset=name,
        files=files,
        evaluation=evaluation,
        settings=_settings(options, name, files, evaluation),
    )


def _encoder(
    options: argparse.Namespace, tokenizer: Any
) -> Callable[[Sequence[tuple[str, str]], str], list[int]]:
    def encode(turns: Sequence[tuple[str, str]], text: str) -> list[int]:
        return encode_prompt(
            tokenizer,
            text,
            system=options.system,
            reasoning=options.reasoning == "on",
            chat_template=not options.no_chat_template,
            history=turns,
        )

    return encode


def _settings(
    options: argparse.Namespace, name: str, files: PairFiles, evaluation: Evaluation
) -> dict[str, Any]:
    """What decides about the answers and their times; runs of other settings do not mix."""
    same = (
        *("batch", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "oracle"),
        *("steps_per_call", "prompt_style", "few_shot", "system", "reasoning", "no_chat_template"),
    )
    return {
        "dataset": name,
        "target": options.target,
        "target_digest": checkpoint_digest(files.target.path),
        "drafter": drafter_name(options),
        "drafter_digest": _drafter_digest(files),
        "block_size": files.models.block_size,
        "verify_rows": files.models.rows,
        "dtype": files.dtype,
        "device": device_name(),
        "attention_backend": files.models.kernels.attention,
        "draft_rule": files.models.draft_rule,
        **{option: getattr(options, option) for option in same},
        "problems": len(evaluation.problems),
        "prompts": digest(evaluation),
    }


def _drafter_digest(files: PairFiles) -> str | None:
    """None without a drafter; of drawn weights the name says the seed."""
    if files.drafter is None:
        return None
    return checkpoint_digest(files.drafter.path, weights=files.drafter_seed is None)


def _check_device(run: Run) -> None:
    """ValueError if the largest shape takes more memory than the device has."""
    models = run.files.models
    capacity, context = longest_capacity(run.evaluation, models)
    shape = Shape.of(run.evaluation.batch_size, capacity)
    check_memory(models, shape, context, device_memory())


def _announce(folder: Path, baseline: bool) -> None:
    for name, what in (("answers", "answers"), ("baseline", "answers of plain decoding")):
        count = len(read_answers(folder / f"{name}.jsonl"))
        if count and (name == "answers" or baseline):
            print(f"resuming: {count} {what} are in {folder}", file=sys.stderr)


def _evaluate(
    run: Run, folder: Path, options: argparse.Namespace, others: list[dict[str, Any]]
) -> dict[str, Any]:
    pair = load_weights(run.files, progress=sys.stderr.isatty())
    width = pair.models.block_size
    answers = answer_all(pair, run.evaluation, folder / "answers.jsonl")
    baseline = None
    if options.baseline:
        baseline = answer_all(
            pair.plain(), run.evaluation, folder / "baseline.jsonl", turns_of=answers,
            room_for_width=width, name="plain decoding",
        )  # fmt: skip
    if options.execute:
        results = execute_all(run.dataset, run.evaluation, answers, folder / "executed.jsonl")
        answers = with_results(answers, results)
    summary = {
        "settings": run.settings,
        "environment": describe_device(),
        **summarise(answers, width, baseline, batch_size=options.batch),
    }
    if others:
        summary["same_as"] = {
            "folder": str(options.same_as),
            "answers": len(answers),
            **differences(answers, others, "other_token"),
        }
    write_text(folder / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    write_plots(folder, summary, f"{run.dataset}, {Path(options.target).name}, block {width}")
    return summary
