"""Faults that the checks of losslessness must catch: each is right up to rounding.

A fault is a target that only this file can make; no option leads to it. Its parameters are a
Target's. Prompts are not faulty: a chunk's pass is the sound one, so that decoding has to show the
fault. At width 1 and batch 1 the first three of FAULTS are the sound target; the fourth, and that
of HYBRIDS, are another arithmetic there, and no single one. SPLIT_BY_LENGTH is the oracle's.
Axes: B batch, T block width, S capacity.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jflash.layers.passes import Block
from jflash.layers.projections import Projection
from jflash.layers.sums import summed
from jflash.models.decoder import Target
from jflash.pair import Models
from pallas_kernels import gated_delta
from pallas_kernels.matmul import Unsummed

FEW_ROWS, SPLITS = 16, 4
PIECES = 8  # of K, where no form has more than four


class Fault(NamedTuple):
    """A name, the target that has it, and whether it is the sound one at width 1 and batch 1."""

    name: str
    target: type[Target]
    sound_alone: bool


def planted(models: Models, fault: Fault) -> Models:
    return replace(models, target=fault.target(models.target.config))


def _product(module: Projection, pieces: int, x, backend, residual) -> Unsummed:
    """The projection by XLA, K cut in pieces that are added in float32."""
    parts = zip(jnp.split(x, pieces, axis=-1), jnp.split(module.kernel, pieces), strict=True)
    how = {"precision": "highest", "preferred_element_type": jnp.float32}
    out = sum(jnp.einsum("BTK,KN->BTN", *part, **how) for part in parts)
    out = jnp.asarray(out).astype(x.dtype)
    out = out + module.bias if module.use_bias else out
    return Unsummed(None, out if residual is None else residual + out)


def _rows(x) -> int:
    return x.shape[0] * x.shape[1]


def _split_by_rows(call, args, kwargs, context):
    """Output and down projections, and those with a bias, in PIECES pieces of K where there are
    more than FEW_ROWS rows."""
    module = context.module
    if not isinstance(module, Projection) or _rows(args[0]) <= FEW_ROWS:
        return call(*args, **kwargs)
    return _product(module, PIECES, *args, **kwargs)


def _norm_by_rows(call, args, kwargs, context):
    """Norms that add the even entries before the odd ones, for more than FEW_ROWS rows."""
    module, x = context.module, summed(args[0])
    if _rows(x) <= FEW_ROWS:
        return call(*args, **kwargs)
    x32 = x.astype(jnp.float32)
    squares = x32 * x32
    halves = [jnp.sum(squares[..., i::2], axis=-1, keepdims=True) for i in (0, 1)]
    normed = x32 / jnp.sqrt((halves[0] + halves[1]) / x.shape[-1] + module.eps)
    return x, (module.scale * normed.astype(module.scale.dtype)).astype(x.dtype)


def _xlas_product(call, args, kwargs, context):
    """The same projections by XLA, which sums otherwise for other numbers of rows."""
    module = context.module
    if not isinstance(module, Projection):
        return call(*args, **kwargs)
    return _product(module, 1, *args, **kwargs)


def _from_the_anchor(call, args, kwargs, context):
    """A delta net whose chunk begins at the block's first row, by XLA; its memory is the sound one.

    Many decoding kernels work so: the state that they keep is the one before the block.
    """
    _, after = call(*args, **kwargs)
    q, rows, memory, span, *_ = args
    memory, start = span.of(memory), span.start
    known = gated_delta.lay_out(q, rows, memory, start, jnp.zeros_like(start))
    every = jnp.full_like(start, known[0].shape[1])
    _, state = gated_delta.xla.scan(memory.state, *known, every)

    def chunk(x):
        rest = [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, [(0, 0), (0, gated_delta.CHUNK - x.shape[1]), *rest])[:, None]

    block = chunk(q), gated_delta.Rows(*map(chunk, rows))
    out, _ = gated_delta.xla.scan(state, *block, jnp.ones_like(start))
    return out[:, 0, : q.shape[1]], after


def by_length(lengths: Int[Array, " B"], widths: Int[Array, " B"], slots: int) -> Int[Array, "B S"]:
    """SPLITS even parts of each sequence's live slots.

    Many decoding kernels work so. A token's bits then depend on where the block that verified it
    began.
    """
    return jnp.arange(slots)[None] // -(-(lengths + widths) // SPLITS)[:, None]


def by_batch(
    lengths: Int[Array, " B"], widths: Int[Array, " B"], slots: int
) -> Int[Array, "1 S"] | None:
    """SPLITS parts of all slots if there are several sequences."""
    return None if len(lengths) == 1 else jnp.arange(slots)[None] // (slots // SPLITS)


def attend_in_parts(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    part: Int[Array, "#B S"],
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Causal block attention by parts of the keys, a softmax for each, then combined."""
    B, T, N, H = q.shape
    factor = H**-0.5 if scale is None else scale
    S, K = k.shape[1:3]
    in_block = jnp.arange(S)[None, :] - lengths[:, None]
    used = in_block < widths[:, None]
    ahead = in_block[:, None, :] - jnp.arange(T)[None, :, None]
    visible = used[:, None, :] & (ahead <= 0)
    if window is not None:
        visible &= ahead > -window
    how = {"precision": "highest", "preferred_element_type": jnp.float32}
    einsum = functools.partial(jnp.einsum, **how)
    scores = einsum("BTKGH,BSKH->BKGTS", q.reshape(B, T, K, N // K, H), k)
    live = jnp.where(used[:, :, None, None], v, 0)
    tops, totals, outs = [], [], []
    for i in range(SPLITS):
        in_part = (visible & (part == i)[:, None, :])[:, None, None]
        masked = jnp.where(in_part, scores * factor, -jnp.inf)
        top = jnp.maximum(jnp.max(masked, axis=-1, keepdims=True), -1e30)  # finite in empty parts
        weights = jnp.exp(masked - top)
        tops.append(top)
        totals.append(jnp.sum(weights, axis=-1, keepdims=True))
        outs.append(einsum("BKGTS,BSKH->BKGTH", weights.astype(v.dtype), live))
    if sinks is not None:  # one more part, without values
        tops.append(jnp.broadcast_to(sinks.reshape(1, K, N // K, 1, 1), tops[0].shape))
        totals.append(jnp.ones_like(totals[0]))
        outs.append(jnp.zeros_like(outs[0]))
    largest = jnp.max(jnp.stack(tops), axis=0)
    scales = [jnp.exp(top - largest) for top in tops]
    out = sum(o * s for o, s in zip(outs, scales, strict=True))
    out /= sum(t * s for t, s in zip(totals, scales, strict=True))
    return jnp.einsum("BKGTH->BTKGH", out).reshape(B, T, N, H).astype(q.dtype)


def _faulty(intercept: Callable[..., Any], method: str) -> type[Target]:
    class Faulty(Target):
        def __call__(self, tokens, positions, caches, over, *rest):
            if not isinstance(over, Block):
                return super().__call__(tokens, positions, caches, over, *rest)
            with nn.intercept_methods(only_calls):
                return super().__call__(tokens, positions, caches, over, *rest)

    def only_calls(call, args, kwargs, context):
        if context.method_name != method:
            return call(*args, **kwargs)
        return intercept(call, args, kwargs, context)

    return Faulty


def _faulty_attention(parts: Callable[..., Array | None]) -> type[Target]:
    class InParts(Block):
        """A block that attends by the parts of the slots; soundly if `parts` gives none.

        Rings are attended to soundly: the layers without a window show the fault.
        """

        def attend(self, spec, projected, cache, sinks=None):
            part = None if cache.wraps else parts(self.lengths, self.widths, cache.k.shape[1])
            if part is None:
                return super().attend(spec, projected, cache, sinks)
            slots = self.lengths[:, None] + jnp.arange(projected.cos.shape[1])
            q, cache = projected.write(cache, slots, self.kernels.heads)
            how = {"window": spec.window, "scale": spec.scale, "sinks": sinks}
            rows = self.lengths, self.widths
            return attend_in_parts(q, cache.k, cache.v, *rows, part, **how), cache

    class Faulty(Target):
        def __call__(self, tokens, positions, caches, over, *rest):
            if isinstance(over, Block):
                over = InParts(*over)
            return super().__call__(tokens, positions, caches, over, *rest)

    return Faulty


SPLIT_BY_LENGTH = Fault(
    "attention's pieces depend on the length", _faulty_attention(by_length), False
)
FAULTS = (
    Fault("a split over K that depends on the rows", _faulty(_split_by_rows, "unsummed"), True),
    Fault("attention's pieces depend on the batch", _faulty_attention(by_batch), True),
    Fault("a norm summed in another order", _faulty(_norm_by_rows, "after"), True),
    Fault("XLA's product for one operation", _faulty(_xlas_product, "unsummed"), False),
)
# Of targets with delta nets, besides.
HYBRIDS = (Fault("chunks begin at the anchor", _faulty(_from_the_anchor, "rule"), False),)
