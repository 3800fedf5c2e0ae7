"""Answers problems through the engine, and checks and writes every answer as it comes.

An answer on disk is not decoded again. This file knows no options, tables or pictures.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from jflash.acceptance import ending
from jflash.checks import check_request
from jflash.compiled.shape import Shape
from jflash.evals.answer_check import check_answer, load
from jflash.evals.code_execution import passes, program
from jflash.evals.datasets import Problem
from jflash.evals.folder import read_answers
from jflash.evals.record import PARTS
from jflash.evals.summary import Record
from jflash.generate import Generation, Pair
from jflash.io.text import before_stop
from jflash.pair import Models
from jflash.records.decoding import Decoding
from jflash.server.reasoning import CLOSE
from jflash.serving.batch import Job, layout_for, serve
from jflash.serving.calls.pass_sizes import pass_rows
from jflash.system.lines import appended, read_lines

Turns = Sequence[tuple[str, str]]  # a user's text and the model's answer to it
TURN = 1_000_000  # a job's index is its problem's, plus this for every turn before


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The problems of a run, and how they are decoded.

    `encode(turns, text)` gives the token ids of a conversation whose next user turn is `text`, and
    `decode` the text of an answer's token ids. Only the part of an answer before the first of
    `ends` is checked.
    """

    problems: Sequence[Problem]
    encode: Callable[[Turns, str], list[int]]
    decode: Callable[[Sequence[int]], str]
    decoding: Decoding
    batch_size: int
    steps_per_call: int
    ends: Sequence[str] = ()

    @property
    def turns(self) -> int:
        return max(len(problem.turns) for problem in self.problems)


def first_jobs(evaluation: Evaluation) -> list[Job]:
    return _jobs(evaluation, 0, {}, None)


def check_fits(evaluation: Evaluation, models: Models) -> None:
    """ValueError for a prompt, or a conversation with answers of full length, that does not fit."""
    new = evaluation.decoding.max_new_tokens
    for problem in evaluation.problems:
        turns: list[tuple[str, str]] = []
        try:
            for i, text in enumerate(problem.turns):
                prompt = evaluation.encode(turns, text)
                longest = prompt + prompt[-1:] * (i * new)  # with the unknown answers before
                check_request(models, longest, evaluation.decoding)
                turns.append((text, ""))
        except ValueError as error:
            raise ValueError(f"problem {problem.index}: {error}") from None


def largest_shape(evaluation: Evaluation, models: Models) -> tuple[Shape, int]:
    """The shape whose pages hold the longest texts, with the rows of the largest pass as its chunk,
    and the longest prompt with what may follow."""
    new = evaluation.turns * evaluation.decoding.max_new_tokens
    decoding = replace(evaluation.decoding, max_new_tokens=new)
    jobs = [job._replace(decoding=decoding) for job in first_jobs(evaluation)]
    layout = layout_for(models, jobs, evaluation.batch_size)
    shape = layout.shape._replace(chunk=pass_rows(models, layout))
    return shape, max(job.tokens for job in jobs)


def digest(evaluation: Evaluation) -> str:
    """A digest of the prompts and right answers: another template, file or order is another run."""
    prompts = [
        (problem.index, problem.gold, problem.turns, job.prompt_ids)
        for problem, job in zip(evaluation.problems, first_jobs(evaluation), strict=True)
    ]
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def answer_all(
    pair: Pair,
    evaluation: Evaluation,
    file: Path,
    *,
    turns_of: Sequence[Record] | None = None,
    known: Sequence[Record] = (),
    name: str = "answers",
) -> list[Record]:
    """Answers to all problems, including the `known` ones and those that `file` holds; in no order.

    Later turns follow the answers of `turns_of` instead of this run's, so that a baseline gets the
    very same prompts.
    """
    records = [*known, *read_answers(file)]
    total = sum(len(problem.turns) for problem in evaluation.problems)
    bar = tqdm(total=total, initial=len(records), desc=name, unit="answer", file=sys.stderr)
    running = _Running(records)
    if any(problem.gold is not None for problem in evaluation.problems):
        load()
    with bar, appended(file) as add:
        for turn in range(evaluation.turns):
            before = records if turns_of is None else turns_of
            texts = {(record["index"], record["turn"]): record["text"] for record in before}
            answered = {r["index"] + turn * TURN for r in records if r["turn"] == turn}
            problems = {problem.index + turn * TURN: problem for problem in evaluation.problems}
            served = serve(
                pair, _jobs(evaluation, turn, texts, pair.models), answered=answered,
                batch_size=evaluation.batch_size, steps_per_call=evaluation.steps_per_call,
            )  # fmt: skip
            for job, generation in served:
                record = _record(problems[job.index], turn, generation, evaluation)
                add(record)
                records.append(record)
                running.add(record)
                bar.set_postfix_str(str(running), refresh=False)
                bar.update()
    return records


