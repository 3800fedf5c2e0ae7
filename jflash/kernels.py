"""Which backend serves each operation of a step: one record, which `jflash.backends` fills.

Knows names only. Everything that computes is handed it, so nothing chooses for itself.
"""

from typing import NamedTuple

AUTO = "auto"  # as a backend's name: the best that the device has
ONE_ARITHMETIC = ("cpu",)  # backends whose results for a row are the same bits in every program


class Kernels(NamedTuple):
    """The backends, by name; each op's package in pallas_kernels lists those that it has."""

    attention: str = "xla"  # block_attention
    matmul: str = "xla"
    heads: str = "xla"  # heads_to_cache
    experts: str = "xla"  # grouped_matmul, of a mixture of experts
    norm: str = "xla"  # rms_norm

    @property
    def chunk(self) -> "Kernels":
        """Those of a prompt's chunk: the step's, where any number of rows has the same bits."""
        own = [name if name in ONE_ARITHMETIC else "xla" for name in self]
        return Kernels(*own)._replace(experts=self.experts)


XLA = Kernels()
BACKENDS = tuple(f"{op}_backend" for op in Kernels._fields)  # as options and results name them
