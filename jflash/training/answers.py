"""A target's answers to many prompts, from which a drafter learns.

Each answer goes to disk when it comes, so that a killed run loses only what was in flight.
"""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jflash.generate import Generation, Pair
from jflash.records.decoding import Decoding, are_whole
from jflash.serving.batch import Job, serve
from jflash.system.lines import appended, read_lines
from jflash.system.locks import locked
from jflash.training.recipe import WHOLE, Share


def answer_prompts(
    pair: Pair, prompts: Sequence[Sequence[int]], decoding: Decoding, *, batch_size: int
) -> list[Generation]:
    """Answers in the order of the prompts; ValueError for a prompt that does not fit."""
    if not prompts:
        raise ValueError("no prompts to answer")
    jobs = [Job(i, list(prompt), decoding) for i, prompt in enumerate(prompts)]
    served = serve(pair, jobs, batch_size=batch_size)
    bar = tqdm(served, total=len(jobs), desc="answers", unit="prompt")
    answers = {job.index: generation for job, generation in bar}
    return [answers[i] for i in range(len(prompts))]


def answer_into(
    folder: Path, name: str, pair: Pair, prompts: Sequence[Sequence[int]],
    decodings: Sequence[Decoding], *, batch_size: int, share: Share = WHOLE,
) -> list[list[int]] | None:  # fmt: skip
    """Answers to each prompt by each of `decodings`, written to `folder`/`name`.jsonl as they come.

    It continues from the lines of this share and of all others. The result has the order of the
    prompts, one prompt's answers side by side; a stop token that ended an answer is its last
    token. It is None while another share has answers to make. ValueError while another process
    makes the same share.
    """
    jobs = [
        Job(i * len(decodings) + k, list(prompt), decoding)
        for i, prompt in enumerate(prompts)
        for k, decoding in enumerate(decodings)
    ]
    suffix = f"-{share.index}-of-{share.of}" if share.of > 1 else ""
    file = folder / f"{name}{suffix}.jsonl"
    answers: dict[int, list[int]] = {}
    with locked(file, file):
        for made in sorted(folder.glob(f"{glob.escape(name)}*.jsonl")):
            answers |= read_answers(made)
        # More prompts may have been asked before.
        answers = {i: answer for i, answer in answers.items() if i < len(jobs)}
        if answers:
            print(f"{len(answers)} of {len(jobs)} answers were made before", flush=True)
        others = {j.index for j in jobs if j.index // len(decodings) % share.of != share.index}
        missing = len(jobs) - len(answers.keys() | others)
        served = serve(pair, jobs, batch_size=batch_size, answered=answers.keys() | others)
        with appended(file) as add, tqdm(total=missing, desc="answers") as bar:
            for job, generation in served:
                answers[job.index] = generation.token_ids
                add({"index": job.index, "answer_ids": generation.token_ids})
                bar.update()
    if len(answers) < len(jobs):
        return None
    return [answers[job.index] for job in jobs]


def read_answers(file: Path) -> dict[int, list[int]]:
    """Answers by index, without a last line that a kill cut short; ValueError for another line."""
    answers = {}
    for number, line in enumerate(read_lines(file), 1):
        if not _is_answer(line):
            raise ValueError(
                f"{file} line {number} is no answer: {str(line)[:60]}; the command that wrote the "
                "file makes a line anew that is removed"
            )
        answers[line["index"]] = line["answer_ids"]
    return answers


def _is_answer(line: Any) -> bool:
    """Whether a line has the number of a job and token ids, at least one."""
    if not isinstance(line, dict) or type(line.get("index")) is not int or line["index"] < 0:
        return False
    ids = line.get("answer_ids")
    return bool(ids) and are_whole(ids)
