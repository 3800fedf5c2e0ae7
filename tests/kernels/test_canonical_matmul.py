"""The canonical products: one row, the same bits at every number of rows, tile, kernel, neighbour.

The interpreters multiply tiles in an order of their own, so inputs are such that only the order of
steps of 64 and of pieces can round: inside a step all sums are whole numbers times one power of
two, from step to step they differ by 2^20 and nearly cancel.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import (
    canonical,
    few_rows,
    gate_up,
    head_argmax,
    head_confidence,
    head_largest,
    head_logits,
    matmul,
    mosaic_gpu,
    reference,
)
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.pieces import STEP, pieces
from pallas_kernels.matmul.tiles import Product, by_rule
from pallas_kernels.matmul.tuning import ONE_TURN, SMS, Tuning, canonical_tuning, make_plan
from pallas_kernels.matmul.wide_mosaic import Wide
from pallas_kernels.shapes import MATMUL
from pallas_kernels.unsummed import add_pieces
from tests.support.attention_checks import ON_GPU
from tests.support.row_checks import draw

interpreted = pytest.mark.skipif(
    ON_GPU, reason="beside a GPU the interpreter may wait for ever; there kernels run compiled"
)
ROWS = (1, 5, 64, 65)
K, N = 768, 128  # in four pieces
HEADS = ("head_argmax", "head_logits")


def in_steps(seed: int, M: int, K: int, N: int):
    """x [M, K] and w [K, N]: steps of 64 that are large, small, minus the large, small …"""
    rng = np.random.default_rng(seed)
    x = np.tile(rng.integers(-8, 9, (M, STEP)), (1, K // STEP))
    big, small = (rng.integers(-8, 9, (STEP, N)) for _ in range(2))
    steps = [big * 2**20, small, -big * 2**20, rng.integers(-8, 9, (STEP, N))]
    w = np.concatenate(list(itertools.islice(itertools.cycle(steps), K // STEP)))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


def bits(out) -> np.ndarray:
    return np.asarray(out, np.float32).view(np.uint32)


def check_every_number_of_rows(run, x, rows=ROWS) -> None:
    """run([M, K]) -> [M, ...]: a row's bits among the most rows are those it has among fewer that
    are turned about."""
    want = bits(run(x))
    for M in rows:
        np.testing.assert_array_equal(bits(run(x[:M][::-1]))[::-1], want[:M], err_msg=f"{M} rows")


def run_of(op: str, w):
    """The canonical op by these weights, as the folder's entry points call it, interpreted here."""
    how = {} if ON_GPU else {"interpret": True}
    if op == "residual":
        return lambda x: canonical.matmul(x, w, x[:, : w.shape[1]] * 3, **how)
    if op.startswith("head_"):
        return lambda x: getattr(canonical, op)(x, w.T, **how)
    if op == "pieces":

        def added(x):
            sums = canonical.partial_products(x, w, **how)
            return add_pieces(sums, None, dtype=x.dtype, interpret=not ON_GPU)

        return added
    return lambda x: getattr(canonical, op)(x, w, **how)


@interpreted
@pytest.mark.parametrize("op", ["matmul", "residual", "pieces", "gate_up", *HEADS])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(op):
    # Rows enough for every tile; what follows a product's pieces has one kernel, after few rows and
    # after many. The head's tile takes two steps of 64 at a time where it can.
    most = {"matmul": 260, "residual": 65, "pieces": 65}.get(op, 130)
    x, w = in_steps(0, most, K - STEP if op in HEADS else K, N)
    w = w if op != "gate_up" else w * 2.0**-26  # silu is no line
    assert pieces("matmul", K, N) == 4
    check_every_number_of_rows(run_of(op, w), x)


@interpreted
def test_nor_for_a_head_of_an_odd_number_of_ids():
    """Which the kernel for few rows serves, however many there are."""
    x, w = in_steps(0, 100, 320, 331)
    for op in HEADS:
        check_every_number_of_rows(run_of(op, w), x, (1, 20))
    wide = jnp.pad(w, ((0, 0), (0, 5)))
    whole = run_of("head_logits", wide)(x)[:, :331]
    np.testing.assert_array_equal(bits(run_of("head_logits", w)(x)), bits(whole))


