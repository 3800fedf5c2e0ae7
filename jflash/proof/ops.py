"""Each operation of a layer alone: a row's bits at every number of rows, at a target's sizes.

This file knows no weights of a checkpoint: weights and rows are random.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash.layers.experts import Experts
from jflash.pair import Models
from jflash.proof.lossless import compile_all
from jflash.records.leaves import Leaf, declared
from jflash.records.specs import AttentionSpec, MoeSpec
from pallas_kernels import heads_to_cache, matmul, rms_norm
from pallas_kernels.block_attention import block_attention
from pallas_kernels.matmul.tuning import LEAST_SWIZZLE

MOST = 512
ROWS = (1, 2, 8, 16, 33, 64, 65, 128, 256)
BEFORE, SLOTS, SEQUENCES = 700, 2048, (1, 8, 64)  # of attention
DEVICES = (2, 4)  # that share a product's columns


class Op(NamedTuple):
    """An operation of M rows: call(weights, *rows) gives [M, …], and `whole` that of MOST rows."""

    name: str
    call: Callable[..., Array]
    whole: Callable[..., Array]
    weights: Any
    rows: tuple[Array, ...]
    counts: tuple[int, ...]


def ops_of(models: Models) -> Iterator[Op]:
    """Those of the target's first layer and of its head."""
    kernels, config = models.kernels, models.target.config
    mixer, mlp, D = config.layers[0].mixer, config.layers[0].mlp, config.hidden_size
    assert isinstance(mixer, AttentionSpec), "the first layer has a delta net"
    N, K, H = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    count = iter(range(1000))

    def draw(*sizes: int, scale: float = 1.0) -> Array:
        key = jax.random.key(next(count))
        return (scale * jax.random.normal(key, sizes)).astype(models.dtype)

    def op(name: str, call: Callable[..., Array], weights: Any, *rows: Array) -> Op:
        return Op(name, call, call, weights, rows, ROWS)

    def product(name: str, size: int, columns: int, backend: str = kernels.matmul) -> Op:
        def call(w: Array, x: Array, residual: Array) -> Array:
            own = residual[:, : w.shape[1]]  # of a device's part
            return matmul.matmul(x, w, own, backend=backend, columns=columns)

        weights = draw(size, columns, scale=size**-0.5)
        return op(name, call, weights, draw(MOST, size), draw(MOST, columns))

    def logits(w: Array, x: Array) -> Array:
        return matmul.head_logits(x, w, backend=kernels.matmul)

    def best(w: Array, x: Array) -> Array:
        return matmul.head_argmax(x, w, backend=kernels.matmul)

    def norm(scale: Array, x: Array) -> Array:
        return rms_norm.rms_norm(x, scale, 1e-6, backend=kernels.norm)

    def normed(weights: tuple[Array, Array], x: Array, residual: Array) -> Array:
        w, scale = weights
        sums = matmul.unsummed(x, w, residual, backend=kernels.matmul)
        return jnp.concatenate(rms_norm.after(sums, scale, 1e-6, backend=kernels.norm), axis=-1)

    def split(scale: Array, x: Array, angle: Array) -> Array:
        sizes = heads_to_cache.Heads(N, K, H, 1e-6, (0, N * H, (N + K) * H))
        cos, sin = jnp.cos(angle)[None], jnp.sin(angle)[None]
        own: dict[str, Any] = dict(heads=sizes, dtype=x.dtype, backend=kernels.heads)
        made = heads_to_cache.split_heads(x[None, None], scale, scale, cos, sin, **own)
        return jnp.concatenate(made, axis=2)[0]

    yield from with_parts(product("qkv", D, (N + 2 * K) * H), kernels.matmul)
    yield from with_parts(product("out", N * H, D), kernels.matmul)
    yield op("norm", norm, draw(D), draw(MOST, D))
    of_heads = draw(N * H, D, scale=(N * H) ** -0.5), draw(D)
    yield op("out and a norm", normed, of_heads, draw(MOST, N * H), draw(MOST, D))
    angle = jnp.linspace(0, 1000, MOST)[:, None] * jnp.linspace(1, 0.001, H // 2)
    yield op("heads and rotation", split, draw(H), draw(MOST, (N + 2 * K) * H), angle)
    yield from _attention(draw(MOST, N, H), draw(2, SLOTS, K, H), kernels.attention)
    if isinstance(mlp, MoeSpec):
        layer = Experts(D, mlp)

        def own(leaf: Leaf) -> Array:
            scale = leaf.stored[-2] ** -0.5 if len(leaf.stored) > 1 else 1.0
            return draw(*leaf.stored, scale=scale).astype(leaf.dtype or models.dtype)

        leaves = declared(layer)
        weights = jax.tree.map(own, leaves, is_leaf=lambda leaf: isinstance(leaf, Leaf))

        def experts(w: Any, x: Array, residual: Array) -> Array:
            return layer.apply({"params": w}, x[None], residual[None], kernels)[0]

        yield op("experts", experts, weights, draw(MOST, D), draw(MOST, D))
    else:
        F = mlp.intermediate_size

        def gated(w: Array, x: Array) -> Array:
            return matmul.gate_up(x, w, backend=kernels.matmul)

        both = op("gate and up", gated, draw(D, 2 * F, scale=D**-0.5), draw(MOST, D))
        yield from with_parts(both, kernels.matmul, halves=2)
        yield from with_parts(product("down", F, D), kernels.matmul)
    vocabulary, x = draw(config.vocab_size, D), draw(MOST, D)
    yield op("logits", logits, vocabulary, x)
    yield op("best of the head", best, vocabulary, x)
    yield product(PLANTED, N * H, D, "xla")


PLANTED = "planted: XLA's product"


def with_parts(product: Op, backend: str, halves: int = 1) -> Iterator[Op]:
    """The product, and the columns of it that one of several devices has, beside the whole's.

    On one device, so it needs no others. Products by other backends than the canonical ones
    promise nothing of parts.
    """
    yield product
    columns = product.weights.shape[1] // halves
    for devices in DEVICES if backend == "canonical" else ():
        if columns % (LEAST_SWIZZLE * devices) == 0:
            yield part_of(product, columns // devices, f"{product.name}, 1 of {devices}", halves)


def part_of(product: Op, columns: int, name: str, halves: int = 1) -> Op:
    """The first columns of a product: by those of its weights alone, and of the whole."""

    def call(w: Array, *rows: Array) -> Array:
        own = [half[:, :columns] for half in jnp.split(w, halves, axis=1)]
        return product.call(jnp.concatenate(own, axis=1), *rows)

    def whole(w: Array, *rows: Array) -> Array:
        return product.whole(w, *rows)[:, :columns]

    return Op(name, call, whole, product.weights, product.rows, (*product.counts, MOST))


def _attention(q: Array, kv: Array, backend: str) -> Iterator[Op]:
    """Rows as one block, and as sequences of one row, beside a block of all."""

    def attend(q: Array, kv: Array, lengths: Array) -> Array:
        keys, values = (jnp.broadcast_to(x, (len(q), *x.shape)) for x in kv)
        widths = jnp.full(len(q), q.shape[1], jnp.int32)
        how: dict[str, Any] = dict(scale=q.shape[-1] ** -0.5, causal=True, backend=backend)
        return block_attention(q, keys, values, lengths, widths, **how)

    def block(kv: Array, q: Array) -> Array:
        return attend(q[None], kv, jnp.full(1, BEFORE, jnp.int32))[0]

    def alone(kv: Array, q: Array) -> Array:
        return attend(q[:, None], kv, BEFORE + jnp.arange(len(q), dtype=jnp.int32))[:, 0]

    yield Op("attention of a block", block, block, kv, (q,), ROWS)
    yield Op("attention of sequences of one row", alone, block, kv, (q,), SEQUENCES)


def check_ops(models: Models, note: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The rows of each operation that differ from those among MOST rows, and of the planted one."""
    found = []
    for op in ops_of(models):
        some = [tuple(x[:M] for x in op.rows) for M in op.counts]
        lowered = [jax.jit(op.whole).lower(op.weights, *op.rows)]
        lowered += [jax.jit(op.call).lower(op.weights, *rows) for rows in some]
        whole, *runs = compile_all(lowered)
        want = bits(whole(op.weights, *op.rows))
        apart = {
            M: int((bits(run(op.weights, *rows)) != want[:M]).reshape(M, -1).any(axis=1).sum())
            for M, run, rows in zip(op.counts, runs, some, strict=True)
        }
        found.append({
            "op": op.name, "compared_rows": sum(op.counts), "differing_rows": sum(apart.values()),
            "by_rows": {str(M): count for M, count in apart.items() if count},
        })  # fmt: skip
        note(found[-1])
    *ops, planted = found
    return {
        "backends": models.kernels._asdict(), "promised": models.one_arithmetic, "ops": ops,
        "differences": sum(each["differing_rows"] for each in ops), "planted": planted,
    }  # fmt: skip


def failures_of_ops(result: dict[str, Any]) -> list[str]:
    """Why the check of a pair is not passed, a line each."""
    wrong = [each for each in result["ops"] if each["differing_rows"]]
    lines = [f"{result['pair']}: {each['op']} alone gives other bits" for each in wrong]
    if not result["planted"]["differing_rows"]:
        lines.append(f"{result['pair']}: XLA's product gave a row the same bits: nothing was shown")
    return lines


def bits(x: Array) -> np.ndarray:
    """The numbers as integers, so that 0 is not -0."""
    got = np.asarray(x)
    return got.view({2: np.uint16, 4: np.uint32}[got.dtype.itemsize])
