"""evaluate: a data set through the engine, to a folder of answers, their summary and plots."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jflash.cli.command import Options, require
from jflash.cli.evaluation_run import Run, answers_folder, check_device, prepare
from jflash.cli.evaluation_shares import answers_of
from jflash.cli.jax_setup import note_idle_gpu
from jflash.cli.options.values import refuse
from jflash.evals.datasets import DATASETS
from jflash.evals.evaluation import execute_all, executed, with_results
from jflash.evals.folder import (
    check_asked,
    check_settings,
    finished_answers,
    join_parts,
    open_folder,
    read_answers,
    whole_baseline,
    whole_comparison,
)
from jflash.evals.plots import write_plots
from jflash.evals.report import table
from jflash.evals.summary import differences, summarise
from jflash.system.device import describe_device
from jflash.system.files import write_text
from jflash.system.hosts import Hosts, joined
from jflash.system.replicas import cluster

DIFFERENT = 1  # exit code: answers have other tokens than those of --same-as


def run(options: Options) -> int:
    name = options.dataset
    require("matplotlib", *["math_verify"] * (DATASETS[name].kind == "math"))
    if options.replicas is not None:
        require("ray")
        with cluster(options.ray_address, options.replicas, options.tensor_parallel):
            # From here on: the replicas, which Ray starts, take memory as the options say.
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            return _of_host(options, Hosts())
    with joined(options.coordinator, options.num_hosts, options.host_index) as hosts:
        return _of_host(options, hosts)


def _of_host(options: Options, hosts: Hosts) -> int:
    todo = prepare(options, hosts.count)
    hosts.agree(todo.settings | {"baseline": options.baseline})
    if hosts.index:
        note_idle_gpu()
        check_device(todo)
        with tempfile.TemporaryDirectory() as folder:
            answers_of(todo, Path(folder), options, hosts)
        return 0
    folder, other = answers_folder(options), options.same_as
    if not options.overwrite:
        itself = other is not None and other.resolve() == folder.resolve()
        refuse(itself, f"--same-as {other} is the --output: answers are always like themselves")
        check_settings(folder, todo.settings)
    others = [] if other is None else finished_answers(other, todo.settings)
    note_idle_gpu()
    check_device(todo)
    with open_folder(folder, todo.settings, options.overwrite):
        join_parts(folder)  # of replicas of a run that was killed
        check_asked(folder, {p.index: len(p.turns) for p in todo.evaluation.problems})
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


def _announce(folder: Path, baseline: bool) -> None:
    for name, what in (("answers", "answers"), ("baseline", "answers of plain decoding")):
        count = len(read_answers(folder / f"{name}.jsonl"))
        if count and (name == "answers" or baseline):
            print(f"resuming: {count} {what} are in {folder}", file=sys.stderr)


def _evaluate(
    run: Run, folder: Path, options: Options, others: list[dict[str, Any]], hosts: Hosts
) -> dict[str, Any]:
    width, problems = run.files.models.block_size, run.evaluation.problems
    # What an earlier run was asked for stays in the summary.
    earlier = whole_comparison(folder)
    answers, baseline = answers_of(run, folder, options, hosts)
    baseline = whole_baseline(folder, answers) if baseline is None else baseline
    results_of = execute_all if options.execute else executed
    results = results_of(options.dataset, problems, answers, folder / "executed.jsonl")
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
    elif earlier is not None:
        summary["same_as"] = earlier
    text = json.dumps(summary, indent=1, allow_nan=False)
    write_text(folder / "summary.json", text + "\n")
    write_plots(folder, summary, f"{options.dataset}, {Path(options.target).name}, block {width}")
    return summary