@interpreted
@pytest.mark.parametrize("op", ["matmul", "gate_up", "head_logits"])
def test_nor_on_512_rows(op):
    """Of few columns, for the interpreter walks each tile; `matmul` is cut in two pieces of K."""
    x, w = in_steps(2, 512, 320 if op in HEADS else 512, 64)
    assert pieces("matmul", 512, 64) == 2
    w = w if op != "gate_up" else w * 2.0**-26
    check_every_number_of_rows(run_of(op, w), x, (16,))


@interpreted
def test_a_product_of_512_rows_that_is_added_up_whole_is_caught():
    """The planted violation: 16 rows in two pieces, whose numbers the inputs above tell apart."""
    x, w = in_steps(2, 512, 512, 64)
    run, tuning = run_of("matmul", w), by_rule(Product.of("matmul", 512, *w.shape, 2))
    assert isinstance(tuning, Tuning)
    whole = dataclasses.replace(tuning, walk=1, split_k=1)

    def faulty(x):
        many = len(x) == 512
        return mosaic_gpu.matmul(x, w, tuning=whole, interpret=True) if many else run(x)

    with pytest.raises(AssertionError, match="16 rows"):
        check_every_number_of_rows(faulty, x, (16,))


@interpreted
@pytest.mark.parametrize(
    ("op", "M", "ragged"),
    [
        *(("matmul", M, 496) for M in (1, 20, 100)),
        pytest.param("matmul", 300, 1008, marks=pytest.mark.long),
        ("residual", 1, 496),
        *(pytest.param("residual", M, 496, marks=pytest.mark.long) for M in (20, 100)),
    ],
)
def test_a_last_tile_of_fewer_columns_has_the_bits_of_a_whole_one(op, M, ragged):
    """Delta nets' inputs have 16,480 columns: tiles that divide them are too narrow.

    Each row is another tile: of 64 columns for few rows, then of 32 and, for 300 rows (a long
    test), of 64. A residual's pieces have five steps of K, so no tile takes two at once,
    which the interpreters add up in an order of their own.
    """
    x, w = in_steps(0, M, 128 if op == "matmul" else 15 * STEP, ragged + 16)
    P = pieces("matmul", x.shape[1], ragged)
    assert pieces("matmul", *w.shape) == P
    tile = by_rule(Product.of(op, *x.shape, ragged, P))
    columns = tile.columns if isinstance(tile, Tile) else tile.block_n
    assert ragged % columns and columns == (32 if M == 100 else 64)
    whole, part = (run_of(op, weights) for weights in (w, w[:, :ragged]))
    np.testing.assert_array_equal(bits(part(x)), bits(whole(x))[:, :ragged])


@interpreted
def test_pieces_that_depend_on_the_rows_are_caught():
    """The planted violation, and that the inputs tell any two numbers of pieces apart."""
    x, w = in_steps(0, 64, K, N)

    def product(x, P):
        tile = Tile(rows=64, columns=64, depth=64)
        out = few_rows.product(x, w, pieces=P, tile=tile, interpret=True)
        return out if P == 1 else add_pieces(out, None, dtype=x.dtype, interpret=True)

    found = [bits(product(x, P)) for P in (1, 2, 3, 4)]
    for one, other in itertools.combinations(found, 2):
        assert (one != other).any()
    with pytest.raises(AssertionError, match="16 rows"):
        check_every_number_of_rows(lambda x: product(x, 2 if len(x) <= 16 else 4), x, (64, 16))


