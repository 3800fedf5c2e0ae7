"""The gated delta rule: a recurrent state for each head, which can be rolled back.

For one token and value head h, with key head h // r, r = Hv / Hk, and the state S [dk, dv]:
    S = e^g S;  d = beta (v - k S);  S = S + k d;  out = q S        S is 0 before position 0
all in float32. Axes: B batch, S slots of the memory, T rows, C CHUNK positions, Hk and Hv heads, dk
and dv their widths, U taps of the convolution, D its channels.

A state cannot be cut at a length, so the rows that may be rolled back are kept beside it. `Memory`
has the state before position `base`, and the rows since, position p at place p % (2 · CHUNK). A
call computes these and its new rows, and keeps the state at the last border before the rows that
may still be rolled back. With "mosaic_gpu" and "triton" every position is a border; with the
others, which put rows on the grid of absolute positions and run whole chunks over them, the
multiples of CHUNK are. Rollback is a smaller `start` at the next call.

- gated_delta: the rows of a `Span`. If its `kept` is less than its `real`, `real` is at most CHUNK.
  base ≤ start < base + 2 · CHUNK. It gives the outputs and the state at the border, and `finish`
  the memory.
- inputs: its inputs from the projection: a causal convolution with SiLU, queries and keys of length
  1 (queries also times dk^-½), g = -exp(A_log) · softplus(a + dt_bias), beta = σ(b).
- next_inputs: the same of rows from `start` on, out of the whole projection; the convolution's
  earlier rows lie in a ring, position p at place p % R, where R ≥ CHUNK + U - 1.
- recurrent: the rule over whole sequences from a state of 0, several in a row, for training.
- gated_norm: rms(out) · scale · silu(z) over dv.
- finish: the gated norm of a call's outputs, and the memory with its rows.

One body computes every chunk: a row's place in its chunk is absolute, and rows after it add exact
zeros. With "triton" one body computes every row, wherever the state lies, and "mosaic_gpu", which
is sooner where there are many rows, has its bits. With these and "cpu" a row's outputs, and the
state kept, depend only on the tokens up to it: not on T, B, rollbacks, or whether a prompt or a
step brought it. With "xla" this holds inside one program. "mosaic_gpu" is for Hopper and "triton"
for NVIDIA GPUs from sm80. "reference" is the rule, token by token.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.choice import backend_of, device_refusal
from pallas_kernels.gated_delta import cpu, mosaic_gpu, reference, triton, xla
from pallas_kernels.gated_delta.grid import CHUNK as CHUNK
from pallas_kernels.gated_delta.grid import Memory as Memory
from pallas_kernels.gated_delta.grid import Rows as Rows
from pallas_kernels.gated_delta.grid import Span as Span
from pallas_kernels.gated_delta.grid import border_of, commit, lay_out, outputs
from pallas_kernels.gated_delta.in_ring import put, with_earlier

BACKENDS = {
    "mosaic_gpu": mosaic_gpu, "triton": triton, "cpu": cpu, "xla": xla, "reference": reference,
}  # fmt: skip
BY_ROWS = (mosaic_gpu, triton)  # the others run whole chunks


class Sizes(NamedTuple):
    """The sizes that a backend must support."""

    key_dim: int
    value_dim: int


class Heads(NamedTuple):
    """The split of the convolved columns into queries, keys and values. Static."""

    key_heads: int
    key_dim: int


class Gate(NamedTuple):
    """What `gated_norm` takes beside outputs: z are the Hv · dv columns of `fused` from `first`
    on, and the norm is in their dtype."""

    fused: Float[Array, "B T F"]
    first: int
    scale: Float[Array, " dv"]
    eps: float


def gated_delta(
    q: Float[Array, "B T Hk dk"],
    rows: Rows,
    memory: Memory,
    span: Span,
    *,
    backend: str,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "S Hv dk dv"]]:
    """See the module's contract. `backend` is one of BACKENDS; any other name is a ValueError."""
    module = _backend(backend)
    if module in BY_ROWS:
        return module.gated_delta(q, rows, memory, span)
    own = span.of(memory)
    chunks = lay_out(q, rows, own, span.start, span.real)
    whole = (border_of(span) - own.base) // CHUNK
    out, state = module.scan(own.state, *chunks, whole)
    return outputs(out, span.start - own.base, q.shape[1]), span.into(memory.state, state)


