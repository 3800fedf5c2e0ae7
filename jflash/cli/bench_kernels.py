"""bench-kernels: op × shape × backend, microseconds, share of bandwidth and error."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from jflash.bench.floors import measure_rates
from jflash.bench.kernels.cases import OPS, make_case
from jflash.bench.kernels.times import COLUMNS, measure, row_text
from jflash.cli.command import Options
from jflash.cli.options.values import refuse
from jflash.cli.results import partial
from jflash.system.device import describe_device


def make_plan(args: Options) -> list[tuple[str, str, str]]:
    """op, shape and backend of every case; ValueError for an unknown name."""
    ops = args.op.split(",")
    _check_names("op", ops, OPS)
    shapes, backends = (text.split(",") if text else [] for text in (args.shape, args.backend))
    _check_names("shape", shapes, sorted({shape for op in ops for shape in OPS[op].shapes}))
    known = {backend for op in ops for backend in (*OPS[op].backends, "reference")}
    _check_names("backend", backends, sorted(known))
    return [
        (op, shape, backend)
        for op in ops
        for shape in OPS[op].shapes
        if not shapes or shape in shapes
        for backend in backends or OPS[op].backends
    ]


def _check_names(what: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        refuse(name not in known, f"no {what} is called {name!r}: use {', '.join(known)}")


def run(args: Options) -> Iterator[dict[str, Any]]:
    """Prints the table row by row, and yields all rows so far after each."""
    plan = make_plan(args)
    if jax.default_backend() != "gpu":
        raise ValueError("nothing to time: kernels run on a GPU, and JAX sees none here")
    rate = measure_rates(args.dtype)
    bandwidth = rate["bytes_per_second"]
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.2f} TB/s\n\n{COLUMNS}")
    result: dict[str, Any] = describe_device() | {
        "bytes_per_second": bandwidth,
        "array_bytes": rate["array_bytes"],
        "rows": [],
    }
    for op, shape, backend in plan:
        row = measure(make_case(op, shape, args.dtype, backend), bandwidth, args.rounds)
        print(row_text(row), flush=True)
        result["rows"].append(row)
        yield partial(result, missing=len(plan) - len(result["rows"]))