@interpreted
@pytest.mark.parametrize("P", [1, pytest.param(2, marks=pytest.mark.long), 3, 4])
def test_kernels_and_tiles_agree_with_the_form(P):
    x, w = in_steps(1, 70, K, N)
    want = bits(reference.canonical(x, w, P, STEP).astype(x.dtype))
    for rows, columns in [(16, 32), (32, 128), (64, 64)]:
        sums = few_rows.product(
            x, w, pieces=P, tile=Tile(rows=rows, columns=columns, depth=64), interpret=True
        )
        out = sums if P == 1 else add_pieces(sums, None, dtype=x.dtype, interpret=not ON_GPU)
        np.testing.assert_array_equal(bits(out), want)
    base = canonical_tuning("matmul", 70, K, N, P)
    for walk, block_m, block_n in [(P, 64, 64), (P, 128, 32), (1, 64, 32)]:
        tuning = dataclasses.replace(
            base, walk=walk, split_k=P // walk, block_m=block_m, block_n=block_n, stages=2, sms=2
        )
        out = mosaic_gpu.matmul(x, w, tuning=tuning, interpret=True)
        np.testing.assert_array_equal(bits(out), want, err_msg=str(tuning))


@interpreted
def test_a_tile_gives_the_sum_whether_its_kernel_adds_the_pieces_or_leaves_them():
    """Tiles are compared and timed so."""
    x, w = in_steps(3, 16, K, N)
    residual, product = x[:, :N] * 3, Product.of("residual", 16, K, N, 2)
    want = canonical.plus(residual, reference.canonical(x, w, 2, STEP).astype(x.dtype))
    walks = dataclasses.replace(
        canonical_tuning("residual", 16, K, N, 2), walk=2, split_k=1, stages=2, sms=2
    )
    for tile in (Tile(rows=16, columns=32, depth=64), walks):
        got = canonical.by_tile(tile, product, x, w, residual, interpret=True)
        np.testing.assert_array_equal(bits(got), bits(want))


@interpreted
def test_a_part_of_a_wide_tile_agrees_with_the_form():
    x, w = in_steps(2, 70, 256, 1088)  # 5 tiles of 192 columns, and 128 of a sixth
    tuning = Tuning(block_m=64, block_n=192, block_k=64, stages=2, split_k=2, sms=3)
    out = mosaic_gpu.partial_products(x, w, tuning=tuning, interpret=True)
    want = [
        reference.canonical(x[:, cut], w[cut], 1, STEP) for cut in (slice(128), slice(128, 256))
    ]
    np.testing.assert_array_equal(bits(out), bits(jnp.stack(want)))


@interpreted
@pytest.mark.parametrize("M", [1, pytest.param(20, marks=pytest.mark.long), 100])
def test_the_canonical_backend_equals_the_reference(M):
    x, w, r = draw(0, (M, 320)), draw(1, (320, 192)), draw(2, (M, 192))
    for got, want in [
        (canonical.matmul(x, w, interpret=True), matmul(x, w, backend="reference")),
        (canonical.matmul(x, w, r, interpret=True), matmul(x, w, r, backend="reference")),
        (
            canonical.gate_up(x, w, (96, 0), interpret=True),
            gate_up(x, w, (96, 0), backend="reference"),
        ),
    ]:
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, atol=8e-3 * np.abs(want).max())
    head = draw(3, (328, 320))  # whose last tile is not full
    got = canonical.head_argmax(x, head, interpret=True)
    np.testing.assert_array_equal(got, head_argmax(x, head, backend="reference"))
    for ids, largest in [
        canonical.head_largest(x, head, interpret=True), head_largest(x, head, backend="xla")
    ]:  # fmt: skip
        np.testing.assert_array_equal(ids, got)
        want = head_logits(x, head, backend="reference")[jnp.arange(M), got]
        np.testing.assert_allclose(largest, want, rtol=1e-4)
    ids, *both = canonical.head_confidence(x, head, interpret=True)
    np.testing.assert_array_equal(ids, got)
    want = head_confidence(x, head, backend="reference")[1:]
    np.testing.assert_allclose(both, want, rtol=1e-4)


@interpreted
def test_ties_go_to_the_lowest_id_and_the_sums_of_tiles_make_a_confidence():
    x, head = draw(5, (4, 128)), draw(6, (328, 128))
    for ids in [(7, 9), (70, 71, 130), (20, 150), (63, 64), (319, 327)]:
        tied = head.at[jnp.array(ids)].set(x[0] * 4)
        assert int(canonical.head_argmax(x, tied, interpret=True)[0]) == min(ids)
    tile = Tile(rows=16, columns=64, depth=64)
    best, _, weight = few_rows.best_of_tiles(x, head, tile=tile, interpret=True)
    top = best.max(axis=0)
    got = top + jnp.log(jnp.sum(weight * jnp.exp(best - top), axis=0))
    logits = reference.canonical(x, head.T, 1)
    np.testing.assert_allclose(got, jax.nn.logsumexp(logits, axis=1), rtol=1e-5)


