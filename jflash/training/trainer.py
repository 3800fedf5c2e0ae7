"""Training of any pure loss over float32 params: checkpoints, and the same bits on resuming.

The device runs `steps_per_call` steps for each dispatch and the host never waits for the newest of
them. `jflash.training.steps` holds the inside of a call; this file knows files and progress.
"""

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array
from tqdm import tqdm

from jflash.system.device import device_memory
from jflash.system.files import read_json, write_json
from jflash.system.locks import locked
from jflash.training import steps
from jflash.training.checkpoints import CHECKPOINTS, checkpoints_in, saving
from jflash.training.curve import draw_curves, read_curve
from jflash.training.recipe import TrainConfig

LOCK, RUN = "run.lock", "run.json"  # in the folder of a training
SECONDS_BETWEEN_PICTURES = 20  # drawing takes half a second of a device that waits
LOOK_DUE = "look_due"  # in the record of a checkpoint whose evaluation is not on the disk yet


class Trained(NamedTuple):
    """Float32 params after `step` steps, and one record of means for each call to the device."""

    params: Any
    step: int
    history: list[dict[str, Any]]


class Evaluation(NamedTuple):
    """What is measured every `every` steps: `run(params)` gives numbers for the curves."""

    every: int
    run: Callable[[Any], dict[str, Any]]


def plan_training(
    loss_fn: steps.LossFn, params: Any, frozen: Any, data: Any, config: TrainConfig
) -> list[str]:
    """What `train` would take with the same arguments, in words, measured on a few steps.

    ValueError if that is more memory than the device has, before a step is run.
    """
    mesh = steps.device_mesh(config.batch_size)
    frozen, data = steps.on_all(mesh, (frozen, data))
    return _compiled_that_fits(loss_fn, config, mesh, params, frozen, data)[1]


def _compiled_that_fits(
    loss_fn: steps.LossFn, config: TrainConfig, mesh: Mesh, params: Any, frozen: Any, data: Any
) -> tuple[steps.Compiled, list[str]]:
    """The compiled steps, and the plan in words."""
    compiled = steps.compile_steps(loss_fn, config, mesh, params, frozen, data)
    size, limit = sum(compiled.memory.values()), device_memory()
    parts = ", ".join(f"{name} {part / 1e9:.2f} GB" for name, part in compiled.memory.items())
    if limit is not None and size > limit:
        raise ValueError(
            f"a step takes {size / 1e9:.1f} GB ({parts}), the device has {limit / 1e9:.1f} GB: "
            "a smaller batch, fewer anchors or shorter rows take less"
        )
    seconds = steps.measure(compiled, config, mesh, params, frozen, data)
    return compiled, [
        f"memory of each of {mesh.size} device(s): {size / 1e9:.2f} GB ({parts})",
        f"time: {1e3 * seconds:.1f} ms a step, {seconds * config.steps / 60:.1f} minutes for "
        f"{config.steps} steps; compiling took {compiled.seconds:.0f} s",
    ]


def train(
    loss_fn: steps.LossFn, params: Any, frozen: Any, data: Any, config: TrainConfig,
    directory: str | Path, *, identity: Mapping[str, Any],
    should_stop: Callable[[int], bool] = lambda step: False, title: str = "training",
    evaluation: Evaluation | None = None,
) -> Trained:  # fmt: skip
    """Trains to the end, or until `should_stop(step)`; goes on from the newest checkpoint if any.

    `data` is a pytree of arrays with rows in front, held on the device; `frozen` is what the loss
    reads without training it. All devices of all hosts share the work, and the hosts `directory`,
    where the first one prints a plan and writes `checkpoints/`, `curve.json` and `curve.png`. A run
    killed at any moment resumes, on the CPU with the same bits (not shown on GPUs). ValueError
    while another process trains there, and if the checkpoints there belong to another run: other
    data or settings, or another `identity`, which holds what the loss was made with.
    """
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    first = jax.process_index() == 0
    mesh = steps.device_mesh(config.batch_size)
    settings = _settings(config, identity, data)
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(locked(directory / LOCK, directory))
        _check_claim(directory, settings)
        frozen, data = steps.on_all(mesh, (frozen, data))
        manager = stack.enter_context(checkpoints_in(directory))
        compiled = None
        if (manager.latest_step() or 0) < config.steps:
            # This comes before there is a state, because measuring makes one.
            compiled, plan = _compiled_that_fits(loss_fn, config, mesh, params, frozen, data)
            if first:
                print("\n".join(plan), flush=True)
                write_json(directory / RUN, settings)  # not sooner: these settings can run
        state = steps.new_train_state(params, config, mesh)
        step, state, history = _newest(manager, state, directory)
        log = _Log(manager, directory, title, history)
        if history and history[-1].pop(LOOK_DUE, False) and evaluation:
            log.look(evaluation, state)
            log.draw()
        if compiled is not None:
            fixed = (frozen, data)

            def call(state: steps.TrainState, first: int, last: int):
                inputs = steps.call_inputs(config, mesh, settings["rows"], first, last)
                return compiled.run(state, *fixed, *inputs)

            step, state = _to_the_end(call, config, log, step, state, should_stop, evaluation)
    return Trained(state.params, step, history)


