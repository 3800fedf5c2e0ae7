"""evaluate: a data set through the engine, to a folder of answers, their summary and plots."""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jflash.cli.command import Options, configure_jax, note_idle_gpu, require
from jflash.cli.generate import configured, loaded, with_sampling
from jflash.cli.options.pair import drafter_name, sampling
from jflash.cli.options.values import refuse
from jflash.cli.prompts import template_options
from jflash.decoding import Decoding
from jflash.device import describe_device, device_name
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
    join_parts,
    open_folder,
    part_file,
    read_answers,
)
from jflash.evals.plots import write_plots
from jflash.evals.report import table
from jflash.evals.summary import Record, differences, summarise
from jflash.files import appended, locked, write_text
from jflash.hosts import Hosts, joined
from jflash.io import PairFiles, encode_prompt
from jflash.io.digest import checkpoint_digest
from jflash.memory import check_memory, device_memory
from jflash.programs import Shape
from jflash.replicas import cluster, made
from jflash.serving.engine import STEPS_PER_CALL

DIFFERENT = 1  # exit code: answers have other tokens than those of --same-as
# Options that decide about the answers and their times.
SETTINGS = (
    *("batch", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "oracle"),
    *("steps_per_call", "prompt_style", "few_shot", "system", "reasoning", "no_chat_template"),
)


class Run(NamedTuple):
    """A run of the command, checked before a weight is read."""

    files: PairFiles
    evaluation: Evaluation
    settings: dict[str, Any]


def run(options: Options) -> int:
    name = options.dataset
    require("matplotlib", *["math_verify"] * (DATASETS[name].kind == "math"))
    if options.steps_per_call is None:
        options.steps_per_call = STEPS_PER_CALL
    if options.replicas is not None:
        require("ray")
        with cluster(options.ray_address, options.replicas):
            # From here on: the replicas, which Ray starts, take memory as the options say.
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            return _of_host(options, Hosts())
    with joined(options.coordinator, options.num_hosts, options.host_index) as hosts:
        return _of_host(options, hosts)


def _of_host(options: Options, hosts: Hosts) -> int:
    todo = _prepare(options, hosts.count)
    if hosts.index:
        note_idle_gpu()
        _check_device(todo)
        with tempfile.TemporaryDirectory() as folder:
            _answers(todo, Path(folder), options, hosts)
        return 0
    folder = _folder(options)
    if not options.overwrite:
        check_settings(folder, todo.settings)
    others = finished_answers(options.same_as, todo.settings) if options.same_as else []
    note_idle_gpu()
    _check_device(todo)
    with open_folder(folder, todo.settings, options.overwrite):
        _announce(folder, options.baseline)
        try:
            summary = _evaluate(todo, folder, options, others, hosts)
        except KeyboardInterrupt:
            print(f"\ninterrupted; the same command goes on from {folder}", file=sys.stderr)
            raise
    print(table(summary))
    for name, count in (("host", hosts.count), ("replica", options.replicas or 1)):
        if count > 1:
            print(f"\nspeeds are one {name}'s: the seconds of {count} {name}s are added up")
    print(f"\n{folder}: summary.json, answers.jsonl and pictures")
    different = others and summary["same_as"]["identical_outputs"] < len(others)
    return DIFFERENT if different else 0


def _folder(options: Options) -> Path:
    return options.output or Path(f"evaluation-{options.dataset}")


def _problems(o: Options) -> list[Problem]:
    examples = load_examples(o.dataset, o.few_shot, o.few_shot_data) if o.few_shot else []
    shuffle, limit = o.shuffle, o.limit
    if o.reference_order:
        shuffle, limit = REFERENCE_SHUFFLE, REFERENCE_COUNT
    return load_problems(
        o.dataset, o.data, style=o.prompt_style, examples=examples, shuffle=shuffle, limit=limit
    )


def _prepare(options: Options, hosts: int) -> Run:
    """Data, configs and tokenizer; ValueError for what the models cannot serve."""
    draws = sampling(options)
    problems = _problems(options)
    for name, sharing in (("--num-hosts", hosts), ("--replicas", options.replicas or 1)):
        few = f"{name} {sharing}: there are only {len(problems)} problems to share"
        refuse(sharing > len(problems) > 0, few)
    files = configured(options, options.batch)
    tokenizer = files.target.tokenizer()
    decoding = Decoding(
        sampling=draws,
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=files.target.stop_ids(tokenizer),
        seed=options.seed,
        oracle=options.oracle,
    )
    files = with_sampling(files, [decoding], options.draft_rule)

    def encode(turns: Sequence[tuple[str, str]], text: str) -> list[int]:
        return encode_prompt(tokenizer, text, history=turns, **template_options(options))

    evaluation = Evaluation(
        problems=problems,
        encode=encode,
        tokenizer=tokenizer,
        decoding=decoding,
        batch_size=options.batch,
        steps_per_call=options.steps_per_call,
        ends=(NEXT_EXAMPLE,) if options.no_chat_template else (),
    )
    check_fits(evaluation, files.models)
    settings = _settings(options, files, evaluation)
    # One host's settings are those of older runs, which go on.
    return Run(files, evaluation, settings | ({"hosts": hosts} if hosts > 1 else {}))