def test_pieces_are_a_matter_of_the_weight():
    known = {  # Qwen3-8B, Qwen3-4B, Llama-3.1-8B, SmolLM2-135M, tiny-math
        ("matmul", 4096, 6144): 2, ("matmul", 4096, 4096): 2, ("matmul", 12288, 4096): 2,
        ("matmul", 2560, 6144): 2, ("matmul", 4096, 2560): 4, ("matmul", 9728, 2560): 4,
        ("matmul", 14336, 4096): 2, ("matmul", 20480, 4096): 2, ("matmul", 4096, 10240): 1,
        ("matmul", 576, 960): 3, ("matmul", 576, 576): 3, ("matmul", 1536, 576): 4,
        ("matmul", 256, 512): 1, ("matmul", 640, 256): 2, ("gate_up", 4096, 24576): 1,
        ("head_argmax", 4096, 151936): 1,
    }  # fmt: skip
    assert {shape: pieces(*shape) for shape in known} == known
    for _, K, N in known:
        assert K % (pieces("matmul", K, N) * STEP) == 0
    with pytest.raises(ValueError, match="no product is called 'down'"):
        pieces("down", 640, 256)


@pytest.mark.parametrize("op,K,N", sorted({(s.op, s.K, s.N) for s in MATMUL.values()}))
def test_every_shape_of_the_step_has_a_tile(op, K, N):
    P = pieces(op, K, N)
    for M in (1, 8, 16, 33, 64):
        half = N // 2 if op == "gate_up" else N
        tile = by_rule(Product.of(op, M, K, N, P))
        assert isinstance(tile, Tile)
        assert K % (tile.depth * P) == 0 and (op == "head_argmax" or half % tile.columns == 0)
    for M in (65, 128, 192, 320, 512, 1024):
        tuning = by_rule(Product.of(op, M, K, N, P))
        if isinstance(tuning, Wide):
            rows = (65, 128) if op == "gate_up" else (192,)  # of several pieces: one turn
            assert M in rows and tuning.ring >= 4 and (op == "gate_up") == (P == 1)
            continue
        assert tuning.walk * tuning.split_k == P and tuning.stages >= 3
        make_plan(op, M, K, N, tuning)


def test_pieces_take_one_turn_of_128_rows_where_a_wider_tile_makes_that_possible():
    for K, N, wide in [(17408, 5120, True), (6144, 5120, True), (4096, 6144, False)]:
        tuning = canonical_tuning("residual", 128, K, N, 2)
        plan = make_plan("matmul", 128, K, N, tuning)
        assert plan.columns * plan.row_groups <= SMS
        assert (tuning.block_n == ONE_TURN) == wide


def test_pieces_of_two_row_tiles_take_one_turn_that_fills_the_gpu():
    """A long K, or fewer CTAs, have tiles of whole swizzles."""
    tile = by_rule(Product.of("matmul", 256, 4096, 6144, 2))
    assert tile == Wide(width=96, ring=6) == by_rule(Product.of("pieces", 130, 4096, 6144, 2))
    assert by_rule(Product.of("residual", 256, 4096, 4096, 2)) == Wide(width=64, ring=8)
    others = [("pieces", 256, 12288, 4096, 2), ("pieces", 256, 4096, 2560, 4)]
    others += [("matmul", 257, 4096, 6144, 2)]
    for op, M, K, N, P in others:
        assert isinstance(by_rule(Product.of(op, M, K, N, P)), Tuning), (op, M, K, N)


