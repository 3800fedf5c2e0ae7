"""A layer's norms and products as modules, and what a product leaves for the norm after it.

Axes: B batch, T tokens, D width.
"""

from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from jflash.layers.gather import gather, share
from jflash.layers.sums import Sums, left, normed, summed
from jflash.records.leaves import Leaf, declare
from pallas_kernels.matmul import Unsummed, added, matmul, partial_products, unsummed
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) in float32, to the scale's dtype, then times scale: transformers' order.

    `dtype`: the scale's, where it differs from the model's.
    """

    features: int
    eps: float
    axis: str = "embed"
    dtype: str = ""

    def setup(self) -> None:
        leaf = Leaf((self.features,), (self.axis,), dtype=self.dtype)
        self.scale = declare(self, "scale", leaf)

    def __call__(self, x: Float[Array, "*lead D"], backend: str = "xla") -> Float[Array, "*lead D"]:
        return rms_norm(x, self.scale, self.eps, backend=backend)

    def after(
        self, sums: Sums, backend: str
    ) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"]]:
        """The sum, and its norm."""
        return normed(sums, self.scale, self.eps, backend)

    def over_all(
        self, x: Float[Array, "*lead D"], shards: int, backend: str
    ) -> Float[Array, "*lead D"]:
        """This device's columns of rows of which each of `shards` devices has some."""
        scale = gather(self.scale, shards)
        return share(rms_norm(gather(x, shards), scale, self.eps, backend=backend), shards)


class Kernel(nn.Module):
    """A matrix, or one for every expert, and a bias as parameters without a product."""

    leaf: Leaf
    use_bias: bool = False

    def setup(self) -> None:
        self.kernel = declare(self, "kernel", self.leaf)
        if self.use_bias:
            self.bias = declare(self, "bias", self.leaf.bias)


class Projection(Kernel):
    """x @ kernel [in, out] (+ bias); in float32 it is exact float32 on GPUs too (no TF32).

    If devices share the layer, each has some columns of the kernel and of the product; x is whole.
    """

    def __call__(
        self,
        x: Float[Array, "B T _"],
        backend: str = "xla",
        residual: Float[Array, "B T _"] | None = None,
    ) -> Float[Array, "B T _"]:
        """The product, added to `residual` if given."""
        return summed(self.unsummed(x, backend, residual))

    def unsummed(
        self, x: Float[Array, "B T _"], backend: str, residual: Float[Array, "B T _"] | None
    ) -> Sums:
        """The same, for a norm to add up."""
        lead = x.shape[:-1]
        flat = x.reshape(-1, x.shape[-1])
        if self.use_bias:
            out = matmul(flat, self.kernel, backend=backend, columns=self.leaf.columns)
            out = added(out, self.bias, backend=backend)
            out = out.reshape(*lead, -1)
            return Unsummed(
                None, out if residual is None else added(residual, out, backend=backend)
            )
        if residual is not None:
            residual = residual.reshape(-1, residual.shape[-1])
        how: dict[str, Any] = dict(backend=backend, columns=self.leaf.columns)
        sums = unsummed(flat, self.kernel, residual, **how)
        return jax.tree.map(
            lambda part: part.reshape(*part.shape[:-2], *lead, part.shape[-1]), sums
        )

    def pieces(self, x: Float[Array, "B T _"], backend: str) -> Float[Array, "P B T _"]:
        """The product as the backend's partial sums; with a bias it is one piece."""
        if self.use_bias:
            return self(x, backend)[None]
        flat, columns = x.reshape(-1, x.shape[-1]), self.leaf.columns
        flat = partial_products(flat, self.kernel, backend=backend, columns=columns)
        return flat.reshape(-1, *x.shape[:2], flat.shape[-1])


class Output(Projection):
    """A layer's last product: of shards' columns of x, and its result is whole on every device.

    If the kernel is whole on every device too, no result is gathered.
    """

    shards: int = 1
    whole: bool = False

    def unsummed(self, x, backend, residual) -> Sums:
        rows = gather(x, self.shards)
        if self.whole or self.shards == 1:
            return super().unsummed(rows, backend, residual)
        own: Any = super().unsummed(rows, backend, None)
        return self.gathered(own, backend, residual)

    def gathered(self, own: Unsummed, backend: str, residual: Any) -> Sums:
        """Of this device's columns of the product the whole, with the residual to be added."""
        return left(own, residual, self.shards, backend)


def output(spec: Any, rows: int, width: int, axis: str, use_bias: bool = False) -> Output:
    """The last product of a layer to `width` columns, from `rows` of each device that shares it."""
    shape = (rows * spec.shards, width if spec.whole_out else width // spec.shards)
    leaf = Leaf(shape, (axis, "embed"), whole=width)
    return Output(leaf, use_bias, shards=spec.shards, whole=bool(spec.whole_out))
