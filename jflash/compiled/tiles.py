"""Tiles of the canonical products: timed on this device when a program first needs them, and kept.

A tile changes no bit, so which programs and processes have which tiles is a matter of speed. The
results lie beside the compiled programs. Unless the process autotunes, nothing is timed, and a rule
gives the tiles. This file knows no model.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jflash.system.device import device_name
from jflash.system.files import write_json
from jflash.system.locks import in_turn
from jflash.system.platform import autotunes
from pallas_kernels.matmul.canonical import by_tile
from pallas_kernels.matmul.tiles import (
    AnyTile,
    Product,
    by_rule,
    candidates,
    prefer,
    unsettled,
    wanted,
)
from pallas_kernels.matmul.tuning import HEADS

READ_BYTES, MOST_COPIES = 250_000_000, 6  # a turn reads other weights than the caches hold
ROUNDS, ROUND_SECONDS = 5, 0.004
GAIN = 0.02  # below it a difference may be noise
SCALE = 0.02  # of the weights: a GPU is faster on zeros

_lock, _tracing = threading.Lock(), threading.Lock()


def settled[T](lower: Callable[[], T]) -> T:
    """What `lower` gives, which traces anew at each call, once all products in it have tiles.

    Several threads take turns: as tracing is Python, at the same time each would take longer.
    """
    if not _tunes():
        return _traced(lower)
    file = prefer_kept()
    with wanted() as products:
        lowered = _traced(lower)
    if not products:
        return lowered
    with _lock:  # one thing at a time is timed
        settle(unsettled(products), file)
    return _traced(lower)


def prefer_kept() -> Path | None:
    """Prefers the tiles that a process has timed on this device; the file in which they lie.

    Unless this process autotunes, none is preferred, and there is no file.
    """
    folder = jax.config.jax_compilation_cache_dir
    if not _tunes() or not folder:
        return None
    file = Path(folder) / f"tiles-{_here()}.json"
    with _lock:
        _prefer_kept(file)
    return file


def _tunes() -> bool:
    return jax.default_backend() == "gpu" and autotunes()


def _traced[T](lower: Callable[[], T]) -> T:
    with _tracing:
        return lower()


def settle(products: Sequence[Product], file: Path | None) -> None:
    """Times the candidates of these products, prefers the fastest and keeps them in `file`."""
    begin = time.perf_counter()
    found = {}
    several = [product for product in products if len(candidates(product)) > 1]
    for product in set(products) - set(several):
        prefer(product, by_rule(product))
    for product, tile in _fastest(several):
        found[product] = tile
        prefer(product, tile or by_rule(product))
        done = f"tiles of {len(found)} of {len(several)} products timed on this {device_name()}"
        end = "\n" if len(found) == len(several) else ""
        seconds = time.perf_counter() - begin
        print(f"\r{done}, {seconds:.0f} s", end=end, file=sys.stderr, flush=True)
    if file:
        kept = {_name(product): asdict(tile) for product, tile in found.items() if tile}
        # Another process may add to the file too. Where none can, the next times these again.
        lock = file.with_name(f".{file.name}.lock")
        with contextlib.suppress(OSError, ValueError), in_turn(lock) as alone:
            alone()
            write_json(file, _read(file) | kept)


def _fastest(products: Sequence[Product]) -> Iterator[tuple[Product, AnyTile | None]]:
    """None where nothing ran: without memory for the weights, say."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        compiled = {
            product: {tile: pool.submit(_compiled, product, tile) for tile in candidates(product)}
            for product in products
        }
        for product, programs in compiled.items():
            yield product, _best(product, programs)


def _best(product: Product, programs: dict[AnyTile, Future]) -> AnyTile | None:
    """The fastest, if it gains GAIN over the first, the rule's; None if nothing ran.

    A compiler may have a fault that only some tiles meet: one with other bits is left out.
    """
    seconds, want = {}, None
    try:
        inputs = jax.block_until_ready(_inputs(product))
    except jax.errors.JaxRuntimeError:
        return None
    for tile, program in programs.items():
        # A tile that takes more of a multiprocessor than there is does not compile.
        with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):
            _, out = program.result()(jnp.int32(1), *inputs)
            want = out if want is None else want
            if jnp.array_equal(out, want):
                seconds[tile] = seconds_of(program.result(), inputs)
            else:
                print(f"\nother bits, not used: {product} by {tile}", file=sys.stderr)
    if not seconds:
        return None
    first, best = next(iter(programs)), min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - GAIN) * seconds.get(first, math.inf) else first


def seconds_of(program: Callable[..., Any], inputs: tuple) -> float:
    """A turn of the program's loop: the least of some rounds, less what a call takes by itself."""

    def run(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(jnp.int32(turns), *inputs))
        return time.perf_counter() - begin

    run(1)
    few = min(run(1) for _ in range(ROUNDS))
    turns = 1 + max(4, round(ROUND_SECONDS / max(run(5) - few, 1e-5) * 4))
    return (min(run(turns) for _ in range(ROUNDS)) - few) / (turns - 1)


def _compiled(product: Product, tile: AnyTile) -> Any:
    """A loop over copies of the weight, as a step reads one weight after another; and a result."""

    def loop(turns, x, weights, residual):
        def turn(_, x):
            for w in weights:
                out = by_tile(tile, product, x, w, residual)
                x = x.at[0, 0].set(jnp.clip(out.ravel()[0], -1, 1).astype(x.dtype))
            return x

        x = lax.fori_loop(0, turns, turn, x)
        return x, by_tile(tile, product, x, weights[0], residual)

    inputs = jax.eval_shape(functools.partial(_inputs, product))
    return jax.jit(loop).lower(jax.ShapeDtypeStruct((), jnp.int32), *inputs).compile()


def _inputs(product: Product) -> tuple[Array, list[Array], Array | None]:
    op, M, K, N, _ = product
    copies = max(1, min(MOST_COPIES, -(-READ_BYTES // (2 * K * N))))
    shape = (N, K) if op in HEADS else (K, N)
    weights = [_normal(1 + i, shape, SCALE) for i in range(copies)]
    residual = _normal(1 + copies, (M, N), 1.0) if op == "residual" else None
    return _normal(0, (M, K), 1.0), weights, residual


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: Any, shape: tuple[int, ...], scale: float) -> Array:
    key = jax.random.key(seed, impl="rbg")
    return (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(jnp.bfloat16)


def _here() -> str:
    return hashlib.sha256(repr((device_name(), jax.__version__)).encode()).hexdigest()[:16]


def _name(product: Product) -> str:
    return " ".join(map(str, product))


def _prefer_kept(file: Path | None) -> None:
    """Prefers the tiles of a file, of those that are still candidates."""
    for name, kept in (_read(file) if file else {}).items():
        with contextlib.suppress(ValueError, TypeError, StopIteration):  # of another version
            op, *sizes = name.split()
            product = Product(op, *map(int, sizes))
            kinds = (kind for kind in get_args(AnyTile) if _names(kind) == {*kept})
            tile = next(kinds)(**kept)
            if unsettled([product]) and tile in candidates(product):
                prefer(product, tile)


def _names(kind: type[AnyTile]) -> set[str]:
    return {field.name for field in fields(kind)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}
