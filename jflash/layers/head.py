"""From hidden states, by a head, to what is read of the logits: the best, how sure it is, or all.

With several `shards` each device has as many rows of the head, and of the logits as many columns.
Axes: B batch, T tokens, D width, V vocabulary.
"""

from jaxtyping import Array, Float, Int

from jflash.layers.gather import best_of, gather_if_read, surest_of
from pallas_kernels import matmul
from pallas_kernels.matmul import Head
from pallas_kernels.matmul.float8.rounded import Rounded


def head_best(
    hidden: Float[Array, "B T D"], head: Head, backend: str, shards: int
) -> Int[Array, "B T"]:
    """The id of each row's largest logit, the lowest of equal ones."""
    x = hidden.reshape(-1, hidden.shape[-1])
    if shards == 1:
        best = matmul.head_argmax(x, head, backend=backend)
    else:
        best = best_of(*matmul.head_largest(x, head, backend=backend), _held(head), shards)
    return best.reshape(hidden.shape[:2])


def best_and_probability(
    hidden: Float[Array, "B T D"], head: Head, backend: str, shards: int
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The id of each row's largest logit, and its probability, without writing logits."""
    x = hidden.reshape(-1, hidden.shape[-1])
    found = matmul.head_confidence(x, head, backend=backend)
    best, sums = surest_of(*found, _held(head), shards)
    return best.reshape(hidden.shape[:2]), (1 / sums).reshape(hidden.shape[:2])


def head_logits(
    hidden: Float[Array, "B T D"], head: Head, backend: str, shards: int
) -> Float[Array, "B T _"]:
    """All logits in float32, on every device: `shards` times as many as the head has rows."""
    logits = matmul.head_logits(hidden.reshape(-1, hidden.shape[-1]), head, backend=backend)
    return gather_if_read(logits, shards).reshape(*hidden.shape[:2], -1)


def _held(head: Head) -> int:
    """The logits that a device makes of a row."""
    return head.shape[1 if isinstance(head, Rounded) else 0]
