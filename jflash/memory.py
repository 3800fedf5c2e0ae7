"""The memory that decoding takes, by the configs: requests that do not fit are refused early.

Weights and caches are exact, temporaries an upper estimate (`jflash/temporaries.py`). The peak is
read from the device.
"""

import bisect
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jflash.compiled.shape import Shape, capacity_for, new_state
from jflash.devices.mesh import local
from jflash.generate import PREFILL_CHUNK
from jflash.models.params import abstract_params, decoding_params
from jflash.pair import Models
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.system.device import device_memory
from jflash.temporaries import temporary_bytes


class Budget(NamedTuple):
    """Bytes on the device: parameters, the state with its caches, and a program's temporaries."""

    weights: int
    caches: int
    temporaries: int

    @property
    def total(self) -> int:
        return sum(self)


class Largest(NamedTuple):
    """The largest context and the largest batch that fit, each at the other's given value.

    `context` counts tokens of a sequence, prompt and new ones together. None: nothing fits.
    """

    context: int | None
    batch: int | None


def memory_budget(models: Models, shape: Shape) -> Budget:
    """The bytes that the programs of `shape` take of each device."""
    models = local(models)
    state = jax.eval_shape(lambda: new_state(models, shape))
    caches = (state.target_cache, state.drafter_cache)
    return Budget(
        weights=sum(_bytes(decoding_params(config)) for config in models.configs),
        caches=tree_bytes(state),
        temporaries=temporary_bytes(models, shape, tree_bytes(caches)),
    )


def largest_that_fit(models: Models, shape: Shape, context: int, limit: int) -> Largest:
    """The largest context at the shape's batch, and the largest batch at `context` tokens."""
    positions = min(config.max_position_embeddings for config in models.configs)

    def too_much(batch: int, context: int) -> bool:
        return memory_budget(models, shape_for(models, shape, batch, context)).total > limit

    contexts, batches = range(1, positions + 1), range(1, shape.batch + 1)
    fitting = bisect.bisect_left(contexts, True, key=lambda n: too_much(shape.batch, n))
    side_by_side = bisect.bisect_left(batches, True, key=lambda n: too_much(n, context))
    return Largest(fitting or None, side_by_side or None)


def shape_for(models: Models, shape: Shape, batch: int, context: int) -> Shape:
    """The shape that serves `batch` sequences of `context` tokens, however many are the prompt's.

    A prompt is padded to whole chunks, so a context that is all prompt needs the most slots.
    """
    capacity = capacity_for(context, 0, models.block_size, shape.chunk)
    return shape._replace(batch=batch, capacity=capacity)


def check_decoding(models: Models, batch: int, longest_prompt: int, max_new_tokens: int) -> int:
    """The cache slots of a sequence, for `batch` prompts of at most `longest_prompt` tokens.

    ValueError if they take more memory than the device has; call it before a weight is read.
    """
    capacity = capacity_for(longest_prompt, max_new_tokens, models.block_size, PREFILL_CHUNK)
    shape = Shape.of(batch, capacity)
    check_memory(models, shape, longest_prompt + max_new_tokens, device_memory())
    return capacity


def check_memory(models: Models, shape: Shape, context: int, limit: int | None) -> None:
    """ValueError, naming what would fit, if `shape` takes more than `limit` bytes.

    `context` is the longest prompt with its new tokens. Without a limit everything fits.
    """
    budget = memory_budget(models, shape)
    if limit is None or budget.total <= limit:
        return
    each = f" of each of {models.mesh.size} devices" if models.mesh else ""
    parts = ", ".join(f"{name} {_gb(value)}" for name, value in budget._asdict().items())
    if budget.weights > limit:
        advice = "the weights by themselves do not fit"
    else:
        fitting = largest_that_fit(models, shape, context, limit)
        tokens = f"at most {fitting.context} tokens of context fit"
        sequences = f"at most batch {fitting.batch} fits"
        advice = (
            f"at batch {shape.batch} {tokens if fitting.context else 'no context fits'}, "
            f"at {context} tokens of context {sequences if fitting.batch else 'no batch fits'}"
        )
    raise ValueError(
        f"batch {shape.batch} with {context} tokens of context (prompt and new ones) takes "
        f"{_gb(budget.total)}{each} ({parts}), {_gb(budget.total - limit)} more than the "
        f"{_gb(limit)} that JAX may use: {advice}"
    )


def used_memory() -> int | None:
    """Bytes in use on the first device now; None on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")


def peak_memory() -> int | None:
    """The most bytes in use at once in this process so far; None on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def weight_bytes(configs: Iterable[TargetConfig | DrafterConfig]) -> int:
    """Bytes of the models as published, without a program's additional leaves."""
    return sum(_bytes(abstract_params(config)) for config in configs)


def tree_bytes(tree: Any) -> int:
    """Bytes of one copy of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes(leaves: dict) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(leaves))


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
