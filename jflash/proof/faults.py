"""Faults that break the law and nothing else: each is right up to rounding, and must be caught.

A fault is a target that only this file can make; no option leads to it. Prompts are not faulty: a
chunk's pass is the sound one, so that decoding alone has to show the fault. At width 1 and batch 1
the first three are the sound target; the fourth is another arithmetic there, and no single one.
Axes: B batch, T block width, S capacity.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from jflash.kernels import Kernels
from jflash.layers import Block, Projection, RMSNorm
from jflash.models.decoder import Target
from jflash.proof.cases import attend_by_length
from jflash.speculative import Models

FEW_ROWS, PARTS = 16, 4
PIECES = 8  # of K, where no form has more than four


class Fault(NamedTuple):
    """A name, the target that has it, and whether it is the sound one at width 1 and batch 1."""

    name: str
    target: type[Target]
    sound_alone: bool


def planted(models: Models, fault: Fault) -> Models:
    return replace(models, target=fault.target(models.target.config))


def _product(x, kernel, pieces: int, residual):
    """x @ kernel by XLA, K cut in pieces that are added in float32."""
    parts = zip(jnp.split(x, pieces, axis=-1), jnp.split(kernel, pieces), strict=True)
    how = {"precision": "highest", "preferred_element_type": jnp.float32}
    out = sum(jnp.einsum("BTK,KN->BTN", *part, **how) for part in parts)
    out = jnp.asarray(out).astype(x.dtype)
    return out if residual is None else residual + out


def _rows(x) -> int:
    return x.shape[0] * x.shape[1]


def _split_by_rows(call, args, kwargs, context):
    """Output and down projections in PIECES pieces of K where there are more than FEW_ROWS rows."""
    module, (x, *rest) = context.module, args
    if not isinstance(module, Projection) or _rows(x) <= FEW_ROWS or module.use_bias:
        return call(*args, **kwargs)
    return _product(x, module.kernel, PIECES, rest[1] if len(rest) > 1 else None)


def _norm_by_rows(call, args, kwargs, context):
    """Norms that add the even entries before the odd ones, for more than FEW_ROWS rows."""
    module, x = context.module, args[0]
    if not isinstance(module, RMSNorm) or _rows(x) <= FEW_ROWS:
        return call(*args, **kwargs)
    x32 = x.astype(jnp.float32)
    squares = x32 * x32
    halves = [jnp.sum(squares[..., i::2], axis=-1, keepdims=True) for i in (0, 1)]
    normed = x32 / jnp.sqrt((halves[0] + halves[1]) / x.shape[-1] + module.eps)
    return module.scale * normed.astype(x.dtype)


def _xlas_product(call, args, kwargs, context):
    """Output and down projections by XLA, which sums otherwise for other numbers of rows."""
    module, (x, *rest) = context.module, args
    if not isinstance(module, Projection) or module.use_bias:
        return call(*args, **kwargs)
    return _product(x, module.kernel, 1, rest[1] if len(rest) > 1 else None)


class _AttendByBatch(NamedTuple):
    """Attention in PARTS parts where there are several sequences."""

    block: Block

    @property
    def kernels(self) -> Kernels:
        return self.block.kernels

    def attend(self, spec, projected, cache, sinks=None):
        if len(projected.cos) == 1:
            return self.block.attend(spec, projected, cache, sinks)
        slots = self.block.lengths[:, None] + jnp.arange(projected.cos.shape[1])
        q, cache = projected.write(cache, slots, self.block.kernels.heads)
        size = cache.k.shape[1] // PARTS
        part = jnp.arange(cache.k.shape[1])[None] // size
        return attend_by_length(
            q, cache.k, cache.v, self.block.lengths, self.block.widths, part
        ), cache


def _faulty(intercept: Callable[..., Any]) -> type[Target]:
    class Faulty(Target):
        def __call__(self, tokens, positions, caches, over, *rest):
            if not isinstance(over, Block):
                return super().__call__(tokens, positions, caches, over, *rest)
            with nn.intercept_methods(only_calls):
                return super().__call__(tokens, positions, caches, over, *rest)

    def only_calls(call, args, kwargs, context):
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        return intercept(call, args, kwargs, context)

    return Faulty


class _FaultyAttention(Target):
    def __call__(self, tokens, positions, caches, over, *rest):
        if isinstance(over, Block):
            over = _AttendByBatch(over)
        return super().__call__(tokens, positions, caches, over, *rest)


FAULTS = (
    Fault("a split over K that depends on the rows", _faulty(_split_by_rows), True),
    Fault("attention's pieces depend on the batch", _FaultyAttention, True),
    Fault("a norm summed in another order", _faulty(_norm_by_rows), True),
    Fault("XLA's product for one operation", _faulty(_xlas_product), False),
)
