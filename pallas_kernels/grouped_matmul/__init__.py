"""GEMMs over rows grouped by expert: the contract and its entry points.

Axes: R rows (each token once for every expert it goes to), E experts, K summed over, N columns,
F an expert's MLP width. Rows are sorted by expert: the first sizes[0] belong to expert 0, and so
on. The sizes add up to R or less: what is in the last rows then, as input or result, is nobody's.
Products are summed in float32; results have x's dtype.
- grouped_matmul: every row times its expert's w, rounded once.
- grouped_gate_up: w holds F columns of the gate and F of the up projection, from the columns
  `firsts` on (None: the gate's first). Both products are rounded to x's dtype, as a projection's
  output is; silu(gate) * up is rounded once more.
- clamped_gate: gpt-oss's activation in place of SwiGLU's, (up + 1) · gate · σ(ALPHA · gate), of a
  gate of at most LIMIT and an up within ± LIMIT, in float32 and rounded once. Products with biases
  come before it, so gate and up are two arrays.
- probabilities or sigmoids, and weighted_sum: what comes before and after, by token. These and
  clamped_gate are the reference's, which XLA compiles, with all others but "cpu"; "canonical" has
  sigmoids alone, and the rest in the next four.
- route, tiles_of_tokens, of_tokens, expert_sum: the same layer in fewer kernels, with "canonical"
  alone (`BY_TOKENS`). Row t·k + i is token t's for its i-th expert and stays where it is: tiles
  name their rows. Biases and activations are in the products, rounded as above.
A row's bits depend only on that row and its expert's w: not on where the row lies, on how many
rows its expert has, or on the other rows; with "canonical" and "cpu" not on R either. (With the
others they may: see the step's fixed shapes.)

A weight may also be `Quantised`: products with it are those with the array that it stands for, in
x's dtype. "triton", "canonical" and "cpu" convert what they multiply; the others make the arrays of
all experts before the product.

"reference" and "xla" take any shape and dtype. "triton" needs bfloat16 and an NVIDIA GPU of compute
capability 8.0 or more, and reads the weights of no expert without rows; it refuses with a
ValueError what its tiles do not divide. "canonical", for Hopper, has the same products.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import backend_of, device_refusal
from pallas_kernels.grouped_matmul import beside as beside
from pallas_kernels.grouped_matmul import canonical, cpu, reference, triton, xla
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised_for

BACKENDS = {
    "canonical": canonical,
    "cpu": cpu,
    "xla": xla,
    "triton": triton,
    "reference": reference,
}
BY_TOKENS = ("canonical",)  # whose rows need not lie by expert
CONVERTING = ("canonical", "cpu", "triton")  # kept weights, part by part


class Sizes(NamedTuple):
    """What a backend must be able to take: a weight's K and columns (gate_up's: one half)."""

    K: int
    columns: int
    dtype: Any


def grouped_matmul(
    x: Float[Array, "R K"],
    w: Float[Array, "E K N"] | Quantised,
    sizes: Int[Array, " E"],
    *,
    backend: str,
) -> Float[Array, "R N"]:
    """Every row times its expert's w; see the contract. ValueError: no such backend, shape."""
    return _backend(backend).grouped_matmul(x, _taken(x, w, backend), sizes)


def grouped_gate_up(
    x: Float[Array, "R K"],
    w: Float[Array, "E K FF"] | Quantised,
    sizes: Int[Array, " E"],
    firsts: Firsts | None = None,
    *,
    backend: str,
) -> Float[Array, "R F"]:
    """silu(x @ gate) * (x @ up) by expert; see the contract. ValueError as `grouped_matmul`."""
    return _backend(backend).grouped_gate_up(x, _taken(x, w, backend), sizes, firsts)


def clamped_gate(
    gate: Float[Array, "R F"], up: Float[Array, "R F"], *, backend: str
) -> Float[Array, "R F"]:
    """gpt-oss's activation; see the contract. ValueError as `grouped_matmul`."""
    return _by_token(backend).clamped_gate(gate, up)


def probabilities(logits: Float[Array, "M E"], *, backend: str) -> Float[Array, "M E"]:
    """softmax of a router's logits, in float32; ValueError: no such backend."""
    return _by_token(backend).probabilities(logits)


def sigmoids(logits: Float[Array, "M E"], *, backend: str) -> Float[Array, "M E"]:
    """Each logit's sigmoid, in float32; ValueError: no such backend."""
    return (canonical if backend == "canonical" else _by_token(backend)).sigmoids(logits)


def weighted_sum(
    outputs: Float[Array, "M k D"], weights: Float[Array, "M k"], *, backend: str
) -> Float[Array, "M D"]:
    """Σ weights · outputs over k in float32, from the first to the last; ValueError as above."""
    return _by_token(backend).weighted_sum(outputs, weights)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    # The canonical form is measured only on Hopper.
    kinds = {"cpu": "cpu", "triton": "triton", "canonical": "mosaic_gpu"}
    lacking = device_refusal(kinds[backend], device) if backend in kinds else None
    if lacking or backend not in ("triton", "canonical"):
        return lacking
    dtype = jnp.dtype(sizes.dtype).name
    if dtype != "bfloat16":
        return f"has only bfloat16, not {dtype}"
    if not triton.divides(sizes.K, sizes.columns):
        return f"takes K in 64s and columns in 16s, not {sizes.K} and {sizes.columns}"
    return None


def _taken(x: Float[Array, "R K"], w: Any, backend: str) -> Any:
    """The weights as the backend takes them."""
    if isinstance(w, Quantised) and backend not in CONVERTING:
        return dequantised_for(w, x)
    return w


def _backend(name: str):
    return backend_of("grouped matmul", name, BACKENDS)


def _by_token(name: str):
    if name == "canonical":
        raise ValueError("canonical experts have this in route, of_tokens or expert_sum")
    return cpu if _backend(name) is cpu else reference
