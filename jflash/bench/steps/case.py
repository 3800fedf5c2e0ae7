"""One case of the benchmark: a pair at one batch size, in a process that does nothing else.

Stage `time` compiles from nothing and times every part. Stage `warm`, in a fresh process, compiles
again from the compilation cache that `time` filled: its peak of memory holds no compiler's scratch.
scripts/benchmark.py starts the processes.
"""

import functools
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jflash.bench.floors import Rates, measure_rates
from jflash.bench.shapes import model_shape, quantised
from jflash.bench.steps.clock import Clock
from jflash.bench.steps.finite import check_timed
from jflash.bench.steps.pair_speed import measured_speed
from jflash.bench.steps.prefill_time import time_prefill
from jflash.bench.steps.time import (
    Window,
    busy_state,
    experts_read,
    rewound,
    time_draft,
    time_run,
    window_around,
)
from jflash.compiled.programs import compile_programs, compile_run
from jflash.compiled.shape import PREFILL_CHUNK, Shape, new_state
from jflash.devices.backends import named, with_backends
from jflash.devices.distribute import place
from jflash.devices.mesh import for_batch, local, over, tensor_mesh, with_context, with_rounding
from jflash.generate import Pair
from jflash.io import PairFiles, configure_pair, default_dtype, load_weights, save_checkpoint
from jflash.memory import (
    check_decoding,
    check_memory,
    peak_memory,
    tree_bytes,
    weight_bytes,
)
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_weights
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding
from jflash.state import State
from jflash.system.device import describe_device, device_memory


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to measure. Either `shape` (random weights) or `target` and `drafter` (folders)."""

    shape: str | None
    target: str | None
    drafter: str | None
    batch: int
    context: int
    capacity: int
    widths: tuple[int, ...]  # of the whole step, besides the drafter's width
    only_step: bool  # without times of plain decoding, verify and draft
    dtype: str | None  # None: what suits the device
    backends: dict[str, str]  # by the options' names; jflash chooses the others
    steps: int
    repeats: int
    prompts: tuple[tuple[int, ...], ...]  # decoded for tokens a second; needs folders
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    tensor_parallel: int = 1  # devices that share the pair
    experts_over: str = "columns"  # or "devices": what they share of experts
    quantised: str | None = None  # how a shape's target lies in memory, one of QUANTISED
    prefill: tuple[int, ...] = ()  # lengths of prompts, by themselves at batch 1
    prefill_chunk: int | None = None  # the drivers'
    drafter_dtype: str = ""  # empty: the pair's

    @property
    def decoding(self) -> Decoding:
        return Decoding(max_new_tokens=self.max_new_tokens, stop_token_ids=self.stop_token_ids)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_task(stage: str, task: Task) -> dict[str, Any]:
    """The numbers of one stage; ValueError for what cannot be measured here."""
    return {"time": time_case, "warm": warm_case}[stage](task)


def time_case(task: Task) -> dict[str, Any]:
    """All times, and the seconds of compiling from nothing."""
    models = task_models(task)
    shape = Shape.of(task.batch, task.capacity)
    check_memory(models, shape, task.context, device_memory())
    if task.prompts:
        longest = max(map(len, task.prompts))
        check_decoding(models, task.batch, longest, task.max_new_tokens)
    where = describe_device()
    log(f"{where['device']}: measuring what it delivers")
    measured = measure_rates(models.dtype)
    rates = Rates(measured["bytes_per_second"], measured["operations_per_second"])
    window = window_around(task.context, task.capacity, models.block_size, task.steps, task.repeats)
    state, params = prepare(task, models, shape, window)
    clock = Clock(models, shape, window, rates)

    log(f"batch {task.batch}: compiling the step")
    programs = compile_programs(models, params, shape)
    compiled_peak = peak_memory()
    step, state = timed(clock, models, params, state, programs.run)
    result = {
        **where,
        "floors": measured,
        "weights": weights_name(task),
        "shape": task.shape,
        "batch": task.batch,
        "tensor_parallel": task.tensor_parallel,
        **({"experts_over": "devices"} if task.experts_over == "devices" else {}),
        "context": window.context,
        "capacity": task.capacity,
        "block_size": models.block_size,
        "dtype": models.dtype,
        "quantised": task.quantised,
        **({"drafter_dtype": task.drafter_dtype} if task.drafter_dtype else {}),
        **named(models.kernels),
        "timed_steps": window.steps,
        "repeats": window.repeats,
        "step": step,
        "compile_seconds": {"from_nothing": programs.seconds},
        "memory": memory(models, shape, programs.run)
        | {"peak_bytes_while_compiling": compiled_peak},
    }
    log(f"batch {task.batch}: step {step['ms']:.3f} ms")
    if not task.only_step:
        parts, state = time_parts(clock, params, state, step)
        result |= parts
    result["widths"], state = time_widths(task, clock, params, state, step)
    del state
    if task.prefill:
        log("prefilling")
        chunk = task.prefill_chunk or PREFILL_CHUNK
        timings = time_prefill(models, params, task.prefill, chunk, task.repeats)
        result["prefill"] = list(timings)
    if task.prompts:
        log(f"batch {task.batch}: decoding prompts")
        pair = Pair(models, params)
        result["measured_speed"] = measured_speed(pair, task.prompts, task.batch, task.decoding)
    return result


def warm_case(task: Task) -> dict[str, Any]:
    """Seconds of compiling with a warm cache, and the peak of memory of a process that decodes."""
    models = task_models(task)
    shape = Shape.of(task.batch, task.capacity)
    window = window_around(task.context, task.capacity, models.block_size, task.steps, 1)
    state, params = prepare(task, models, shape, window)
    held = peak_memory()
    log(f"batch {task.batch}: compiling the step again, from the cache")
    programs = compile_programs(models, params, shape)
    _, state = time_run(programs.run, params, state, window)
    return {
        "compile_seconds": {"warm_cache": programs.seconds},
        "memory": memory(models, shape, programs.run)
        | {"peak_bytes": peak_memory(), "peak_bytes_before_compiling": held},
    }


def task_models(task: Task) -> Models:
    """The pair that a task names, at the drafter's width; ValueError: see with_backends."""
    if task.shape is not None:
        target, drafter = model_shape(task.shape)
        target = quantised(target, task.quantised) if task.quantised else target
        models = Models(Target(target), Drafter(drafter), drafter.block_size)
        models = over(models, tensor_mesh(task.tensor_parallel), task.experts_over)
    else:
        models = pair_files(task, task.dtype).models
    models = models.drafting_in(task.drafter_dtype, task.batch)
    dtype, device = task.dtype or default_dtype(), jax.devices()[0]
    return for_batch(with_backends(models, dtype, device, **task.backends), task.batch)


