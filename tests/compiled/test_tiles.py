"""Tiles are timed once, on a GPU, before a program is compiled; nothing is timed on a CPU."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jflash.compiled import tiles
from jflash.system.files import write_json
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul import tiles as chosen
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.tiles import Product, by_rule, candidates
from pallas_kernels.matmul.tuning import HEADS, Tuning, make_plan
from pallas_kernels.matmul.wide_mosaic import Wide, one_turn
from pallas_kernels.shapes import LAYER, MATMUL

OUT = Product.of("matmul", 9, 4096, 4096, 2)


@pytest.fixture(autouse=True)
def nothing_preferred(monkeypatch, tmp_path):
    monkeypatch.setattr(chosen, "_preferred", {})
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def lowering(calls: list):
    """What `settled` takes; each call notes the tile that its product has."""

    def product(x, w):
        return matmul(x, w, backend="canonical")

    def lower():
        sizes = ((9, 4096), (4096, 4096))
        args = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)
        text = str(jax.make_jaxpr(lambda *xw: product(*xw))(*args))
        calls.append("grid=(64, 2, 1)" in text.replace("'", ""))
        return text

    return lower


def test_a_program_is_traced_again_with_the_tiles_that_were_timed_for_it(monkeypatch, tmp_path):
    timed = []

    def fastest(products):
        timed.extend(products)
        return iter((p, Tile(rows=16, columns=32, depth=128)) for p in products)

    monkeypatch.setattr(tiles, "_fastest", fastest)
    calls = []
    lower = lowering(calls)
    lower()
    tiles.settled(lower)  # on this CPU
    assert (timed, calls) == ([], [True, True])

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("JFLASH_AUTOTUNE", "0")
    tiles.settled(lower)
    assert (timed, calls[2:]) == ([], [True])
    monkeypatch.setenv("JFLASH_AUTOTUNE", "1")
    tiles.settled(lower)
    assert (timed, calls[3:]) == ([OUT], [True, False])
    [file] = tmp_path.glob("tiles-*.json")
    tiles.settled(lower)  # no second time in this process
    assert (timed, calls[5:]) == ([OUT], [False])

    monkeypatch.setattr(chosen, "_preferred", {})  # nor in the next
    tiles.settled(lower)
    assert (timed, calls[6:]) == ([OUT], [False])
    kept = json.loads(file.read_text())
    for spoilt in [{"rows": 16, "columns": 48, "depth": 64}, {"columns": 32}, 7]:
        monkeypatch.setattr(chosen, "_preferred", {})
        file.write_text(json.dumps(dict.fromkeys(kept, spoilt)))
        tiles._prefer_kept(file)
        assert chosen.unsettled([OUT]) == [OUT]


def test_tiles_of_processes_that_end_together_are_all_kept(monkeypatch, tmp_path):
    """Each adds to what the file has, so none may read it while another one writes it."""
    tile, file, write = Tile(rows=16, columns=32, depth=128), tmp_path / "tiles.json", write_json
    monkeypatch.setattr(tiles, "_fastest", lambda products: ((p, tile) for p in products))
    monkeypatch.setattr(tiles, "write_json", lambda *args: (time.sleep(0.3), write(*args)))
    products = [Product.of("matmul", rows, 4096, 4096, 2) for rows in (9, 17, 33)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda product: tiles.settle([product], file), products))
    assert json.loads(file.read_text()).keys() == {*map(tiles._name, products)}
    tiles.settle([OUT], tmp_path / "none" / "tiles.json")  # where nothing can be kept


def test_the_fastest_tile_must_gain_and_have_the_bits_of_the_rules(monkeypatch):
    product = Product.of("matmul", 16, 64, 64, 1)
    rule, close, other, fast, refused = (
        Tile(rows=16, columns=c, depth=64) for c in (16, 32, 64, 128, 256)
    )
    seconds = {rule: 1.0, close: 0.99, other: 0.1, fast: 0.9}
    monkeypatch.setattr(tiles, "seconds_of", lambda program, inputs: seconds[program.tile])

    def best(*several):
        programs = {}
        for tile in several:
            program = lambda turns, *inputs, tile=tile: (None, jnp.float32(tile == other))  # noqa: E731
            program.tile = tile
            programs[tile] = Future()
            programs[tile].set_result(program)
        programs[refused] = Future()
        programs[refused].set_exception(ValueError("too much shared memory"))
        return tiles._best(product, programs)

    assert best(rule, close, other) == rule
    assert best(rule, close, other, fast) == fast
    assert best() is None


def test_every_candidate_fits_its_product():
    sizes = {(s.op, s.K, s.N) for s in MATMUL.values()} | {
        (op, K, N)
        for s in LAYER.values()
        for op, K, N in (("pieces", s.D, s.Q), ("gate_up", s.D, 2 * s.F), ("residual", s.F, s.D))
    }
    for op, K, N in sizes:
        for M in (1, 33, 65, 128, 300, 512):
            whole = op in HEADS or op == "gate_up"
            product = Product.of(op, M, K, N, 1 if whole else 2)
            if K % (product.pieces * 64):
                continue
            several = candidates(product)
            assert several[0] == by_rule(product) and len(several) <= 13, (product, several)
            for tile in several:
                if isinstance(tile, Wide):
                    gates = op == "gate_up" and tile == one_turn(K, N // 2, 2)
                    assert gates or (M == 512 and tile == Wide(width=192, ring=4))
                elif isinstance(tile, Tuning):
                    assert tile.walk * tile.split_k == product.pieces
                    make_plan("matmul" if op == "pieces" else op, M, K, N, tile)
                else:
                    assert product.K % (tile.depth * product.pieces) == 0
                    assert op in HEADS or product.columns % tile.columns == 0
