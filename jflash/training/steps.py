"""The compiled inside of a training: many optimizer steps in one program, over all devices.

The devices of all hosts share the rows of a batch, and everything else is on each of them; one
device runs the same program. The rows of a step and the key that it draws from depend only on
(seed, step). This file knows no model: `loss_fn(params, frozen, batch, key, progress) -> (loss,
metrics)`, where progress runs from 0 to 1 over the training.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jflash.memory import tree_bytes
from jflash.training.recipe import TrainConfig

LossFn = Callable[[Any, Any, Any, Array, Array], tuple[Array, dict[str, Array]]]
MEASURED_STEPS = 3
KERNEL = jax.tree_util.DictKey("kernel")


class TrainState(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    optimizer: Any


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW or Muon after a clip by the global norm; vectors (norm scales) do not decay.

    Muon steps along the orthogonal part of each product's gradient (Jordan 2024), at the size of
    AdamW's steps (arXiv 2502.16982), so that one learning rate serves both. Queries, keys and
    values are one product here, as are an MLP's gate and up; other programs' Muon takes each alone.
    Adam, with Nesterov's momentum and without decay, takes all other parameters (norms, tables of
    vectors).
    """
    schedule = learning_rates(config)
    b2 = 0.95  # batches are large and runs short: an average over 20 steps, not 1000
    if config.optimizer == "muon":
        steps = optax.contrib.muon(
            schedule,
            weight_decay=config.weight_decay,
            adam_b2=b2,
            muon_weight_dimension_numbers=_kernels,
            consistent_rms=0.2,  # AdamW's, by that paper
        )
    else:
        steps = optax.adamw(
            schedule,
            b2=b2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), steps)


def learning_rates(config: TrainConfig) -> optax.Schedule:
    """The learning rate of step 0, 1, …: a warm-up in equal parts, then a cosine towards 0.

    A warm-up of n steps begins at peak / n and ends at the peak, where the cosine begins, and 0
    would come after the last step. So every step moves the weights: a schedule whose first number
    is 0, as optax's and transformers' is, spends a batch on the optimizer's averages alone, and a
    training of one step would learn nothing.
    """
    warm = max(1, round(config.warmup * config.steps))
    peak, rest = config.learning_rate, max(1, config.steps - warm)
    rising = optax.linear_schedule(peak / warm, peak, warm - 1)
    return optax.join_schedules([rising, optax.cosine_decay_schedule(peak, rest)], [warm])


