"""The two halves of a fused product: the gate's columns and the up projection's."""

from jaxtyping import Array, Float

Firsts = tuple[int, int]  # the first column of the gate, and of the up projection


def halves(
    x: Float[Array, "*lead FF"], firsts: Firsts | None = None
) -> tuple[Float[Array, "*lead F"], Float[Array, "*lead F"]]:
    """The gate and the up projection; without `firsts` they lie in this order."""
    F = x.shape[-1] // 2
    gate, up = firsts or (0, F)
    return x[..., gate : gate + F], x[..., up : up + F]