def test_pieces_of_more_row_tiles_have_192_columns_where_these_divide_all():
    """So four of Qwen3-8B's qkv take one turn: by 128 columns they would take two."""
    for M, K, N, columns in [
        (512, 4096, 6144, 192),
        (320, 2560, 6144, 192),
        (512, 4096, 4096, 128),
        (512, 4096, 5120, 128),
    ]:
        tuning = by_rule(Product.of("matmul", M, K, N, 2))
        assert isinstance(tuning, Tuning), tuning
        assert (tuning.block_m, tuning.block_n, tuning.walk) == (128, columns, 2), (M, K, N)
    plan = make_plan("matmul", 512, 4096, 6144, by_rule(Product.of("matmul", 512, 4096, 6144, 2)))
    assert plan.columns * plan.row_groups == 128 <= SMS


def test_a_walk_of_more_columns_than_registers_hold_is_refused():
    whole = Tuning(block_m=64, block_n=256, block_k=64, stages=3)
    assert make_plan("matmul", 512, 4096, 4096, whole).half_n == 256
    walking = dataclasses.replace(whole, walk=2)
    with pytest.raises(ValueError, match="registers hold sums of 192 columns beside a piece's"):
        make_plan("matmul", 512, 4096, 4096, walking)


def test_two_row_tiles_share_the_columns_of_gate_and_up_in_turns():
    """Of an odd number of row tiles none has another beside it."""
    for M, rows, together in [(512, 128, 2), (1024, 128, 2), (384, 64, 1), (640, 128, 1)]:
        tuning = by_rule(Product.of("gate_up", M, 4096, 24576, 1))
        assert isinstance(tuning, Tuning), tuning
        sizes = tuning.block_m, tuning.block_n, tuning.cluster_m
        assert sizes == (rows, 256, together), (M, tuning)


def test_columns_that_are_no_whole_swizzles_have_a_tile_that_needs_none():
    assert by_rule(Product.of("matmul", 128, 5120, 16480, 1)) == Wide(width=128, ring=6)
    assert isinstance(by_rule(Product.of("matmul", 128, 5120, 14336, 1)), Tuning)


def test_what_the_canonical_form_cannot_do_is_refused():
    x, w = draw(0, (4, 128)), draw(1, (128, 64))
    with pytest.raises(ValueError, match="takes bfloat16, got float32"):
        matmul(x.astype(jnp.float32), w.astype(jnp.float32), backend="canonical")
    with pytest.raises(ValueError, match="takes K in 64s, got 96"):
        matmul(x[:, :96], w[:96], backend="canonical")
    with pytest.raises(ValueError, match=r"no tile divides .* by 40 columns"):
        matmul(x, w[:, :40], backend="canonical")
    with pytest.raises(ValueError, match="power of two"):
        Tile(rows=16, columns=48, depth=64)


def check_reference(op: str, out, x, w) -> None:
    """The op's results for x and w [K, N] are the reference's, rounded otherwise."""
    if op == "head_argmax":  # the best, or one as good but for the order of the sums
        logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, out[:, None], axis=1)[:, 0]
        assert jnp.all(chosen > jnp.max(logits, axis=1) - 1e-4)
        return
    if op == "gate_up":
        want = gate_up(x, w, backend="reference")
    else:
        residual = x[:, : w.shape[1]] * 3 if op == "residual" else None
        want = matmul(x, w, residual, backend="reference")
    got, want = np.asarray(out, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, atol=8e-3 * np.abs(want).max())


# Those of a step, a drafter's features and their keys and values among them.
REAL = {(s.op, s.K, s.N) for s in MATMUL.values()}
REAL |= {("matmul", 20480, 4096), ("matmul", 4096, 10240), ("pieces", 4096, 6144)}
REAL |= {("residual", 4096, 4096), ("residual", 12288, 4096)}


@pytest.mark.skipif(not ON_GPU, reason="the device's own arithmetic, at real shapes")
@pytest.mark.parametrize("op,K,N", sorted(REAL))
def test_products_at_real_shapes_are_the_references_at_every_number_of_rows(op, K, N):
    x, w = draw(7, (512, K)), draw(8, (K, N)) * jnp.bfloat16(K**-0.5)
    run = jax.jit(run_of(op, w))
    check_every_number_of_rows(run, x, (1, 2, 8, 16, 33, 64, 65, 128, 256, 480))
    for M in (16, 512):
        check_reference(op, run(x[:M]), x[:M], w)
