"""The step's GEMMs with what follows them: the contract and its entry points.

Axes: M rows (tokens), K summed over, N columns, F MLP width, V vocabulary. Products are summed in
float32; results have x's dtype.
- matmul: x @ w, rounded once. With a residual r: r + (x @ w, rounded), rounded again, as a layer
  that adds a projection's output does.
- partial_products: pieces [P, M, N] whose sum in float32, in ascending order, rounded to x's dtype,
  is x @ w, for a consumer that can add them up as it reads. P depends only on shape and backend: 1
  is the product itself in x's dtype, and more pieces are float32.
- unsummed: matmul as far as the product's own kernel makes it, for a norm that adds up the rest
  (`rms_norm.after`); `summed` gives matmul itself. `unadded`: the same of a product that is whole.
- gate_up: w holds F columns of the gate and F of the up projection, from the columns `firsts` on
  (None: the gate's first). Both products are rounded to x's dtype, as a projection's output is;
  silu(gate) * up is float32 and rounded once.
- head_argmax: per row the id of the largest float32 logit, the lowest of equal ones. The head is
  [V, K]. The logits are never written.
- head_largest: head_argmax's ids, and per row that logit.
- head_confidence: head_largest's, and per row the sum of exp(logit - largest) in float32. The last
  bits of a sum are a matter of tiles: it is only for a drafter's confidence.
- head_logits: those logits in float32, by "cpu", by "canonical" or else by XLA.
- added: x + y rounded to x's dtype, for a bias or a residual.
A row's bits depend only on that row and w: not on its index, on other rows, or on timing. With
"canonical" and "cpu" they do not depend on M either (with the others they may). The float32 sums
themselves differ by backend.

A weight may also be `Quantised`: products with it are those with the array that it stands for, in
x's dtype. "canonical" converts its tiles inside the kernel; elsewhere the array is made before the
product. Or it may be `Fragments`, the same codes in another order, for "canonical" alone.
Products with a `Rounded` weight, a drafter's, are `float8`'s at every backend, and promise nothing
about bits.

The canonical form. K is cut in P contiguous pieces of equal length, multiples of 64, P a function
only of the whole weight's shape (`pieces.pieces`). Each piece is summed in ascending steps of 16
into one float32 accumulator of the tensor cores, the pieces are added in float32 in ascending
order, and the result is rounded once. Kernel, tile, ring, cluster and CTA are free.
Measured on an H200 (jax 0.11.2, 2026-11-22): 331 runs of 1 to 512 rows over products of Qwen3-8B,
Qwen3-4B, Llama-3.1-8B and SmolLM2 and P from 1 to 8, by mma (Triton, 16 and 32 rows) and wgmma
(Triton, 64 rows; Mosaic GPU, pieces walked and split), gave 0 differing bits; XLA's products
differ from one M to another. `reference.canonical` is the form in plain jnp.

"reference", "xla" and "cpu" take any shape and dtype; "cpu" is for CPUs, and multiplies fixed tiles
of rows. "canonical" is for Hopper and bfloat16, and takes K in 64s and columns in 16s, of
plain products in 8s, of a head any.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import backend_of, device_refusal
from pallas_kernels.halves import Firsts
from pallas_kernels.matmul import canonical, cpu, float8, reference, xla
from pallas_kernels.matmul.float8.rounded import Rounded
from pallas_kernels.matmul.kept.fragments import Fragments
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised_for
from pallas_kernels.matmul.reference import largest_and_sums
from pallas_kernels.unsummed import Unsummed
from pallas_kernels.unsummed import summed as summed

BACKENDS = {"canonical": canonical, "cpu": cpu, "xla": xla, "reference": reference}


Exact = Float[Array, "K N"] | Quantised | Fragments  # of gate_up: N is 2 F
Weight = Exact | Rounded
Head = Float[Array, "V K"] | Rounded


class Sizes(NamedTuple):
    """The sizes that a backend must support: a weight's K and columns (gate_up's: one half).

    A `plain` product has no other half, no residual, and one piece of K; a `head` any columns.
    """

    dtype: Any
    K: int = 64
    columns: int = 64
    kind: Literal["any", "plain", "head"] = "any"


def matmul(
    x: Float[Array, "M K"],
    w: Weight,
    residual: Float[Array, "M N"] | None = None,
    *,
    backend: str,
    columns: int | None = None,
) -> Float[Array, "M N"]:
    """x @ w, or residual + x @ w; see the module's contract. ValueError: no such backend, shape.

    `columns`: those of the whole weight, if w is one device's part of it.
    """
    if isinstance(w, Rounded):
        return float8.matmul(x, w, residual, backend=backend)
    module, w = _backend(backend), _taken(x, w, backend)
    if module is canonical:
        return canonical.matmul(x, w, residual, columns=columns)
    return module.matmul(x, w, residual)


def partial_products(
    x: Float[Array, "M K"], w: Weight, *, backend: str, columns: int | None = None
) -> Float[Array, "P M N"]:
    """Pieces of x @ w; see the module's contract. Arguments and ValueError as `matmul`."""
    if isinstance(w, Rounded):
        return float8.matmul(x, w, backend=backend)[None]
    module, w = _backend(backend), _taken(x, w, backend)
    if module is canonical:
        return canonical.partial_products(x, w, columns=columns)
    return module.matmul(x, w)[None]


