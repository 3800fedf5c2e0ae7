"""How fast a step could be: bytes and operations it cannot do without, and what a device delivers.

It counts weights, once for every time they are applied, and keys and values. It does not count
activations, norms, biases, rows of the embedding, or the arithmetic of softmax. It measures the
device's two rates, and it does not know how the step is implemented.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash.models.dflash import HEAD
from jflash.models.params import abstract_params, decoding_params
from jflash.records.config import Drafter2Config, DrafterConfig, TargetConfig
from jflash.records.leaves import Leaf
from jflash.records.specs import DeltaSpec, MoeSpec
from pallas_kernels.gated_delta import CHUNK


class Work(NamedTuple):
    """What one step reads and computes; operations count a multiply and an add as two."""

    weight_bytes: float
    weight_operations: float
    attention_bytes: float
    attention_operations: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.attention_bytes

    @property
    def operations(self) -> float:
        return self.weight_operations + self.attention_operations


class Rates(NamedTuple):
    """What a device delivers, as measured: bytes read a second, operations a second."""

    bytes_per_second: float
    operations_per_second: float


def floor_seconds(work: Work, rates: Rates) -> float:
    """The products' seconds plus attention's, each the longer of reading and computing.

    The two do not overlap: attention waits for its projections and the next product for it.
    """
    read, computed = rates
    products = max(work.weight_bytes / read, work.weight_operations / computed)
    return products + max(work.attention_bytes / read, work.attention_operations / computed)


def verify_work(
    target: TargetConfig,
    batch: int,
    width: int,
    context: float,
    experts_read: float | None = None,
) -> Work:
    """The target over [batch, width] rows that follow `context` tokens each.

    Width 1 is plain decoding. `experts_read` is a layer's measured count; without it, the
    expectation if every row drew its experts evenly and independently.
    """
    leaves, rows = abstract_params(target), batch * width
    head = leaves.get("head", leaves["embedding"])
    return add(
        _products([*_matrices(leaves), head], rows),
        _attention(target, batch, width, context),
        *[_state(delta, batch, width) for delta in target.deltas],
        *_experts(target, leaves, rows, experts_read),
    )


def draft_work(drafter: DrafterConfig, batch: int, width: int, context: float) -> Work:
    """The drafter over the block, the head over all rows but the anchor's, and the context K/V.

    It reads only its candidates' rows of a DFlash 2 drafter's codebooks.
    """
    c, leaves, rows = drafter, decoding_params(drafter), batch * width
    places, columns = batch * (width - 1), sum(mixer.kv_width for mixer in c.mixers)
    head = Leaf((c.vocab_size // c.shards, c.hidden_size), ("vocab", "embed"), dtype=c.dtype)
    head = leaves.get(HEAD, head)
    works = [
        _products([*_matrices(leaves), leaves["fc"]["kernel"], leaves["context_kernel"]], rows),
        _attention(c, batch, width, context),
        _entries(c, float(rows * columns), 0.0),
        _products([head], places),
    ]
    if isinstance(c, Drafter2Config):
        selector = leaves["candidate_selector"]["hidden_projection"]["kernel"]
        looked_up = places * c.selector_top_k * c.selector_rank
        works.append(_products([selector], places))
        works.append(_entries(c, 2.0 * looked_up, 2.0 * looked_up * c.selector_top_k))
    return add(*works)


def add(*works: Work) -> Work:
    return Work(*map(sum, zip(*works, strict=True)))


def _matrices(leaves: dict) -> list[Leaf]:
    """All layers' matrices but the experts' and their routers'."""
    layers = {name: x for name, x in leaves.items() if name.startswith("layers_")}
    return [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(layers)[0]
        if path[-1].key == "kernel" and "experts" not in leaf.axes
    ]


def expected_experts(moe: MoeSpec, rows: int) -> float:
    """The expected number of different experts that `rows` tokens reach by even, independent draws.

    Rows that resemble each other, as those of a text do, share experts and read less.
    """
    return moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** rows)


def _experts(c: TargetConfig, leaves: dict, rows: int, read: float | None) -> Iterator[Work]:
    """Routers and experts: `read` experts are read, and every row computes its k experts."""
    for i, moe in zip(c.sparse_layers, c.experts, strict=True):
        mlp = leaves[f"layers_{i}"][c.layers[i].experts_name]
        touched = expected_experts(moe, rows) if read is None else read
        every = _products([mlp["gate_up"]["kernel"], mlp["down"]["kernel"]], rows)
        router = mlp["routes"] if moe.scores == "sigmoid" else mlp["router"]["kernel"]
        yield _products([router], rows)
        yield Work(
            every.weight_bytes * touched / moe.num_experts,
            every.weight_operations * moe.experts_per_token / moe.num_experts,
            0.0,
            0.0,
        )


def _attention(c: TargetConfig | DrafterConfig, batch: int, width: int, context: float) -> Work:
    """Keys and values read or written, and operations of scores and sums.

    Keys older than a layer's window are not read.
    """
    entries = operations = 0.0
    for mixer in c.mixers:
        seen = context if mixer.window is None else min(context, mixer.window - 1)
        rows = batch * (seen + width)
        entries += rows * mixer.kv_width
        operations += rows * width * 4.0 * mixer.num_heads * mixer.head_dim
    return _entries(c, entries, operations)


def _state(delta: DeltaSpec, batch: int, width: int) -> Work:
    """A delta net's float32 state, and its sums of every row.

    A step reads it, and may keep the rows of CHUNK tokens before it writes it again.
    """
    entries = batch * delta.num_value_heads * delta.key_dim * delta.value_dim
    return Work(0.0, 0.0, (1 + 1 / CHUNK) * 4 * entries, 6.0 * entries * width)


def _products(leaves: Sequence[Leaf], rows: int) -> Work:
    """Leaves that are read once and multiplied by every row."""
    sizes, read = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    return Work(float(read), 2.0 * sizes * rows, 0.0, 0.0)


def _entries(c: TargetConfig | DrafterConfig, entries: float, operations: float) -> Work:
    """Numbers in the model's dtype that no product of weights reads."""
    return Work(0.0, 0.0, float(entries * jnp.dtype(c.dtype).itemsize), operations)


def measure_rates(dtype: str) -> dict[str, float]:
    """The device's read bandwidth (a sum) and matrix rate (a square product in `dtype`).

    The arrays are random, because a chip's clock depends on what it multiplies. Returns the
    rates and the sizes: bytes_per_second, operations_per_second, array_bytes, matrix_size.
    """
    cpu = jax.default_backend() == "cpu"
    array_bytes, size, calls = (2**26, 512, 4) if cpu else (2**31, 8192, 20)
    key = jax.random.key(0)
    entries = array_bytes // jnp.dtype(dtype).itemsize
    array = _normal(key, (entries // 2**16, 2**16), dtype)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    reading = _median_seconds(total, array, calls)
    del array
    matrix = _normal(key, (size, size), dtype)
    product = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.dtype(dtype)))
    computing = _median_seconds(product, matrix, calls)
    return {
        "bytes_per_second": array_bytes / reading,
        "operations_per_second": 2 * size**3 / computing,
        "array_bytes": array_bytes,
        "matrix_size": size,
    }


def _normal(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)))(key)


def _median_seconds(f: Callable[[Array], Array], x: Array, calls: int) -> float:
    """Median over 9 rounds of the mean of `calls` calls, which the device runs back to back."""
    result = jax.block_until_ready(f(x))
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(calls):
            result = f(x)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds)
