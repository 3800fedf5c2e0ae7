"""benchmark: step times of a pair, every batch size in separate processes, one after another."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from jflash.bench.shapes import model_shape
from jflash.bench.steps import case as benchmark_case
from jflash.bench.steps.case import Task, run_task, save_pair
from jflash.bench.steps.report import (
    add_beside,
    add_peak,
    add_ratios,
    add_speed,
    case_text,
    collect,
    device_line,
    reference_text,
)
from jflash.checks import check_request
from jflash.cli.command import BAD_INPUT, Options
from jflash.cli.interrupts import sigterm_cleans_up
from jflash.cli.options.results import chosen_backends
from jflash.cli.options.values import refuse
from jflash.cli.prompts import Prompt, encode, read_prompts
from jflash.cli.results import partial
from jflash.io import open_checkpoint, pair_models
from jflash.records.decoding import Decoding
from jflash.system.sources import same_paths

PROMPTS = (
    "A baker fills 7 trays with 12 rolls each and sells 59 rolls. How many rolls are left?",
    "Write a Python function that returns the longest word of a sentence.",
    "Explain in a few sentences why the sky is blue.",
    "List five things to check before a long bicycle ride.",
)
REFERENCE = Path(benchmark_case.__file__).with_name("torch_reference.py")


def make_task(args: Options) -> Task:
    """The task of the first batch size; ValueError for what no device could measure."""
    target, drafter = model_shape(args.shape) if args.shape else pair_configs(args)
    capacity = args.capacity or -(-2 * args.context // 256) * 256
    check_sizes(args, target, drafter, capacity)
    prompts, stops = ((), ()) if args.shape else encoded_prompts(args)
    same = ("shape", "context", "widths", "only_step", "dtype", "steps", "repeats")
    more = ("max_new_tokens", "tensor_parallel", "experts_over", "quantised", "prefill")
    more = (*more, "prefill_chunk", "drafter_dtype")
    return Task(
        **{name: getattr(args, name) for name in (*same, *more)},
        target=None if args.shape else str(args.target),
        drafter=None if args.shape else str(args.drafter),
        batch=min(args.batch),
        capacity=capacity,
        backends=chosen_backends(args),
        prompts=prompts,
        stop_token_ids=stops,
    )


def check_sizes(args: Options, target: Any, drafter: Any, capacity: int) -> None:
    """ValueError for what does not fit the pair's configs."""
    full = drafter.block_size
    positions = min(target.max_position_embeddings, drafter.max_position_embeddings)
    for width in args.widths:
        refuse(not 2 <= width <= full, f"--widths {args.widths}: 2 … {full}")
    accepted, context = args.acceptance, args.context
    beyond = accepted is not None and not 1 <= accepted <= full
    refuse(beyond, f"--acceptance {accepted}: within 1 … {full} tokens a step")
    refuse(context > capacity, f"--context {context} is beyond the capacity {capacity}")
    refuse(context > positions, f"--context {context}: the pair has {positions} positions")
    longest = max(args.prefill, default=0)
    refuse(longest >= positions, f"--prefill {longest}: the pair has {positions} positions")


def pair_configs(args: Options) -> tuple[Any, Any]:
    models = pair_models(args.target, args.drafter)
    assert models.drafter is not None
    return models.target.config, models.drafter.config


def encoded_prompts(args: Options) -> tuple[Any, Any]:
    """Prompts and stop tokens as ids, texts through the target's chat template."""
    template = {"system": None, "reasoning": "off", "no_chat_template": False}
    options = Options(prompts=args.prompts, **template)
    prompts = read_prompts(options) if args.prompts else [Prompt(text, None) for text in PROMPTS]
    needed = any(prompt.text is not None for prompt in prompts)
    target = open_checkpoint(args.target)
    tokenizer = target.tokenizer() if needed or target.has_tokenizer() else None
    stops = target.stop_ids(tokenizer)
    ids = [encode(prompt, tokenizer, options) for prompt in prompts]
    models = pair_models(target, args.drafter)
    decoding = Decoding(max_new_tokens=args.max_new_tokens, stop_token_ids=stops)
    for one in ids:
        check_request(models, one, decoding)
    return tuple(map(tuple, ids)), tuple(stops)