def execute_all(
    dataset: str, problems: Sequence[Problem], answers: Sequence[Record], file: Path
) -> dict[int, str]:
    """Runs the answers' programs with their tests, each once; results by problem."""
    sources = _programs(dataset, problems, answers)
    results = _results(file, sources)
    todo = [index for index in sources if index not in results]
    with appended(file) as add:
        for index in tqdm(todo, desc="running programs", unit="program", file=sys.stderr):
            results[index] = passes(sources[index])
            add({"index": index, "program": _of(sources[index]), "result": results[index]})
    return results


def executed(
    dataset: str, problems: Sequence[Problem], answers: Sequence[Record], file: Path
) -> dict[int, str]:
    """The results of these answers' programs that ran, by problem; none without a file.

    ValueError for a line that is no result.
    """
    if not file.exists():  # as for data sets without programs
        return {}
    return _results(file, _programs(dataset, problems, answers))


def _programs(
    dataset: str, problems: Sequence[Problem], answers: Sequence[Record]
) -> dict[int, str]:
    records = {problem.index: problem.record for problem in problems}
    said_to = {answer["index"]: said(answer["text"]) for answer in answers}
    return {index: program(dataset, records[index], text) for index, text in said_to.items()}


def _of(source: str) -> str:
    """A digest that ties a result to its program: another answer to the problem is another one."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _results(file: Path, sources: dict[int, str]) -> dict[int, str]:
    """What `file` says of these programs; its lines about others, which it tells, do not count."""
    results, others = dict[int, str](), 0
    digests = {index: _of(source) for index, source in sources.items()}
    for number, record in enumerate(read_lines(file), 1):
        try:
            index, result, digest = record["index"], record["result"], record.get("program")
            known = digests.get(index) == digest
        except (AttributeError, KeyError, TypeError):
            problem = f"{file} line {number} is no program's result"
            raise ValueError(f"{problem}: remove the file, and pass --execute") from None
        if known:
            results[index] = result
        others += not known
    if others:
        lines = f"{others} results" if others > 1 else "1 result"
        print(f"{file} has {lines} of programs that are not this run's", file=sys.stderr)
    return results


def with_results(answers: Sequence[Record], results: dict[int, str]) -> list[Record]:
    """The records, each checked by its program's result; as it was where no program ran."""
    checks = {n: {"rule": result, "correct": result == "passed"} for n, result in results.items()}
    return [r | {"check": checks.get(r["index"], r["check"])} for r in answers]


def said(text: str) -> str:
    """An answer after its thoughts, which hold other numbers and programs than it."""
    return text.rpartition(CLOSE)[2]


def _jobs(
    evaluation: Evaluation, turn: int, texts: dict[tuple[int, int], str], models: Models | None
) -> list[Job]:
    """The jobs of a turn, after the `texts` of the answers to the turns before."""
    jobs = []
    for problem in evaluation.problems:
        if len(problem.turns) <= turn:
            continue
        before = [(problem.turns[t], texts[problem.index, t]) for t in range(turn)]
        prompt = evaluation.encode(before, problem.turns[turn])
        new = evaluation.decoding.max_new_tokens
        if models is not None and turn:
            # A broken character is one token when it is generated and may be three when read.
            positions = models.target.config.max_position_embeddings
            new = max(1, min(new, positions - len(prompt)))
        decoding = replace(evaluation.decoding, max_new_tokens=new)
        jobs.append(Job(problem.index + turn * TURN, prompt, decoding))
    return jobs


def _record(problem: Problem, turn: int, generation: Generation, evaluation: Evaluation) -> Record:
    """An answer as a line of JSON: its text, how it was decoded, whether it is right."""
    text = evaluation.decode(generation.token_ids)
    check = None
    if problem.gold is not None:
        checked = check_answer(before_stop(said(text), evaluation.ends), problem.gold)
        check = checked._asdict() | {"gold": problem.gold}
    return {
        "index": problem.index,
        "turn": turn,
        "check": check,
        "text": text,
        "prompt_tokens": generation.prompt_tokens,
        "token_ids": generation.token_ids,
        "acceptance_lengths": generation.acceptance_lengths,
        "finish_reason": generation.finish_reason,
        "ending": ending(generation),
        # Since the answer before this one, by all slots together.
        "seconds": {part: getattr(generation.seconds, part) for part in PARTS},
    }


class _Running:
    """Accuracy, τ and tokens a second so far, of sums: an answer costs the same late as early."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._steps = self._tokens = self._judged = self._right = 0
        self._seconds = 0.0
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        self._steps += len(record["acceptance_lengths"])
        self._tokens += sum(record["acceptance_lengths"])
        self._seconds += record["seconds"]["decode"]
        if record["check"] is not None:
            self._judged += 1
            self._right += record["check"]["correct"]

    def __str__(self) -> str:
        parts = [f"right {self._right / self._judged:.1%}"] if self._judged else []
        parts += [f"τ {self._tokens / self._steps:.2f}"] if self._steps else []
        parts += [f"{self._tokens / self._seconds:.0f} tokens/s"] if self._seconds else []
        return ", ".join(parts)
