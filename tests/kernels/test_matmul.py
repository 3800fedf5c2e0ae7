"""The step's GEMMs: every backend against the float32 reference, and the contract's promises.

On a CPU the Mosaic kernel runs through Pallas' GPU interpreter: its tiles, ring, clusters and
epilogues are the device's own, its timing is not. On a GPU it runs compiled, as a step has it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import gate_up, head_argmax, head_logits, matmul, mosaic_gpu
from pallas_kernels.matmul.tuning import Tuning, make_plan
from tests.support import row_checks
from tests.support.attention_checks import ON_GPU
from tests.support.row_checks import cancelling, check_rows, whole_numbers

interpreted = pytest.mark.skipif(
    ON_GPU, reason="beside a GPU the interpreter may wait for ever; there kernels run compiled"
)
SMALL = Tuning(block_m=64, block_n=64, block_k=64, stages=3, sms=2)
# M, K, N and how the kernel cuts them: row and column tiles per CTA, ring shorter and longer than
# K, clusters, splits of K, every swizzle, ragged rows and columns.
CUTS = [
    (16, 256, 128, SMALL),
    (1, 192, 128, dataclasses.replace(SMALL, sms=1)),
    (70, 128, 96, dataclasses.replace(SMALL, block_n=32, stages=5)),
    (40, 256, 96, dataclasses.replace(SMALL, block_n=96, split_k=2)),
    (20, 256, 192, dataclasses.replace(SMALL, block_n=48, cluster_n=2, sms=4)),
    (200, 128, 64, dataclasses.replace(SMALL, block_m=128, block_n=32, cluster_m=2, cluster_n=2)),
    (300, 128, 128, dataclasses.replace(SMALL, block_m=192, block_k=128, stages=2, sms=1)),
    (8, 512, 64, dataclasses.replace(SMALL, split_k=4, cluster_n=1, sms=8)),
    (20, 256, 1008, dataclasses.replace(SMALL, sms=8)),
    pytest.param(
        (70, 256, 1008, dataclasses.replace(SMALL, split_k=2, sms=8)), marks=pytest.mark.long
    ),
]


def draw(seed, *shape, dtype=jnp.bfloat16):
    return row_checks.draw(seed, shape, dtype)


def close(got, want, dtype=jnp.bfloat16):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    scale = np.abs(want).max()
    np.testing.assert_allclose(
        got / scale, want / scale, atol=4e-6 if dtype == jnp.float32 else 8e-3
    )


def test_reference_is_the_contract():
    x, w, r = draw(0, 5, 48), draw(1, 48, 12), draw(2, 5, 12)
    wide = [np.asarray(v, np.float64) for v in (x, w, r)]
    product = np.asarray(jnp.asarray(wide[0] @ wide[1], jnp.bfloat16), np.float64)
    close(matmul(x, w, backend="reference"), product)
    close(matmul(x, w, r, backend="reference"), wide[2] + product)
    gate, up = np.split(product, 2, axis=1)
    close(gate_up(x, w, backend="reference"), gate / (1 + np.exp(-gate)) * up)
    close(gate_up(x, w, (6, 0), backend="reference"), up / (1 + np.exp(-up)) * gate)
    ids = head_argmax(x, w.T, backend="reference")
    np.testing.assert_array_equal(ids, (wide[0] @ wide[1]).argmax(axis=1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_xla_equals_reference(dtype):
    x, w, r = draw(0, 9, 64, dtype=dtype), draw(1, 64, 32, dtype=dtype), draw(2, 9, 32, dtype=dtype)
    for args in [(x, w), (x, w, r)]:
        got = matmul(*args, backend="xla")
        assert got.dtype == dtype
        close(got, matmul(*args, backend="reference"), dtype)
    for firsts in (None, (16, 0)):
        got = gate_up(x, w, firsts, backend="xla")
        close(got, gate_up(x, w, firsts, backend="reference"), dtype)
    ids = [head_argmax(x, w.T, backend=name) for name in ("xla", "reference")]
    np.testing.assert_array_equal(*ids)


@interpreted
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_mosaic_equals_reference(cut):
    M, K, N, tuning = cut
    x, w, r = draw(0, M, K), draw(1, K, N), draw(2, M, N)
    how = {"tuning": tuning, "interpret": True}
    close(mosaic_gpu.matmul(x, w, **how), matmul(x, w, backend="reference"))
    close(mosaic_gpu.matmul(x, w, r, **how), matmul(x, w, r, backend="reference"))
    # Halves have 16 columns at least, as a swizzle wants, and whole tiles.
    if tuning.block_n % 32 == 0 and N % tuning.block_n == 0:
        firsts = (N // 2, 0)  # the other order: the usual one has 0 first
        close(mosaic_gpu.gate_up(x, w, firsts, **how), gate_up(x, w, firsts, backend="reference"))


@interpreted
@pytest.mark.parametrize("V", [128, 200, 328])
@pytest.mark.parametrize("cluster_n,M", [(1, 3), (2, 70)])
def test_mosaic_argmax_equals_reference(V, cluster_n, M):
    tuning = dataclasses.replace(SMALL, cluster_n=cluster_n)
    x, head = draw(3, M, 128), draw(4, V, 128)
    got = mosaic_gpu.head_argmax(x, head, tuning=tuning, interpret=True)
    np.testing.assert_array_equal(got, head_argmax(x, head, backend="reference"))
    ids, largest, sums = mosaic_gpu.head_confidence(x, head, tuning=tuning, interpret=True)
    np.testing.assert_array_equal(ids, got)
    logits = head_logits(x, head, backend="reference")
    np.testing.assert_allclose(largest, logits.max(1), 1e-4)
    np.testing.assert_allclose(sums, jnp.exp(logits - logits.max(1, keepdims=True)).sum(1), 1e-4)


def argmax_backends():
    mosaic = lambda x, head: mosaic_gpu.head_argmax(x, head, tuning=SMALL, interpret=True)  # noqa: E731
    named = {n: (lambda x, h, n=n: head_argmax(x, h, backend=n)) for n in ("reference", "xla")}
    return {"mosaic_gpu": mosaic, **named}


@interpreted
@pytest.mark.parametrize("backend", sorted(argmax_backends()))
def test_ties_go_to_the_lowest_id(backend):
    """The best column twice and thrice: in one tile, in two tiles of a CTA, in two CTAs."""
    argmax = argmax_backends()[backend]
    x, head = draw(5, 4, 128), draw(6, 320, 128)
    for ids in [(7, 9), (70, 71, 130), (20, 150), (100, 300), (64, 319), (255, 256)]:
        tied = head.at[jnp.array(ids)].set(x[0] * 4)
        assert int(argmax(x, tied)[0]) == min(ids)
    below = jnp.zeros((320, 128), jnp.bfloat16)  # all logits equal
    np.testing.assert_array_equal(argmax(x, below), np.zeros(4))
    negative = jnp.broadcast_to(-x[:1], (328, 128))  # the padding's zeros must not win
    assert int(argmax(x, negative)[0]) == 0


CASES = [
    (op, backend)
    for op in ("matmul", "gate_up", "head_argmax")
    for backend in ("xla", "mosaic_gpu")
    if not (ON_GPU and backend == "mosaic_gpu")
]
M, K, N = 130, 256, 128


def bits_run(op: str, backend: str, w):
    """f([M, K]) -> [M, ...] by these weights [K, N]."""
    if backend == "mosaic_gpu":
        tuning = dataclasses.replace(SMALL, block_m=128, split_k=1 + (op == "matmul"))
        run = functools.partial(getattr(mosaic_gpu, op), tuning=tuning, interpret=True)
    else:
        run = functools.partial(OPS[op], backend=backend)
    w = w.T if op == "head_argmax" else w
    return functools.partial(jax.jit(lambda w, x: run(x, w)), w)


OPS = {"matmul": matmul, "gate_up": gate_up, "head_argmax": head_argmax}


@pytest.mark.parametrize("op,backend", CASES)
def test_bits_do_not_depend_on_index_or_neighbours(op, backend):
    w, probe = (whole_numbers if backend == "mosaic_gpu" else cancelling)(K, N)
    check_rows(bits_run(op, backend, w), probe, M)


@pytest.mark.parametrize("op,backend", CASES)
def test_every_product_of_a_step_equals_the_reference(op, backend):
    x, w = draw(14, M, K), draw(15, K, N) * jnp.bfloat16(K**-0.5)
    got = bits_run(op, backend, w)(x)
    if op == "head_argmax":  # the best, or one as good but for the order of the sums
        logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, got[:, None], axis=1)[:, 0]
        assert jnp.all(chosen > jnp.max(logits, axis=1) - 1e-4)
    else:
        close(got, OPS[op](x, w, backend="reference"))


@pytest.mark.parametrize("op", OPS)
def test_a_row_that_is_summed_in_another_order_is_caught(op):
    w, probe = cancelling(256, 128)
    run, turned = (bits_run(op, "xla", weights) for weights in (w, w[::-1]))

    def other(x):
        odd = (jnp.arange(len(x)) % 4 == 3).reshape(-1, *[1] * (op != "head_argmax"))
        return jnp.where(odd, turned(x[:, ::-1]), run(x))

    with pytest.raises(AssertionError, match=r"rows 1 and .* differ"):
        check_rows(other, probe, 16)


@interpreted
def test_result_does_not_depend_on_the_number_of_sms():
    x, w = draw(12, 80, 256), draw(13, 256, 320)
    runs = [
        mosaic_gpu.matmul(x, w, tuning=dataclasses.replace(SMALL, sms=n, stages=s), interpret=True)
        for n, s in [(1, 2), (3, 3), (132, 7)]
    ]
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0], other)


def test_what_the_kernel_cannot_do_is_refused():
    x, w = draw(0, 4, 128), draw(1, 128, 64)
    with pytest.raises(ValueError, match="no backend 'cublas'"):
        matmul(x, w, backend="cublas")
    with pytest.raises(ValueError, match="bfloat16, got float32"):
        mosaic_gpu.matmul(x.astype(jnp.float32), w.astype(jnp.float32), tuning=SMALL)
    with pytest.raises(ValueError, match="128 columns to sum over, w 64"):
        mosaic_gpu.plan_for("matmul", x, w[:64], SMALL)
    for op, K, N, change, reason in [
        ("matmul", 100, 64, {}, "K must divide"),
        ("matmul", 128, 96, {}, "N must divide"),
        ("matmul", 128, 1000, {}, "N must divide"),  # TMA takes 16 columns at a time
        ("gate_up", 128, 1008, {}, "N must divide"),
        ("matmul", 128, 64, {"split_k": 4}, "K must divide"),
        ("matmul", 128, 64, {"cluster_m": 2}, "do not fill clusters"),
        ("matmul", 128, 512, {"block_n": 512}, "up to 256 columns"),
        ("matmul", 128, 256, {"block_n": 256, "stages": 9}, "bytes of shared memory"),
        ("gate_up", 128, 96, {"block_n": 48}, "multiples of 16"),
        ("head_argmax", 128, 64, {"split_k": 2}, "cannot be split"),
    ]:
        with pytest.raises(ValueError, match=reason):
            make_plan(op, 4, K, N, dataclasses.replace(SMALL, **change))
    for wrong in [{"block_m": 32}, {"block_n": 40}, {"block_k": 32}, {"stages": 0}]:
        with pytest.raises(ValueError, match="must"):
            dataclasses.replace(SMALL, **wrong)
