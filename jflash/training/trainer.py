"""Training of any pure loss: AdamW over float32 params, checkpoints, and the same bits on resuming.

Which rows a step sees and which key it draws from are functions of (seed, step) alone. The device
runs `steps_per_call` steps for each dispatch and the host never waits for the newest of them.
Knows no model: `loss_fn(params, frozen, batch, key) -> (loss, metrics)`.
"""

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array
from tqdm import tqdm

from jflash.training.curve import write_curve, write_json

LossFn = Callable[[Any, Any, Any, Array], tuple[Array, dict[str, Array]]]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run's numbers. Batches are rows; the schedule is a warm-up, then a cosine down to 0."""

    steps: int
    batch_size: int
    learning_rate: float = 6e-4
    warmup: float = 0.04  # of all steps
    weight_decay: float = 0.01  # of matrices
    clip_norm: float = 1.0
    compute_dtype: str = "bfloat16"
    seed: int = 0
    steps_per_call: int = 50
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "steps_per_call", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")


class TrainState(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    optimiser: Any


class Trained(NamedTuple):
    """Float32 params after `step` steps, and one record of means for each call to the device."""

    params: Any
    step: int
    history: list[dict[str, Any]]


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clip by the global norm; vectors (norm scales) do not decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=max(1, round(config.warmup * config.steps)),
        decay_steps=max(2, config.steps),
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b2=0.95,  # batches are large and runs short: an average over 20 steps, not 1000
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def batch_indices(config: TrainConfig, num_rows: int, first: int, last: int) -> np.ndarray:
    """Rows of steps first … last - 1, [steps, batch]; every epoch is a permutation of its own."""
    places = np.arange(first * config.batch_size, last * config.batch_size)
    epochs = places // num_rows
    rows = np.empty(len(places), np.int32)
    for epoch in range(epochs[0], epochs[-1] + 1):
        order = np.random.default_rng((config.seed, epoch)).permutation(num_rows)
        here = epochs == epoch
        rows[here] = order[places[here] % num_rows]
    return rows.reshape(-1, config.batch_size)


# Both static arguments are compared by value or identity, so calls with the same ones compile once.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def run_steps(
    loss_fn: LossFn,
    config: TrainConfig,
    state: TrainState,
    frozen: Any,
    data: Any,
    indices: Array,
    first: Array,
) -> tuple[TrainState, dict[str, Array]]:
    """As many steps as `indices` has rows, from step `first`; metrics are means over them."""
    tx = optimiser(config)
    root = jax.random.key(config.seed)

    def one(state: TrainState, step: tuple[Array, Array]) -> tuple[TrainState, dict[str, Array]]:
        number, rows = step
        batch = jax.tree.map(lambda x: x[rows], data)
        key = jax.random.fold_in(root, number)

        def loss(params):
            compute = jax.tree.map(lambda x: x.astype(config.compute_dtype), params)
            return loss_fn(compute, frozen, batch, key)

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, new = tx.update(grads, state.optimiser, state.params)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(grads), **metrics}
        return TrainState(optax.apply_updates(state.params, updates), new), metrics

    numbers = first + jnp.arange(indices.shape[0])
    state, metrics = jax.lax.scan(one, state, (numbers, indices))
    return state, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)


def train(
    loss_fn: LossFn,
    params: Any,
    frozen: Any,
    data: Any,
    config: TrainConfig,
    directory: str | Path,
    *,
    identity: Mapping[str, Any],
    should_stop: Callable[[int], bool] = lambda step: False,
    title: str = "training",
) -> Trained:
    """Trains to the end, or until `should_stop(step)`; goes on from the newest checkpoint if any.

    `data` is a pytree of arrays with rows in front, held on the device; `frozen` is what the loss
    reads and nobody trains. Writes `checkpoints/`, `curve.json` and `curve.png` to `directory`.
    ValueError if the checkpoints there belong to another run: other data or settings, or another
    `identity`, which holds what the loss was made with.
    """
    directory = Path(directory).resolve()
    first_leaf = np.ascontiguousarray(jax.tree.leaves(data)[0])
    num_rows, checksum = len(first_leaf), zlib.crc32(first_leaf.tobytes())
    _claim(directory, {**asdict(config), **identity, "rows": num_rows, "data_crc32": checksum})
    # Copies: the state is donated, the caller's params are not ours to delete.
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    state = TrainState(params, optimiser(config).init(params))
    data, frozen = jax.device_put((data, frozen))
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(directory / "checkpoints", options=options) as manager:
        step, history = 0, []
        newest = manager.latest_step()
        if newest is not None:
            step, state = newest, manager.restore(newest, args=ocp.args.StandardRestore(state))
            history = _history(directory, step)
        waiting: tuple[int, dict[str, Array]] | None = None
        bar = tqdm(total=config.steps, initial=step, desc=title, unit="step", mininterval=1)
        while step < config.steps and not should_stop(step):
            # Always the same boundaries, so that a resumed run compiles and sums the same.
            last = min(config.steps, step - step % config.steps_per_call + config.steps_per_call)
            indices = jnp.asarray(batch_indices(config, num_rows, step, last))
            state, metrics = run_steps(
                loss_fn, config, state, frozen, data, indices, jnp.int32(step)
            )
            _record(history, bar, waiting)  # of the call before: the device is busy meanwhile
            waiting = (last, metrics)
            due = last // config.checkpoint_every > step // config.checkpoint_every
            bar.update(last - step)
            step = last
            if due:
                _record(history, bar, waiting)
                waiting = None
                _save(manager, step, state, directory, history, title)
        _record(history, bar, waiting)
        bar.close()
        if step and manager.latest_step() != step:
            _save(manager, step, state, directory, history, title)
    return Trained(state.params, step, history)


def _save(manager, step: int, state: TrainState, directory: Path, history: list, title: str):
    loss = history[-1]["loss"] if history else 0.0
    if not np.isfinite(loss):
        raise ValueError(f"{title}: the loss is {loss} at step {step}; nothing was saved")
    manager.save(step, args=ocp.args.StandardSave(state))
    write_curve(directory, history, title)


def _record(history: list, bar: Any, waiting: tuple[int, dict[str, Array]] | None) -> None:
    if waiting is None:
        return
    step, metrics = waiting
    values = jax.tree.map(lambda x: np.round(np.asarray(x, np.float64), 5).tolist(), metrics)
    history.append({"step": step, **values})
    scalars = {k: v for k, v in values.items() if isinstance(v, float)}
    bar.set_postfix({k: f"{v:.3f}" for k, v in scalars.items()}, refresh=False)


def _history(directory: Path, step: int) -> list[dict[str, Any]]:
    path = directory / "curve.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [record for record in records if record["step"] <= step]


def _claim(directory: Path, settings: dict[str, Any]) -> None:
    """Marks the folder as this run's; ValueError if it is another's."""
    path = directory / "run.json"
    settings = json.loads(json.dumps(settings))  # as they will be read: tuples become lists
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        keys = settings.keys() | found.keys()
        other = {k: found.get(k) for k in keys if found.get(k) != settings.get(k)}
        if other:
            raise ValueError(
                f"{directory} holds a run with {other}, asked for "
                f"{ {k: settings.get(k) for k in other} }: finish it so, or use another folder"
            )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)