def start(stage: str, task: Task, folder: Path) -> dict[str, Any]:
    """Runs a stage in a fresh process, which prints to stderr; SystemExit if it refuses."""
    environment = os.environ | {
        **same_paths(),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-P", "-m", "jflash.cli.main", "benchmark", "--stage", stage]
    return exchange(command, asdict(task), folder, environment)


def exchange(
    command: list[str], task: dict[str, Any], folder: Path, environment: dict[str, str] | None
) -> dict[str, Any]:
    """Runs `command TASK RESULT`, two JSON files in `folder`; the result."""
    files = (folder / "task.json", folder / "result.json")
    files[0].write_text(json.dumps(task), encoding="utf-8")
    call([*command, *map(str, files)], environment)
    return json.loads(files[1].read_text(encoding="utf-8"))


def call(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Runs a child; if it has printed a refusal, this process ends with the same exit code."""
    sys.stdout.flush()
    code = subprocess.run(command, env=environment, stdout=sys.stderr).returncode
    if code == BAD_INPUT:
        raise SystemExit(BAD_INPUT)
    if code:
        raise ValueError(f"the process that measures ended with code {code}: {command[-3:]}")


def run_stage(stage: str, task_file: Path, result_file: Path) -> None:
    raw = json.loads(task_file.read_text(encoding="utf-8"))
    prompts = tuple(map(tuple, raw.pop("prompts")))
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    task = Task(**cast(dict[str, Any], lists), prompts=prompts)
    folder = result_file.parent
    result = save_pair(task, folder) if stage == "save" else run_task(stage, task)
    result_file.write_text(json.dumps(result), encoding="utf-8")


@sigterm_cleans_up()
def measure(task: Task, with_memory: bool) -> dict[str, Any]:
    """A case: timed by one process, compiled again and weighed by a second."""
    with tempfile.TemporaryDirectory(prefix="jflash-benchmark-") as name:
        case = start("time", task, Path(name))
        if with_memory:
            warm = start("warm", task, Path(name))
            case["compile_seconds"] |= warm["compile_seconds"]
            case["memory"] |= warm["memory"]
    add_peak(case["memory"])
    return case


@sigterm_cleans_up()
def measure_reference(args: Options, task: Task, case: dict[str, Any]) -> dict[str, Any]:
    """The PyTorch code on the weights of `case` (batch 1), in one more process."""
    with tempfile.TemporaryDirectory(prefix="jflash-reference-") as name:
        folder = Path(name)
        if task.shape is not None:
            reference = start("save", task, folder)
        else:
            names = ("target", "drafter", "prompts", "max_new_tokens")
            reference = {name: getattr(task, name) for name in names}
            reference["stop_token_ids"] = task.stop_token_ids or None
        reference |= {"dtype": case["dtype"], "repeats": min(3, task.repeats)}
        command = [args.reference_python, "-P", str(REFERENCE), "time"]
        result = exchange(command, reference, folder, None)
    add_ratios(result, case)
    return result


def run(args: Options) -> Iterator[dict[str, Any]]:
    """Prints each case, and yields all cases so far after it."""
    if args.stage:
        run_stage(args.stage[0], Path(args.stage[1]), Path(args.stage[2]))
        return
    task = make_task(args)
    if args.against:
        call([args.reference_python, "-P", str(REFERENCE), "check"])
    cases, reference = [], None
    batches = sorted(set(args.batch))
    for batch in batches:
        task = replace(task, batch=batch)
        case = measure(task, not args.no_memory)
        if args.beside:
            add_beside(case, measure(replace(task, shape=args.beside, only_step=True), False))
        add_speed(case, args.acceptance)
        print(*([] if cases else [device_line(case)]), case_text(case), sep="\n", flush=True)
        cases.append(case)
        if args.against and batch == 1:
            reference = measure_reference(args, task, case)
            print(reference_text(reference), flush=True)
        yield partial(collect(cases, reference), missing=len(batches) - len(cases))