def finish(
    out: Float[Array, "B T Hv dv"],
    gate: Gate,
    rows: Rows,
    memory: Memory,
    span: Span,
    *,
    backend: str,
) -> tuple[Float[Array, "B T Hv dv"], Memory]:
    """The normed outputs, and the memory; the one given has the state that `gated_delta` gave."""
    if (module := _backend(backend)) in BY_ROWS:
        return module.finish(out, *gate, rows, memory, span)
    return gated_norm(out, gate, backend=backend), commit(memory, rows, span)


def inputs(
    raw: Float[Array, "B _ D"],
    b: Float[Array, "B T Hv"],
    a: Float[Array, "B T Hv"],
    weights: Float[Array, "D U"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    *,
    heads: Heads,
    backend: str,
) -> tuple[Float[Array, "B T Hk dk"], Rows]:
    """Queries and the state's inputs; `raw` begins U - 1 rows before the first row."""
    arithmetic = _backend(backend)
    if arithmetic in BY_ROWS:
        raise ValueError(f"the {backend} backend makes inputs from a ring: next_inputs")
    mixed = arithmetic.convolve(raw, weights).astype(jnp.float32)
    width = heads.key_heads * heads.key_dim
    q, k, v = jnp.split(mixed, [width, 2 * width], axis=-1)
    q, k = (x.reshape(*b.shape[:2], heads.key_heads, -1) for x in (q, k))
    g, beta = arithmetic.gates(*(x.astype(jnp.float32) for x in (a, b, a_log, dt_bias)))
    rows = Rows(arithmetic.unit(k), v.reshape(*b.shape, -1), g, beta)
    return arithmetic.unit(q) * heads.key_dim**-0.5, rows


def next_inputs(
    fused: Float[Array, "B T F"],
    ring: Float[Array, "S R D"],
    weights: Float[Array, "D U"],
    a_log: Float[Array, " Hv"],
    dt_bias: Float[Array, " Hv"],
    span: Span,
    *,
    heads: Heads,
    firsts: tuple[int, int, int],
    backend: str,
) -> tuple[Float[Array, "B T Hk dk"], Rows, Float[Array, "S R D"]]:
    """The inputs, and the ring with the call's rows; `firsts` are raw's, b's and a's columns."""
    if (module := _backend(backend)) in BY_ROWS:
        return module.next_inputs(fused, ring, weights, a_log, dt_bias, span, heads, firsts)
    widths = len(weights), len(a_log), len(a_log)
    raw, b, a = (fused[..., x : x + n] for x, n in zip(firsts, widths, strict=True))
    rows = with_earlier(ring, raw, span, weights.shape[1])
    q, rows = inputs(rows, b, a, weights, a_log, dt_bias, heads=heads, backend=backend)
    return q, rows, put(ring, raw, span)


def recurrent(
    q: Float[Array, "B T Hk dk"], rows: Rows, fresh: Bool[Array, "B T"]
) -> Float[Array, "B T Hv dv"]:
    """Whole sequences in rows, by the reference; the state is 0 before each `fresh` token."""
    return reference.recurrent(q, rows, fresh)


def gated_norm(
    out: Float[Array, "B T Hv dv"], gate: Gate, *, backend: str
) -> Float[Array, "B T Hv dv"]:
    """rms(out) · scale · silu(z) in z's dtype; `out` is rounded to it before."""
    arithmetic, (fused, first, scale, eps) = _backend(backend), gate
    if arithmetic in BY_ROWS:
        raise ValueError(f"the {backend} backend norms while it keeps a call's rows: finish")
    z = fused[..., first : first + out.shape[2] * out.shape[3]].reshape(out.shape)
    return arithmetic.gated_norm(out, z, scale, eps)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    if backend not in ("cpu", "mosaic_gpu", "triton"):
        return None
    own = f"not {sizes.key_dim} and {sizes.value_dim}"
    if backend == "mosaic_gpu" and not mosaic_gpu.takes(*sizes):
        return f"has key heads of 32, 64 or 128 dims and value heads of 32, 64, 128 …, {own}"
    if backend == "triton" and any(x < 16 or x & (x - 1) for x in sizes):
        return f"has heads of 16, 32, 64 … dims, {own}"
    return device_refusal(backend, device)


def _backend(name: str):
    return backend_of("gated delta", name, BACKENDS)