def pair_files(task: Task, dtype: str | None) -> PairFiles:
    """The real pair that a task names."""
    assert task.target is not None and task.drafter is not None
    return configure_pair(
        task.target, task.drafter, dtype=dtype, drafter_dtype=task.drafter_dtype, batch=task.batch,
        tensor_parallel=task.tensor_parallel, experts_over=task.experts_over,
    )  # fmt: skip


def memory(models: Models, shape: Shape, compiled: Any) -> dict[str, Any]:
    """Bytes of a device's weights and caches, and of the compiled program's temporaries."""
    models = local(models)
    state = jax.eval_shape(lambda: new_state(models, shape))
    analysis = compiled.memory_analysis()
    return {
        "weights_bytes": weight_bytes(models.configs),
        "caches_bytes": tree_bytes((state.target_cache, state.drafter_cache)),
        "temporaries_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
    }


def weights_name(task: Task) -> str:
    if task.shape is not None:
        return "random: their text means nothing, their acceptance is forced to 0"
    return f"{task.target} with {task.drafter}"


def prepare(task: Task, models: Models, shape: Shape, window: Window) -> tuple[State, Params]:
    """Caches and weights, the caches first: the largest leaves are drawn while memory is empty."""
    log(f"batch {task.batch}: filling memory")
    state = busy_state(models, shape, window)
    if task.shape is None:
        files = pair_files(task, models.dtype)
        params = load_weights(replace(files, models=models)).params  # as its kernels read them
    else:
        weights = random_weights(models.configs, place=functools.partial(place, models.mesh))
        params = with_rounding(models, with_context(models, Params(*weights)))
        del weights
    return state, jax.block_until_ready(params)


