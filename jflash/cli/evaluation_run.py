"""The run that evaluate's options ask for: problems, configs and settings, before any weight."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jflash.cli.command import Options
from jflash.cli.generate import configured, with_sampling
from jflash.cli.options.pair import drafter_name, sampling
from jflash.cli.options.values import refuse
from jflash.cli.prompts import template_options
from jflash.evals.datasets import (
    NEXT_EXAMPLE,
    REFERENCE_COUNT,
    REFERENCE_SHUFFLE,
    Problem,
    load_examples,
    load_problems,
)
from jflash.evals.evaluation import Evaluation, check_fits, digest, largest_shape
from jflash.io import PairFiles, encode_prompt
from jflash.io.digest import checkpoint_digest
from jflash.io.harmony import answer_text
from jflash.io.text import decode
from jflash.memory import check_memory
from jflash.records.decoding import Decoding
from jflash.serving.calls.layout import steps_of_call
from jflash.system.device import device_memory, device_name

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


def answers_folder(options: Options) -> Path:
    return options.output or Path(f"evaluation-{options.dataset}")


def _problems(o: Options) -> list[Problem]:
    examples = load_examples(o.dataset, o.few_shot, o.few_shot_data) if o.few_shot else []
    shuffle, limit = o.shuffle, o.limit
    if o.reference_order:
        shuffle, limit = REFERENCE_SHUFFLE, REFERENCE_COUNT
    return load_problems(
        o.dataset, o.data, style=o.prompt_style, examples=examples, shuffle=shuffle, limit=limit
    )


def prepare(options: Options, hosts: int) -> Run:
    """Data, configs and tokenizer; ValueError for what the models cannot serve."""
    draws = sampling(options)
    problems = _problems(options)
    for name, sharing in (("--num-hosts", hosts), ("--replicas", options.replicas or 1)):
        few = f"{name} {sharing}: there are only {len(problems)} problems to share"
        refuse(sharing > len(problems) > 0, few)
    files = configured(options, options.batch)
    options.steps_per_call = steps_of_call(files.models, options.steps_per_call)
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

    text_of = decode if options.no_chat_template else answer_text
    evaluation = Evaluation(
        problems=problems,
        encode=encode,
        decode=functools.partial(text_of, tokenizer),
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


def check_device(run: Run) -> None:
    """ValueError if the largest shape takes more memory than the device has."""
    models = run.files.models
    shape, context = largest_shape(run.evaluation, models)
    check_memory(models, shape, context, device_memory())