def _settings(options: Options, files: PairFiles, evaluation: Evaluation) -> dict[str, Any]:
    """The identity of a run: the runs of other settings do not mix with it."""
    return {
        "dataset": options.dataset,
        "target": options.target,
        "target_digest": checkpoint_digest(files.target.path),
        "drafter": drafter_name(options),
        "drafter_digest": _drafter_digest(files),
        "block_size": files.models.block_size,
        "verify_rows": files.models.rows,
        "dtype": files.dtype,
        **({"drafter_dtype": options.drafter_dtype} if options.drafter_dtype else {}),
        "device": device_name(),
        "attention_backend": files.models.kernels.attention,
        "draft_rule": files.models.draft_rule,
        **{option: getattr(options, option) for option in SETTINGS},
        "problems": len(evaluation.problems),
        "prompts": digest(evaluation),
    }


def _drafter_digest(files: PairFiles) -> str | None:
    """None without a drafter; the name of random weights holds their seed."""
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


def _answers(
    run: Run, folder: Path, options: Options, hosts: Hosts
) -> tuple[list[Record], list[Record] | None]:
    """Answers, and plain decoding's if wanted: those of all hosts on host 0, in `folder`."""
    problems = run.evaluation.problems
    if options.replicas is not None:
        kinds = _by_replicas(run, folder, options)
    else:
        kinds = _share(run, hosts.share(len(problems)), options, lambda name: folder / name)
        if hosts.count > 1:
            _bring(kinds, problems, folder, hosts)
    return kinds["answers"], kinds.get("baseline")


def _share(
    run: Run, numbers: range, options: Options, place: Callable[[str], Path],
    known: Callable[[str], list[Record]] = lambda name: [],
) -> dict[str, list[Record]]:  # fmt: skip
    """The answers to some of the problems, by kind; `known` ones are not decoded again."""
    pair = loaded(run.files, sys.stderr.isatty())
    own = replace(run.evaluation, problems=[run.evaluation.problems[n] for n in numbers])
    name = "answers.jsonl"
    answers = answer_all(pair, own, place(name), known=known(name))
    if not options.baseline:
        return {"answers": answers}
    name = "baseline.jsonl"
    baseline = answer_all(
        pair.plain(), own, place(name), known=known(name), turns_of=answers, name="plain decoding"
    )
    return {"answers": answers, "baseline": baseline}


def _by_replicas(run: Run, folder: Path, options: Options) -> dict[str, list[Record]]:
    """The answers of all replicas, which are joined in the files of `folder`, sorted.

    A run that was killed left parts there. ValueError if a replica's settings are not this run's.
    """
    join_parts(folder)
    try:
        found = made(functools.partial(_part, options), options.replicas, options.tensor_parallel)
    finally:
        join_parts(folder)
    for name, value in run.settings.items():
        for other in found:
            why = f"the replicas have {name} {other[name]!r}, this process has {value!r}"
            refuse(other[name] != value, f"{why}: run the command where a replica could run")
    kinds = ["answers"] + ["baseline"] * options.baseline
    return {kind: read_answers(folder / f"{kind}.jsonl") for kind in kinds}


def _part(options: Options, index: int, of: int) -> dict[str, Any]:
    """Makes replica `index`'s answers, and returns the settings that it had."""
    configure_jax(options)
    run, folder = _prepare(options, 1), _folder(options)
    _check_device(run)
    numbers = range(index, len(run.evaluation.problems), of)
    own = {run.evaluation.problems[number].index for number in numbers}

    def known(name: str) -> list[Record]:
        return [record for record in read_answers(folder / name) if record["index"] in own]

    def place(name: str) -> Path:
        return part_file(folder / name, index, of)

    with locked(place("answers.jsonl"), folder):  # of a killed run's replica that still writes
        _share(run, numbers, options, place, known)
    return run.settings


def _bring(
    kinds: dict[str, list[Record]], problems: Sequence[Problem], folder: Path, hosts: Hosts
) -> None:
    """Adds the other hosts' records to host 0's, and to its files."""
    own = {
        number: json.dumps(
            {
                kind: [record for record in records if record["index"] == problems[number].index]
                for kind, records in kinds.items()
            }
        )
        for number in hosts.share(len(problems))
    }
    texts = hosts.gathered(own, len(problems))
    if texts is None:
        return
    for kind, records in kinds.items():
        there = {(record["index"], record["turn"]) for record in records}
        with appended(folder / f"{kind}.jsonl") as add:
            for text in texts:
                for record in json.loads(text)[kind]:
                    if (record["index"], record["turn"]) not in there:
                        add(record)
                        records.append(record)


def _evaluate(
    run: Run, folder: Path, options: Options, others: list[dict[str, Any]], hosts: Hosts
) -> dict[str, Any]:
    width, problems = run.files.models.block_size, run.evaluation.problems
    answers, baseline = _answers(run, folder, options, hosts)
    if options.execute:
        results = execute_all(options.dataset, problems, answers, folder / "executed.jsonl")
        answers = with_results(answers, results)
    summary = {
        "settings": run.settings,
        "environment": describe_device(),
        **summarise(answers, width, baseline, batch_size=options.batch),
    }
    if others:
        compared = differences(answers, others, "other_token")
        of = {"folder": str(options.same_as), "answers": len(answers)}
        summary["same_as"] = of | compared
    text = json.dumps(summary, indent=1, allow_nan=False)
    write_text(folder / "summary.json", text + "\n")
    write_plots(folder, summary, f"{options.dataset}, {Path(options.target).name}, block {width}")
    return summary