def timed(
    clock: Clock, models: Models, params: Params, state: State, compiled: Any
) -> tuple[dict[str, Any], State]:
    """The entry of a program that runs whole steps of `models`, and the state again.

    ValueError for steps that `check_timed` refuses.
    """
    seconds, state = time_run(compiled, params, state, clock.window)
    experts = None  # of devices that share the pair; the floor takes the expected number
    if models.mesh is None:
        experts = experts_read(models, params, rewound(state, clock.window))
    check_timed(f"batch {clock.shape.batch}", models, state, experts)
    return clock.part(seconds, clock.work(models, experts), experts), state


def time_parts(
    clock: Clock, params: Params, state: State, step: dict[str, Any]
) -> tuple[dict[str, Any], State]:
    """Times verify and plain decoding without a drafter; draft is the rest of the step."""
    models, batch = clock.models, clock.shape.batch
    drafterless = Params(params.target)
    drafter_cache, bare = state.drafter_cache, state._replace(drafter_cache=())
    parts: dict[str, Any] = {}
    for name, width in (("verify", models.block_size), ("plain", 1)):
        target = replace(models, drafter=None, block_size=width)
        compiled, took = compile_run(target, drafterless, bare)
        part, bare = timed(clock, target, drafterless, bare, compiled)
        parts[name] = part | {"compile_seconds": took}
        log(f"batch {batch}: {name} {parts[name]['ms']:.3f} ms")
    state = bare._replace(drafter_cache=drafter_cache)
    seconds, state = time_draft(models, params, state, clock.window)
    rest = (step["ms"] - parts["verify"]["ms"]) / 1e3
    parts["draft"] = clock.part([rest], clock.draft_work(models.block_size)) | {
        "share_of_step": 1e3 * rest / step["ms"],
        "alone_ms": 1e3 * statistics.median(seconds),
        "how": "step - verify: the drafter, its head and the context K/V; alone_ms lacks the last",
    }
    return parts, state


def time_widths(
    task: Task, clock: Clock, params: Params, state: State, step: dict[str, Any]
) -> tuple[list[dict[str, Any]], State]:
    """The whole step at each of the task's widths and at the drafter's."""
    full = clock.models.block_size
    rows = [{"block_size": full} | step]
    for width in sorted(set(task.widths) - {full}):
        begin = time.perf_counter()
        narrow = replace(clock.models, block_size=width)
        compiled, _ = compile_run(narrow, params, state)
        part, state = timed(clock, narrow, params, state, compiled)
        rows.append({"block_size": width} | part)
        took = time.perf_counter() - begin
        log(f"batch {task.batch}: width {width} {part['ms']:.3f} ms ({took:.0f} s)")
    return sorted(rows, key=lambda row: row["block_size"]), state


def save_pair(task: Task, folder: Path) -> dict[str, Any]:
    """Writes the random pair that `time` uses in Hugging Face layout, below `folder`.

    Returns how another program decodes it so that its steps lie at the same context.
    """
    assert task.shape is not None
    names, dtype = ("target", "drafter"), task.dtype or default_dtype()
    configs = [replace(config, dtype=dtype) for config in model_shape(task.shape)]
    for name, config, params in zip(names, configs, random_weights(configs), strict=True):
        log(f"saving the {name} for the reference")
        save_checkpoint(folder / name, config, params, dtype)
    prompt = max(1, task.context - task.steps // 2)
    draw = np.random.default_rng(0)
    return {
        **{name: str(folder / name) for name in names},
        "prompts": [draw.integers(0, configs[0].vocab_size, prompt).tolist()],
        "max_new_tokens": task.steps + 1,
        "stop_token_ids": None,
    }
