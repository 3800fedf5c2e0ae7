"""The folder of an evaluation: its settings, a line for every answer as it comes, the results.

Lines are flushed one by one, so a killed run resumes from what is there. This file knows neither
models nor data sets.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jflash.evals.record import missing
from jflash.system.files import make_folder, write_json, write_text
from jflash.system.lines import read_lines
from jflash.system.locks import locked

SETTINGS, LOCK = "run.json", "run.lock"
LINES = ("answers.jsonl", "baseline.jsonl", "executed.jsonl")
PARTS = "*-of-*.jsonl"  # the lines of replicas that run, or of a run that was killed
ALIKE = (  # what tokens may depend on; the drafter is not among them
    *("dataset", "target", "target_digest", "prompts", "problems", "max_new_tokens"),
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("batch", "block_size", "dtype", "device", "attention_backend"),
)
RESULTS = ("summary.json", "histogram.png", "position.png", "progress.png")


@contextlib.contextmanager
def open_folder(folder: Path, settings: dict[str, Any], overwrite: bool) -> Iterator[None]:
    """Makes or reopens the folder of a run with these settings, and locks it for the block.

    ValueError if another process holds the folder, and by name for a run with other settings;
    `overwrite` removes that run.
    """
    file = folder / SETTINGS
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the results")
    make_folder(folder)
    with locked(folder / LOCK, folder):
        if overwrite:
            for name in (SETTINGS, *LINES, *RESULTS):
                (folder / name).unlink(missing_ok=True)
            for part in folder.glob(PARTS):
                part.unlink()
        check_settings(folder, settings)
        if not file.exists():
            write_json(file, settings)
        yield


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """ValueError if the folder holds a run of other settings, which it names."""
    file = folder / SETTINGS
    if not file.exists():
        if any((folder / name).exists() for name in LINES):
            raise ValueError(f"{folder} holds answers without a {SETTINGS}: give another folder")
        return
    there = _object(file)
    wanted = json.loads(json.dumps(settings))
    advice = "give another --output, or --overwrite"
    _check_same(folder, there, wanted, [*wanted, *there], advice)


def _object(file: Path) -> dict[str, Any]:
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(there, dict):
        raise ValueError(f"{file} is no JSON object: give another folder")
    return there


def _check_same(
    folder: Path, there: dict[str, Any], wanted: dict[str, Any], names: Iterable[str], advice: str
) -> None:
    for name in names:
        if there.get(name) != wanted.get(name):
            raise ValueError(
                f"{folder} holds a run with {name} {there.get(name)!r}, this one has "
                f"{wanted.get(name)!r}: {advice}"
            )


def finished_answers(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a finished run that must have the tokens of a run with these settings.

    ValueError, by name, if there is none, or one of other prompts, limits, draws or programs, or
    one whose draws depend on its drafter.
    """
    if not (folder / SETTINGS).is_file() or not (folder / "summary.json").is_file():
        raise ValueError(f"{folder} holds no finished run: there is no {SETTINGS} or summary.json")
    there = _object(folder / SETTINGS)
    _check_same(folder, there, settings, ALIKE, "their answers need not be the same")
    rules = {there.get("draft_rule"), settings["draft_rule"]}
    if settings["temperature"] and rules != {"greedy"}:
        raise ValueError(
            "drafts drawn from q decide which tokens are drawn: above temperature 0 runs compare "
            "only under --draft-rule greedy"
        )
    summary = _object(folder / "summary.json")
    answers = read_answers(folder / "answers.jsonl")
    try:
        expected = summary["acceptance"]["all"]["prompts"]
    except (KeyError, TypeError):
        why = "does not say how many answers there are"
        raise ValueError(f"{folder / 'summary.json'} {why}: run that command again") from None
    if len(answers) != expected:
        raise ValueError(
            f"{folder / 'answers.jsonl'} has {len(answers)} answers, its summary {expected}: "
            "run that command again"
        )
    return answers


def part_file(file: Path, index: int, of: int) -> Path:
    """Where replica `index` of `of` writes its lines of a file."""
    return file.with_stem(f"{file.stem}-{index}-of-{of}")


def join_parts(folder: Path) -> None:
    """Puts the answers of replicas into the files of a run, sorted."""
    for name in LINES:
        file = folder / name
        parts = sorted(folder.glob(f"{file.stem}-*-of-*.jsonl"))
        if parts:
            answers = _once([file, *parts])
            ordered = sorted(answers, key=lambda record: (record["index"], record["turn"]))
            write_text(file, "".join(json.dumps(record) + "\n" for record in ordered))
        for part in parts:
            part.unlink()


def read_answers(file: Path) -> list[dict[str, Any]]:
    """The answers of a file, each (index, turn) once: the first of equal ones counts.

    ValueError, by the problem, if two answers to it have different tokens, and for a line that is
    no answer.
    """
    return _once([file])


def check_asked(folder: Path, turns: Mapping[int, int]) -> None:
    """ValueError for an answer to a problem or a turn that is none of these: it would be counted.

    `turns` has the number of each problem's.
    """
    for file in (folder / name for name in LINES[:2]):
        for record in read_answers(file):
            index, turn = record["index"], record["turn"]
            if not 0 <= turn < turns.get(index, 0):
                raise ValueError(
                    f"{file} has an answer to problem {index}, turn {turn}, which this run does "
                    "not ask: remove that line, or give another --output, or --overwrite"
                )


def whole_baseline(folder: Path, answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Plain decoding's answers in a run's folder, if there is one to each of these prompts."""
    plain = read_answers(folder / "baseline.jsonl")
    ours, theirs = ({(r["index"], r["turn"]) for r in records} for records in (answers, plain))
    return plain if ours == theirs else None


def whole_comparison(folder: Path) -> dict[str, Any] | None:
    """What a run's summary says of its answers and another run's, if all of them lie there still.

    None too for a summary that something damaged, as the next one replaces it.
    """
    try:
        found = _object(folder / "summary.json").get("same_as")
    except (OSError, ValueError):
        return None
    answers = len(read_answers(folder / "answers.jsonl"))
    return found if isinstance(found, dict) and found.get("answers") == answers else None


def _once(files: Sequence[Path]) -> list[dict[str, Any]]:
    answers: dict[tuple[int, int], dict[str, Any]] = {}
    lines = ((file, number, r) for file in files for number, r in enumerate(read_lines(file), 1))
    for file, number, record in lines:
        if (lacking := missing(record)) is not None:
            raise ValueError(
                f"{file} line {number} is no answer, {lacking} is missing or of another kind: "
                "the command that wrote the file makes a line anew that is removed"
            )
        first = answers.setdefault((record["index"], record["turn"]), record)
        if first["token_ids"] != record["token_ids"]:
            raise ValueError(
                f"{file} has two different answers to problem {record['index']}, turn "
                f"{record['turn']}: give another --output, or --overwrite"
            )
    return list(answers.values())
