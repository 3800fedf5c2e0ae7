"""The loop around the speculative step as abstract shapes, to be compiled and inspected.

No weight exists and nothing runs, so the real sizes of a large model fit any machine.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jflash.bench.shapes.parts import ModelShape
from jflash.compiled.programs import run, run_limits
from jflash.compiled.shape import Shape, new_state
from jflash.devices.mesh import local
from jflash.devices.structs import param_structs
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models
from pallas_kernels.block_attention.canonical import written_bytes
from pallas_kernels.grouped_matmul.kept import tile_sizes

FLOAT32 = 4  # bytes
# Bytes that do not grow with the batch: partial sums of attention and of matrix products, which are
# split until they fill the device. 2 tiles of 64 × 128 in float32 on 132 cores are 8 MiB.
ROOM = 10 * 2**20


class StepProgram(NamedTuple):
    """`run` of one pair at one batch size: what jax.jit takes, with the state (1) to be donated."""

    models: Models
    run: Callable
    arguments: tuple[Any, ...]
    temporary_bound: int  # bytes


def cut(shape: ModelShape, target_layers: int, drafter_layers: int) -> ModelShape:
    """The shape with fewer layers; as many taps as drafter layers, spread over the target."""
    taps = tuple(i * target_layers // drafter_layers for i in range(drafter_layers))
    drafter = replace(
        shape.drafter,
        layers=shape.drafter.layers[-drafter_layers:],
        target_layer_ids=taps,
        num_target_layers=target_layers,
    )
    return ModelShape(replace(shape.target, layers=shape.target.layers[:target_layers]), drafter)


def models_of(shape: ModelShape) -> Models:
    """The pair at the drafter's width, with XLA's kernels."""
    return Models(Target(shape.target), Drafter(shape.drafter), shape.drafter.block_size)


def step_program(models: Models, batch: int, capacity: int) -> StepProgram:
    """The program of `models` as a driver compiles it, context weights side by side."""
    shape = Shape.of(batch, capacity)
    state = jax.eval_shape(lambda: new_state(models, shape))
    arguments = (param_structs(models), state, *run_limits(state))
    bound = temporary_bound(local(models), batch, capacity)
    return StepProgram(models, functools.partial(run, models), arguments, bound)


def temporary_bound(models: Models, batch: int, capacity: int) -> int:
    """Bytes that a step may take beside weights and state.

    These are one array of float32 logits [B, W, V] if logits are written (draft and verify take
    turns), ROOM, and twice the widest activation (one is read, one is written): a layer's gate and
    up [B, W, 2 F] or all devices' products of both, the layers that a drafter taps, side by side
    and whole on every device, or the rows of all experts of a layer, gathered from all devices that
    have some. Beside them lie the pieces of attention with wide heads, which no CTA walks however
    large the batch, and the tiles of experts whose codes lie in fragments, which have more rows
    than tokens have.
    """
    rows, size = batch * models.block_size, jnp.dtype(models.dtype).itemsize
    hidden_size = models.target.config.hidden_size
    widths = [max(2, c.shards) * c.intermediate_size for c in models.configs]
    widths.append(len(models.taps) * hidden_size)
    for moe in models.target.config.experts:
        gathered = moe.shards // moe.cut * hidden_size
        widths.append(moe.experts_per_token * max(2 * moe.intermediate_size, gathered))
    widest = max(widths) * size
    logits = models.target.config.vocab_size * FLOAT32 if writes_logits(models) else 0
    beside = _pieces(models, batch, capacity) + size * _in_tiles(models, rows)
    return rows * (logits + 2 * widest) + beside + ROOM


def _in_tiles(models: Models, tokens: int) -> int:
    """Numbers of a layer's rows, inner rows and outputs, in tiles of experts in fragments."""
    config, sizes = models.target.config, [0]
    for i, moe in zip(config.sparse_layers, config.experts, strict=True):
        name = f"{config.layers[i].experts_name}/gate_up/kernel"
        if any(leaf == name and form.fragments for leaf, form in config.layers[i].kept):
            tiles, rows = tile_sizes(tokens, moe.experts_per_token, moe.num_experts)
            sizes.append(tiles * rows * (2 * config.hidden_size + moe.intermediate_size))
    return max(sizes)


def _pieces(models: Models, batch: int, capacity: int) -> int:
    """What a layer's attention leaves in memory between two kernels."""
    if models.kernels.attention != "canonical":
        return 0
    return max(
        written_bytes(
            batch, models.block_size, capacity,
            mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window,
        )
        for mixer in {mixer for config in models.configs for mixer in config.mixers}
    )  # fmt: skip


def writes_logits(models: Models) -> bool:
    """False if a kernel keeps all logits on chip and returns only the best token."""
    drafter = models.drafter and models.drafter.config
    reads = models.sampled or (drafter is not None and drafter.reads_logits)
    reads |= drafter is not None and bool(drafter.products)  # of many rows, by XLA
    return reads or models.kernels.matmul != "canonical"
