"""Which backend serves each operation of a step: one record, which `jflash.backends` fills.

Knows names only. Everything that computes is handed it, so nothing chooses for itself.
"""

from typing import NamedTuple

AUTO = "auto"  # as a backend's name: the best that the device has


class Kernels(NamedTuple):
    """The backends, by name; each op's package in pallas_kernels lists those that it has."""

    attention: str = "xla"  # block_attention
    matmul: str = "xla"
    heads: str = "xla"  # heads_to_cache
    experts: str = "xla"  # grouped_matmul, of a mixture of experts


XLA = Kernels()
BACKENDS = tuple(f"{op}_backend" for op in Kernels._fields)  # as options and results name them
