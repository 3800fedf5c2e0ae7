"""The gated delta rule's case of scripts/bench_kernels.py: a step of many layers' states.

It has the gated norm too, which keeps the call's rows.

Every call has a memory of its own, as every layer has, and they go round: the next turn of the loop
continues each where it was, in place. Rows are float32 whatever the model's dtype is.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash.bench.kernels.times import Case, Where, copies_of, normal, relative_error
from pallas_kernels import gated_delta as op
from pallas_kernels.choice import check
from pallas_kernels.shapes import DeltaShape

FLOAT32 = 4  # bytes


class Carry(NamedTuple):
    """What a call hands to the next one: the queries, and all memories, its own last."""

    q: Float[Array, "B T Hk dk"]
    memories: tuple[op.Memory, ...]


def delta_case(where: Where, shape: DeltaShape) -> Case:
    """The rule over a block at the same place of a chunk in every call; its error is the rows'."""
    op_name, shape_name, _, backend = where
    check("gated delta", op, backend, [op.Sizes(shape.dk, shape.dv)], jax.devices()[0])
    step = functools.partial(_step, shape.ahead)
    q = normal(0, (shape.B, shape.T, shape.Hk, shape.dk), "float32", shape.dk**-1.0)
    memories = tuple(_memory(shape, i) for i in range(copies_of(bytes_of(shape))))

    def call(carry: Carry, _: tuple[()], *rows: Array) -> Carry:
        out, memory = step(carry.q, op.Rows(*rows), carry.memories[0], backend)
        first = jnp.clip(out.ravel()[0], -1, 1)
        return Carry(carry.q.at[0, 0, 0, 0].set(first), (*carry.memories[1:], memory))

    def error(rows: tuple[Array, ...]) -> float:
        run = jax.jit(step, static_argnums=3)
        both = [run(q, op.Rows(*rows), memories[0], by)[0] for by in (backend, "reference")]
        return relative_error(*both)

    return Case(
        (op_name, shape_name, "float32", backend),
        calls={backend: call},
        x=Carry(q, memories),
        numbers=(),
        make_inputs=lambda i: tuple(_rows(shape, shape.T, i)),
        bytes=bytes_of(shape),
        error=error,
    )


def bytes_of(shape: DeltaShape) -> int:
    """The state read and written; the call's rows read, kept and answered, earlier ones read."""
    B, T, Hk, Hv, dk, dv, ahead = shape
    row = Hk * dk + Hv * dv + 2 * Hv  # key, value, decay and weight
    return FLOAT32 * B * (
        2 * Hv * dk * dv + T * (Hk * dk + Hv * dv) + (2 * T + ahead) * row
    )  # fmt: skip


def _step(ahead: int, q: Array, rows: op.Rows, memory: op.Memory, backend: str):
    """A block of which any row may be rolled back, from the rule to its normed outputs."""
    real = jnp.full_like(memory.base, q.shape[1])
    span = op.Span(memory.base + ahead, real, jnp.zeros_like(real))
    out, state = op.gated_delta(q, rows, memory, span, backend=backend)
    Hv, dv = out.shape[2:]
    gate = op.Gate(jnp.ones((*q.shape[:2], Hv * dv)), 0, jnp.ones(dv), 1e-6)
    return op.finish(out, gate, rows, memory._replace(state=state), span, backend=backend)


def _memory(shape: DeltaShape, seed: int) -> op.Memory:
    state = normal(seed, (shape.B, shape.Hv, shape.dk, shape.dv), "float32", 0.1)
    return op.Memory(state, jnp.zeros(shape.B, jnp.int32), _rows(shape, 2 * op.CHUNK, -seed - 1))


def _rows(shape: DeltaShape, count: int, seed: int) -> op.Rows:
    """Rows that forget a tenth of a state: keys of about length 1, half of a value is new."""
    k, v, g, beta = (
        normal(4 * seed + i, (shape.B, count, *size), "float32", scale)
        for i, (size, scale) in enumerate((
            ((shape.Hk, shape.dk), shape.dk**-0.5), ((shape.Hv, shape.dv), 1.0),
            ((shape.Hv,), 0.1), ((shape.Hv,), 1.0),
        ))
    )  # fmt: skip
    return op.Rows(k, v, -jnp.abs(g), jax.nn.sigmoid(beta))
