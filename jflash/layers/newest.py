"""The pass of a target's last layer over the ends of prompts, of which only the newest row is read.

That layer's other rows are there for their keys and values: what it computes of a row after its
projection nobody sees. With one arithmetic the rows that are left have the bits that they have
among the others.
Axes: P prompts, C tokens of a chunk, N query heads, H head dim.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from jflash.layers.passes import Block, Pass
from jflash.records.kernels import Kernels


class Newest(NamedTuple):
    """`Chunks` of which only row `rows[p]` is read: it alone attends, as a block of one token.

    Where P is 1, the caches' table is that prompt's row.
    """

    offsets: Int[Array, " P"]
    rows: Int[Array, " P"]
    kernels: Kernels

    def attend(self, spec, projected, cache, sinks=None):
        slots = cache.slots(self.offsets[:, None] + jnp.arange(projected.cos.shape[1]))
        q, cache = projected.write(cache, slots, self.kernels.heads)
        block = Block(self.offsets + self.rows, jnp.ones_like(self.rows), self.kernels)
        return block.seen(spec, self.of(q), cache, sinks), cache

    def of(self, x: Num[Array, "P C *rest"]) -> Num[Array, "P 1 *rest"]:
        """The rows that are read."""
        index = jnp.expand_dims(self.rows, range(1, x.ndim))
        return jnp.take_along_axis(x, index, axis=1, mode="clip")


def rows_read(over: Pass, x: Num[Array, "B T D"]) -> Num[Array, "B _ D"]:
    """The rows of a layer's input that its output is made for: all, but of `Newest`."""
    return over.of(x) if isinstance(over, Newest) else x
