"""Who makes an evaluation's answers: this process, the hosts of a run, or replicas on Ray."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jflash.cli.command import Options
from jflash.cli.evaluation_run import Run, answers_folder, check_device, prepare
from jflash.cli.generate import loaded
from jflash.cli.jax_setup import configure_jax
from jflash.cli.options.values import refuse
from jflash.evals.datasets import Problem
from jflash.evals.evaluation import answer_all
from jflash.evals.folder import join_parts, part_file, read_answers
from jflash.evals.summary import Record
from jflash.system.hosts import Hosts
from jflash.system.lines import appended
from jflash.system.locks import locked
from jflash.system.replicas import made


def answers_of(
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

    ValueError if a replica's settings are not this run's.
    """
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
    run, folder = prepare(options, 1), answers_folder(options)
    check_device(run)
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
