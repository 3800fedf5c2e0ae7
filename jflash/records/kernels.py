"""The backend of each operation of a step: one record, which `jflash.devices.backends` fills.

This file knows only names. Everything that computes gets the record, and chooses nothing itself.
"""

from typing import NamedTuple

AUTO = "auto"  # as a backend's name: the best that the device has
# Backends of an operation whose results for a row are the same bits in every program. A gather adds
# nothing, so it has no others.
ONE_ARITHMETIC = {
    "attention": ("cpu", "canonical"),
    "matmul": ("cpu", "canonical"),
    "heads": ("cpu", "triton"),
    "experts": ("cpu", "canonical"),
    "norm": ("cpu", "canonical"),
    "delta": ("cpu", "mosaic_gpu", "triton"),
}


class Kernels(NamedTuple):
    """The backends, by name; each op's package in pallas_kernels lists those that it has."""

    attention: str = "xla"  # block_attention
    matmul: str = "xla"
    heads: str = "xla"  # heads_to_cache
    experts: str = "xla"  # grouped_matmul, of a mixture of experts
    norm: str = "xla"  # rms_norm
    delta: str = "xla"  # gated_delta, of a hybrid
    gather: str = "xla"  # of what devices that share a model exchange

    @property
    def chunk(self) -> "Kernels":
        """The backends of a prompt's chunk: the step's if they are of one arithmetic, else XLA."""
        others = dict.fromkeys(set(ONE_ARITHMETIC) - self.one_arithmetic - {"experts"}, "xla")
        return self._replace(**others)

    @property
    def one_arithmetic(self) -> frozenset[str]:
        """The operations whose bits for a row do not depend on the program."""
        return frozenset(op for op, names in ONE_ARITHMETIC.items() if getattr(self, op) in names)


XLA = Kernels()
BACKENDS = tuple(f"{op}_backend" for op in Kernels._fields)  # as options and results name them