def _to_the_end(
    call: Callable[..., tuple[steps.TrainState, Any]], config: TrainConfig, log: "_Log",
    step: int, state: steps.TrainState, should_stop: Callable[[int], bool],
    evaluation: Evaluation | None,
) -> tuple[int, steps.TrainState]:  # fmt: skip
    """Steps until the last one or `should_stop`; a call is recorded while the next one runs."""
    drawn = time.monotonic()
    waiting: tuple[int, dict[str, Array]] | None = None
    bar = tqdm(total=config.steps, initial=step, desc=log.title, unit="step", mininterval=1)
    # A call ends where a checkpoint or an evaluation is due, so that none of them comes late.
    ends = [config.steps_per_call, config.checkpoint_every]
    ends += [evaluation.every] if evaluation else []
    while step < config.steps and not _agreed(should_stop(step)):
        # The boundaries are always the same, so that a resumed run sums in the same order.
        last = min(config.steps, *(step - step % every + every for every in ends))
        state, metrics = call(state, step, last)
        log.record(bar, waiting)
        waiting = (last, metrics)
        save = _due(config.checkpoint_every, step, last) or last == config.steps
        look = evaluation and (_due(evaluation.every, step, last) or last == config.steps)
        bar.update(last - step)
        step = last
        if save or look:
            log.record(bar, waiting)
            waiting = None
        if save:
            log.history[-1] |= {LOOK_DUE: True} if look else {}
            log.save(step, state)
        if look and evaluation:
            log.look(evaluation, state)
        if save and time.monotonic() - drawn > SECONDS_BETWEEN_PICTURES:
            log.draw()
            drawn = time.monotonic()
    log.record(bar, waiting)
    bar.close()
    if step and log.manager.latest_step() != step:
        log.save(step, state)
    if log.history:
        log.draw()
    return step, state


def _agreed(stop: bool) -> bool:
    """What the first host says: all stop before the same step."""
    if jax.process_count() == 1:
        return stop
    return bool(multihost_utils.broadcast_one_to_all(np.bool_(stop)))


def _due(every: int, before: int, after: int) -> bool:
    return after // every > before // every


class _Log(NamedTuple):
    """What a run leaves on the disk; `history` grows."""

    manager: ocp.CheckpointManager
    directory: Path
    title: str
    history: list[dict[str, Any]]

    def record(self, bar: Any, waiting: tuple[int, dict[str, Array]] | None) -> None:
        if waiting is None:
            return
        step, metrics = waiting
        values = jax.tree.map(lambda x: np.round(np.asarray(x, np.float64), 5).tolist(), metrics)
        self.history.append({"step": step, **values})
        scalars = {name: f"{v:.3f}" for name, v in values.items() if isinstance(v, float)}
        bar.set_postfix(scalars, refresh=False)

    def look(self, evaluation: Evaluation, state: steps.TrainState) -> None:
        """Evaluates into the newest record, after the checkpoint that it looks at was saved."""
        self.history[-1].pop(LOOK_DUE, None)
        self.history[-1] |= evaluation.run(state.params)  # on every host: none waits for another
        self.write()

    def save(self, step: int, state: steps.TrainState) -> None:
        loss = self.history[-1]["loss"] if self.history else 0.0
        if not np.isfinite(loss):
            raise ValueError(f"{self.title}: the loss is {loss} at step {step}; nothing was saved")
        # The curve precedes the checkpoint: a resumed run reads it and needs its step in it.
        self.write()
        with saving(self.directory):
            self.manager.save(step, args=ocp.args.StandardSave(state))

    def write(self) -> None:
        if jax.process_index() == 0:
            write_json(self.directory / "curve.json", self.history)

    def draw(self) -> None:
        if jax.process_index() == 0:
            draw_curves(self.directory, self.history, self.title)


def _newest(
    manager: ocp.CheckpointManager, state: steps.TrainState, directory: Path
) -> tuple[int, steps.TrainState, list[dict[str, Any]]]:
    """Step, state and history of the newest checkpoint; `state` at step 0 without one."""
    step = manager.latest_step()
    if step is None:
        return 0, state, []
    records = read_curve(directory)
    try:
        restored: Any = manager.restore(step, args=ocp.args.StandardRestore(state))
    except Exception as error:  # of Orbax, by a file that a power cut left half written
        why = " ".join(str(error).split())[:160]
        raise ValueError(
            f"{directory / CHECKPOINTS / str(step)} cannot be read: {why}. Without this folder "
            "the same command goes on from the checkpoint before it, or else from the start"
        ) from None
    return step, restored, [record for record in records if record["step"] <= step]


def _settings(config: TrainConfig, identity: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """The settings that identify a run, in the form that run.json gives back."""
    rows = {"rows": len(jax.tree.leaves(data)[0]), "data_crc32": crc32_of(data)}
    return json.loads(json.dumps({**asdict(config), **identity, **rows}))  # tuples become lists


def crc32_of(tree: Any) -> int:
    """A checksum over all leaves of a tree, in their order."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.asarray(leaf).tobytes(), total)
    return total


def _check_claim(directory: Path, settings: dict[str, Any]) -> None:
    """ValueError if the folder is another run's."""
    path = directory / RUN
    if not path.exists():
        return
    there = read_json(path)
    if not isinstance(there, dict):
        raise ValueError(f"{path} is damaged, and no JSON object: use another folder")
    keys = settings.keys() | there.keys()
    other = {k: there.get(k) for k in keys if there.get(k) != settings.get(k)}
    if other:
        raise ValueError(
            f"{directory} holds a run with {other}, this one has "
            f"{ {k: settings.get(k) for k in other} }: finish it so, or use another folder"
        )
