"""The gated delta rule on Hopper: `triton`'s kernels, and for many rows of few texts a walk that
brings them through shared memory. The bits are the same."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.gated_delta import mosaic_walk, triton
from pallas_kernels.gated_delta.grid import CHUNK, Memory, Rows, Span
from pallas_kernels.gated_delta.triton_finish import finish as finish
from pallas_kernels.gated_delta.triton_inputs import next_inputs as next_inputs


def takes(key_dim: int, value_dim: int) -> bool:
    """Whether there are kernels for such heads: `triton`'s are of powers of two."""
    return key_dim in (32, 64, 128) and value_dim >= 32 and value_dim & (value_dim - 1) == 0


# One inner jit: the call sites of all layers then share one compiled kernel.
@jax.jit
def gated_delta(
    q: Float[Array, "B T Hk dk"], rows: Rows, memory: Memory, span: Span
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "S Hv dk dv"]]:
    """The contract's; the state is the one before row `kept`.

    With Qwen3.5-35B-A3B's heads the walk took 103 µs of 512 rows, where the other took 244, and of
    blocks of 16, 8, 4 and 1 rows 7.1, 5.0, 3.6 and 3.0 in place of 9.9, 6.4, 4.3 and 2.9; of eight
    blocks of 16 rows 41 in place of 38 (one H200, benchmarks/h200-delta-rows.json).
    """
    B, T = q.shape[:2]
    walk = mosaic_walk if T > CHUNK or B == 1 < T else triton
    return walk.gated_delta(q, rows, memory, span)
