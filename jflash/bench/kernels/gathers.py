"""Times of a gather over all devices of a host, by each backend, and whether both give the same.

Gathers stand in a loop on the device, eight to an iteration, each of what the one before it gave.
What the loop takes with a copy in place of the gather is subtracted.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jflash.layers.gather import AXIS, gather, pushing
from pallas_kernels.gather import Places, empty_places

SIZES = ((16, 2048), (16, 6144), (128, 2048), (128, 6144), (512, 2048), (512, 6144))
EACH, TRIPS, REPEATS = 8, 40, 7
OWN: Any = PartitionSpec(AXIS)
PLACES = Places(OWN, OWN, OWN, OWN)
COLUMNS = PartitionSpec(None, AXIS)
WAYS = ("copy", "push", "xla")


class _Bench(NamedTuple):
    mesh: Mesh
    places: Places

    def put(self, x: np.ndarray, spec: PartitionSpec) -> Array:
        return jax.device_put(x, NamedSharding(self.mesh, spec))


def time_gathers(mesh: Mesh) -> Iterator[dict[str, Any]]:
    """A line for each size: rows, columns of a device, and microseconds of a gather."""
    places = empty_places(mesh.size)
    bench = _Bench(mesh, places)

    def of_all(one: Array) -> Array:
        return bench.put(np.zeros((mesh.size * len(one), *one.shape[1:]), one.dtype), OWN)

    bench = bench._replace(places=jax.block_until_ready(jax.tree.map(of_all, places)))
    for rows, columns in SIZES:
        found, results = {}, {}
        for way in WAYS:
            found[way], results[way], bench = _timed(bench, way, rows, columns)
        yield {
            "devices": mesh.size, "rows": rows, "columns": columns, "bytes": 2 * rows * columns,
            **{f"{way}_us": found[way] - found["copy"] for way in WAYS[1:]},
            "copy_us": found["copy"], "same": bool((results["push"] == results["xla"]).all()),
        }  # fmt: skip


def _timed(bench: _Bench, way: str, rows: int, columns: int) -> tuple[float, np.ndarray, _Bench]:
    """Microseconds of one turn, the median of the repeats, and what the first repeat gave."""
    devices = bench.mesh.size

    def one(x: Float[Array, "M C"]) -> Float[Array, "M C"]:
        whole = jnp.tile(x, (1, devices)) if way == "copy" else gather(x, devices)
        first = lax.rem(lax.axis_index(AXIS) + 1, devices) * columns
        return lax.dynamic_slice_in_dim(whole, first, columns, axis=1) + jnp.bfloat16(1)

    def loop(places: Places, x: Array) -> tuple[Array, Places]:
        references = jax.tree.map(jax.new_ref, places)

        def several(_: Any, x: Array) -> Array:
            for _ in range(EACH):
                x = one(x)
            return x

        if way == "push":
            with pushing(references):
                x = lax.fori_loop(0, TRIPS, several, x)
        else:
            x = lax.fori_loop(0, TRIPS, several, x)
        return x, jax.tree.map(jax.freeze, references)

    specs = (PLACES, COLUMNS), (COLUMNS, PLACES)
    over = jax.shard_map(
        loop, mesh=bench.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )
    program, places = jax.jit(over, donate_argnums=0), bench.places
    drawn = np.random.default_rng(0).normal(size=(rows, devices * columns))
    x = bench.put(drawn.astype(jnp.bfloat16), COLUMNS)
    first, places = program(places, x)
    result, seconds = np.asarray(first), []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        y, places = program(places, x)
        jax.block_until_ready(y)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(seconds)) / (EACH * TRIPS), result, bench._replace(places=places)