def _kernels(params: Any) -> Any:
    """Muon's axes for the kernels of products, None for everything else."""

    def axes(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        product = path[-1] == KERNEL and leaf.ndim == 2
        return optax.contrib.MuonDimensionNumbers() if product else None

    return jax.tree_util.tree_map_with_path(axes, params)


def device_mesh(batch_size: int) -> Mesh:
    """All devices of all hosts in one row; ValueError if they cannot share a batch equally."""
    devices = jax.devices()
    if batch_size % len(devices):
        raise ValueError(
            f"a batch of {batch_size} rows does not divide by {len(devices)} devices: "
            f"take a multiple of {len(devices)}"
        )
    return Mesh(np.asarray(devices), ("data",))


def on_all(mesh: Mesh, tree: Any) -> Any:
    """Whole copies of the arrays on every device. Each host brings its own, all alike."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    if not mesh.is_multi_process:
        return jax.device_put(tree, everywhere)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x)), tree
    )


def new_train_state(params: Any, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Step 0, in float32. It copies the params, because the state is donated."""
    params = jax.tree.map(lambda x: np.array(x, np.float32), params)
    return on_all(mesh, TrainState(params, optimizer(config).init(params)))


def abstract_train_state(params: Any, config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes and places of `new_train_state`, which takes memory."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
    state = jax.eval_shape(lambda p: TrainState(p, optimizer(config).init(p)), shapes)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state
    )


def batch_indices(config: TrainConfig, num_rows: int, first: int, last: int) -> np.ndarray:
    """Rows of steps first … last - 1, [steps, batch]; every epoch is another permutation."""
    places = np.arange(first * config.batch_size, last * config.batch_size)
    epochs = places // num_rows
    rows = np.empty(len(places), np.int32)
    for epoch in range(epochs[0], epochs[-1] + 1):
        order = np.random.default_rng((config.seed, epoch)).permutation(num_rows)
        here = epochs == epoch
        rows[here] = order[places[here] % num_rows]
    return rows.reshape(-1, config.batch_size)


def call_inputs(
    config: TrainConfig, mesh: Mesh, num_rows: int, first: int, last: int
) -> tuple[Array, Array, Array]:
    """Rows [steps_per_call, batch] of steps first … last - 1, the first step and how many."""
    rows = np.zeros((config.steps_per_call, config.batch_size), np.int32)
    rows[: last - first] = batch_indices(config, num_rows, first, last)
    return on_all(mesh, (rows, np.int32(first), np.int32(last - first)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def run_steps(
    loss_fn: LossFn, config: TrainConfig, mesh: Mesh, state: TrainState, frozen: Any, data: Any,
    indices: Array, first: Array, count: Array,
) -> tuple[TrainState, dict[str, Array]]:  # fmt: skip
    """`count` steps from step `first` on, on the first rows of `indices`; metrics are means.

    The count is a run-time value: one executable serves the last, shorter call too.
    """
    tx = optimizer(config)
    root = jax.random.key(config.seed)
    shared = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(state: TrainState, number: Array, rows: Array) -> tuple[TrainState, dict[str, Array]]:
        rows = jax.lax.with_sharding_constraint(rows, shared)
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x[rows], shared), data)
        key = jax.random.fold_in(root, number)
        progress = number / config.steps

        def loss(params):
            compute = jax.tree.map(lambda x: x.astype(config.compute_dtype), params)
            return loss_fn(compute, frozen, batch, key, progress)

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, new = tx.update(grads, state.optimizer, state.params)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(grads), **metrics}
        return TrainState(optax.apply_updates(state.params, updates), new), metrics

    def body(i, carry):
        state, sums = carry
        state, metrics = one(state, first + i, indices[i])
        return state, jax.tree.map(jnp.add, sums, metrics)

    _, shapes = jax.eval_shape(one, state, first, indices[0])
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = jax.lax.fori_loop(0, count, body, (state, sums))
    state, sums = jax.lax.with_sharding_constraint(carry, everywhere)
    return state, jax.tree.map(lambda x: x / count, sums)


class Compiled(NamedTuple):
    """`run_steps` for one training: run(state, frozen, data, indices, first, count)."""

    run: Any
    memory: dict[str, int]  # bytes on each device, by what they hold
    seconds: float  # of compiling


def compile_steps(
    loss_fn: LossFn, config: TrainConfig, mesh: Mesh, params: Any, frozen: Any, data: Any
) -> Compiled:
    """Compiles from abstract shapes: no state exists and nothing runs."""
    begin = time.perf_counter()
    state = abstract_train_state(params, config, mesh)
    inputs = call_inputs(config, mesh, len(jax.tree.leaves(data)[0]), 0, 1)
    run: Any = run_steps.lower(loss_fn, config, mesh, state, frozen, data, *inputs).compile()
    memory = {
        "frozen weights": tree_bytes(frozen),
        "trained weights and optimizer": tree_bytes(state),
        "data": tree_bytes(data),
        "activations and gradients": run.memory_analysis().temp_size_in_bytes,
    }
    return Compiled(run, memory, time.perf_counter() - begin)


def measure(
    compiled: Compiled, config: TrainConfig, mesh: Mesh, params: Any, frozen: Any, data: Any
) -> float:
    """The seconds of a step, over a few steps on a state that is thrown away."""
    state = new_train_state(params, config, mesh)
    num_rows = len(jax.tree.leaves(data)[0])
    count = min(MEASURED_STEPS, config.steps_per_call, config.steps)
    seconds = 0.0
    for last in (1, count):  # the first call warms up
        inputs = jax.block_until_ready(call_inputs(config, mesh, num_rows, 0, last))
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(compiled.run(state, frozen, data, *inputs))
        seconds = (time.perf_counter() - begin) / last
    return seconds
