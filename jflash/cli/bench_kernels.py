"""bench-kernels: op × shape × backend, microseconds, share of bandwidth and error."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import jax

from jflash.bench.floors import measure_rates
from jflash.bench.kernel_cases import OPS
from jflash.bench.kernel_times import COLUMNS, measure, row_text
from jflash.device import describe_device
from jflash.files import keep_newest


def make_plan(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """op, shape, backend of every case. ValueError for a name that there is not."""
    ops = args.op.split(",")
    for op in ops:
        if op not in OPS:
            raise ValueError(f"no op is called {op!r}: use {', '.join(OPS)}")
    known = {shape for op in ops for shape in OPS[op].shapes}
    backends = {backend for op in ops for backend in (*OPS[op].backends, "reference")}
    for asked, names, what in ((args.shape, known, "shape"), (args.backend, backends, "backend")):
        for name in asked.split(",") if asked else ():
            if name not in names:
                raise ValueError(f"no {what} is called {name!r}: use {', '.join(sorted(names))}")
    return [
        (op, shape, backend)
        for op in ops
        for shape in OPS[op].shapes
        if not args.shape or shape in args.shape.split(",")
        for backend in (args.backend.split(",") if args.backend else OPS[op].backends)
    ]


def benchmark(args: argparse.Namespace, plan: list[tuple[str, str, str]]) -> Iterator[str]:
    """Prints the table row by row; after each row all of them as a line of JSON.

    Which says how many cases are still to come, unless it is the last.
    """
    rate = measure_rates(args.dtype)
    bandwidth = rate["bytes_per_second"]
    print(f"{jax.devices()[0].device_kind}: reads {bandwidth / 1e12:.2f} TB/s\n\n{COLUMNS}")
    result: dict[str, Any] = describe_device() | {
        "bytes_per_second": bandwidth,
        "array_bytes": rate["array_bytes"],
        "rows": [],
    }
    for op, shape, backend in plan:
        row = measure(OPS[op].case(shape, args.dtype, backend), bandwidth, args.rounds)
        print(row_text(row), flush=True)
        result["rows"].append(row)
        missing = len(plan) - len(result["rows"])
        yield json.dumps(result | ({"missing_cases": missing} if missing else {}), allow_nan=False)


def run(args: argparse.Namespace) -> None:
    plan = make_plan(args)
    if jax.default_backend() != "gpu":
        raise ValueError("nothing to time: kernels run on a GPU, and JAX sees none here")
    print(keep_newest(args.json, benchmark(args, plan)))
