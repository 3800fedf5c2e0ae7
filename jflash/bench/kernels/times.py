"""Times one kernel at a time: microseconds, share of the read bandwidth, error.

A loop on the device calls the op again and again. Each call takes the previous result and other
inputs, which together exceed the caches. XLA makes the loop's body one CUDA graph, if the op can go
into one; the loop's overhead of about 8 µs is shared by the calls of a body.
A whole step may gain less than an isolated kernel: scripts/benchmark.py measures that.
This module knows no op: `jflash.bench.kernels.cases` does.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jflash.compiled.tiles import settled

# All inputs take READ_BYTES, ten L2 caches of an H200, in at most MOST_COPIES sets. Each set is one
# call in the loop's body, so more of them compile longer.
READ_BYTES, MOST_COPIES = 2**29, 32
CACHE_BYTES = 2**27  # with less a result may come from the L2 cache, and the table says so


Where = tuple[str, str, str, str]  # the names of op, shape, dtype and backend


class Case(NamedTuple):
    """One op at one shape by one backend.

    `calls` has the ways to call it by name, of which the fastest is reported. Each is
    f(x, numbers, *inputs) -> the next x, of the same shape. `numbers` are small inputs that the
    loop carries too, so that nothing that depends on them is computed once before it.
    """

    where: Where
    calls: dict[str, Callable[..., Any]]
    x: Any
    numbers: Any
    make_inputs: Callable[[int], tuple[Any, ...]]  # the i-th set of them
    bytes: int  # that a call has to read and write
    error: Callable[[tuple[Any, ...]], float]  # against the reference, on such a set


def copies_of(count: int) -> int:
    """How many sets of inputs a case of `count` bytes is timed with: one call each in a turn."""
    return min(MOST_COPIES, max(2, -(-READ_BYTES // count)))


class Missing(NamedTuple):
    """A backend that cannot do it here, and why."""

    where: Where
    why: str


def measure(
    case: Case | Missing, bandwidth: float, rounds: int = 9, round_seconds: float = 0.05
) -> dict[str, Any]:
    """A row: the case, and either us, share, error and note, or why there are none.

    bandwidth is in bytes a second; us is the median over `rounds` of the mean of a call; error is
    None if the result was not finite.
    """
    row: dict[str, Any] = dict(zip(("op", "shape", "dtype", "backend"), case.where, strict=True))
    if isinstance(case, Missing):
        return row | {"why": case.why}
    copies = copies_of(case.bytes)
    notes = [] if copies * case.bytes >= CACHE_BYTES else ["partly from the L2 cache"]
    try:
        inputs = [case.make_inputs(i) for i in range(copies)]
        seconds = {
            name: seconds_per_call(call, case, inputs, rounds, round_seconds)
            for name, call in case.calls.items()
        }
        error = case.error(inputs[0])
    except (ValueError, jax.errors.JaxRuntimeError) as problem:
        return row | {"why": " ".join(str(problem).split())[:300]}
    best = min(seconds, key=lambda name: seconds[name])
    notes += [best] if len(seconds) > 1 else []
    return row | {
        "us": seconds[best] * 1e6,
        "share": case.bytes / seconds[best] / bandwidth,
        "bytes": case.bytes,
        "error": error if math.isfinite(error) else None,
        "note": ", ".join(notes),
    }


def seconds_per_call(
    call: Callable[..., Any],
    case: Case,
    inputs: list[tuple[Any, ...]],
    rounds: int,
    round_seconds: float,
) -> float:
    """Median over the rounds; a round is as many turns of the loop as take `round_seconds`."""
    still = jax.tree.map(jnp.zeros_like, case.numbers)  # zeros, but the compiler cannot know it

    def loop(turns, x, numbers, still, inputs):
        def body(_, carry):
            x, numbers = carry
            for one in inputs:
                x = call(x, numbers, *one)
            return x, jax.tree.map(jnp.add, numbers, still)

        return lax.fori_loop(0, turns, body, (x, numbers))[0]

    given = (case.x, case.numbers, still, inputs)
    # A new function each time, so that it is traced anew: `settled` asks for that.
    lower = lambda: jax.jit(functools.partial(loop)).lower(jnp.int32(1), *given)  # noqa: E731
    compiled = settled(lower).compile()

    def run(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(jnp.int32(turns), *given))
        return time.perf_counter() - begin

    run(1)
    turns = max(1, round(round_seconds / max(run(2) / 2, 1e-6)))
    turns = max(1, round(round_seconds / max(run(turns) / turns, 1e-6)))
    return statistics.median(run(turns) for _ in range(rounds)) / turns / len(inputs)


COLUMNS = f"{'op':<16}{'shape':<23}{'dtype':<10}{'backend':<13}{'µs':>9}{'share':>8}{'error':>12}"


def row_text(row: dict[str, Any]) -> str:
    """A line under COLUMNS."""
    named = f"{row['op']:<16}{row['shape']:<23}{row['dtype']:<10}{row['backend']:<13}"
    if "why" in row:
        return f"{named}  {row['why']}"
    error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
    numbers = f"{row['us']:>9.1f}{row['share']:>8.1%}{error:>12}"
    return f"{named}{numbers}  {row['note']}".rstrip()


def table(rows: Iterable[dict[str, Any]]) -> str:
    return "\n".join([COLUMNS, *map(row_text, rows)])


def relative_error(got: Any, want: Any) -> float:
    """The largest difference over the largest entry."""
    one, other = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return float(np.abs(one - other).max() / np.abs(other).max())


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: Any, shape: tuple[int, ...], dtype: str, scale: Any = 1.0) -> Array:
    """Random inputs: a chip is faster on zeros."""
    key = jax.random.key(seed, impl="rbg")
    return (scale * jax.random.normal(key, shape)).astype(dtype)