def unsummed(
    x: Float[Array, "M K"],
    w: Weight,
    residual: Float[Array, "M N"] | None = None,
    *,
    backend: str,
    columns: int | None = None,
) -> Unsummed:
    """What `summed` makes x @ w of, or residual + x @ w. Arguments and ValueError as `matmul`."""
    if isinstance(w, Rounded) and float8.adds(len(x), w, backend):
        return Unsummed(None, float8.matmul(x, w, residual, backend=backend))
    if isinstance(w, Rounded):
        return unadded(float8.matmul(x, w, backend=backend), residual, backend=backend)
    if _backend(backend) is canonical:
        return canonical.unsummed(x, _taken(x, w, backend), residual, columns=columns)
    return Unsummed(None, matmul(x, w, residual, backend=backend, columns=columns))


def unadded(
    x: Float[Array, "*lead D"], residual: Float[Array, "*lead D"] | None, *, backend: str
) -> Unsummed:
    """What `summed` makes `added` of them: a norm's kernel adds a residual on its way."""
    if residual is None:
        return Unsummed(None, x)
    if _backend(backend) is canonical:
        return Unsummed(x[None], residual)
    return Unsummed(None, added(residual, x, backend=backend))


def gate_up(
    x: Float[Array, "M K"], w: Weight, firsts: Firsts | None = None, *, backend: str
) -> Float[Array, "M F"]:
    """silu(x @ gate) * (x @ up); see the module's contract. ValueError as `matmul`."""
    if isinstance(w, Rounded):
        return float8.gate_up(x, w, firsts, backend=backend)
    return _backend(backend).gate_up(x, _taken(x, w, backend), firsts)


def silu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"], *, backend: str
) -> Float[Array, "*lead F"]:
    """gate_up's second half, for products with a bias."""
    return _whole(backend).silu_times(gate, up)


def gelu_times(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"], *, backend: str
) -> Float[Array, "*lead F"]:
    """gelu(gate), by its tanh formula, * up in float32, rounded once; by "cpu" or else by XLA."""
    return (cpu if _backend(backend) is cpu else xla).gelu_times(gate, up)


def added(
    x: Float[Array, "*lead D"], y: Float[Array, "*#lead D"], *, backend: str
) -> Float[Array, "*lead D"]:
    """x + y in x's dtype; see the module's contract."""
    return canonical.plus(x, y) if _backend(backend) is canonical else x + y


def sigmoid_times(
    gate: Float[Array, "*lead _"], x: Float[Array, "*lead F"], *, backend: str
) -> Float[Array, "*lead F"]:
    """sigmoid(gate) * x in float32, rounded to x's dtype; by "cpu" or else by XLA."""
    return (cpu if _backend(backend) is cpu else xla).sigmoid_times(gate, x)


def head_argmax(x: Float[Array, "M K"], head: Head, *, backend: str) -> Int[Array, " M"]:
    """argmax of x @ head.T; see the module's contract. ValueError as `matmul`."""
    if isinstance(head, Rounded):
        return float8.head_argmax(x, head, backend=backend)
    return _backend(backend).head_argmax(x, head)


def head_largest(
    x: Float[Array, "M K"], head: Head, *, backend: str
) -> tuple[Int[Array, " M"], Float[Array, " M"]]:
    """The best ids and their logits; see the module's contract. ValueError as `matmul`."""
    if isinstance(head, Rounded):
        return float8.head_largest(x, head, backend=backend)
    if _backend(backend) is canonical:
        return canonical.head_largest(x, head)
    logits = head_logits(x, head, backend=backend)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.max(logits, axis=-1)


def head_confidence(
    x: Float[Array, "M K"], head: Head, *, backend: str
) -> tuple[Int[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """The best ids, their logits, the sums; see the module's contract. ValueError as `matmul`."""
    if isinstance(head, Rounded):
        return float8.head_confidence(x, head, backend=backend)
    if _backend(backend) is canonical:
        return canonical.head_confidence(x, head)
    logits = head_logits(x, head, backend=backend)
    return (jnp.argmax(logits, axis=-1).astype(jnp.int32), *largest_and_sums(logits))


def head_logits(x: Float[Array, "M K"], head: Head, *, backend: str) -> Float[Array, "M V"]:
    """x @ head.T; see the module's contract. ValueError as `matmul`."""
    if isinstance(head, Rounded):
        return float8.head_logits(x, head, backend=backend)
    return _whole(backend).head_logits(x, head)


def refusal(backend: str, sizes: Sizes, device: Any) -> str | None:
    """Why a backend cannot do this, or None; see pallas_kernels.choice."""
    if backend == "cpu":
        return device_refusal("cpu", device)
    if backend != "canonical":
        return None
    dtype = jnp.dtype(sizes.dtype).name
    if dtype != "bfloat16":
        return f"has only bfloat16, not {dtype}"
    return canonical.refusal(*sizes[1:]) or device_refusal("mosaic_gpu", device)


def _taken(x: Float[Array, "M K"], w: Exact, backend: str) -> Exact:
    """The weight as the backend takes it. ValueError for a form that it does not read."""
    if isinstance(w, Fragments) and _backend(backend) is not canonical:
        raise ValueError(f"fragments are for the backend 'canonical', not {backend!r}")
    if isinstance(w, Quantised) and _backend(backend) is not canonical:
        return dequantised_for(w, x)
    return w


def _whole(name: str):
    """The backend if it has all of the op's functions, else XLA's."""
    module = _backend(name)
    return module if module in (cpu, canonical) else xla


def _backend(name: str):
    return backend_of("matmul", name, BACKENDS)
