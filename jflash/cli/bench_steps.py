"""bench-steps: whole steps of several shapes and batches in one process."""

from collections.abc import Iterator
from typing import Any

import jax

from jflash.bench.floors import Rates, measure_rates
from jflash.bench.steps.case import log
from jflash.bench.steps.table import Plan, step_times
from jflash.cli.command import Options
from jflash.cli.options.pair import shared_note
from jflash.cli.options.results import chosen_backends
from jflash.cli.options.values import refuse
from jflash.io import default_dtype
from jflash.system.device import describe_device
from jflash.system.locks import in_turn
from jflash.system.platform import autotunes


def run(args: Options) -> Iterator[dict[str, Any]]:
    sizes = args.capacity, args.steps, args.repeats
    plan = Plan(
        args.cases, args.contexts, *sizes, chosen_backends(args), args.kernels,
        args.tensor_parallel, args.experts_over,
    )  # fmt: skip
    refuse(args.kernels and jax.default_backend() != "gpu", "--kernels: only a GPU's are traced")
    result: dict[str, Any] = describe_device() | {
        "autotune": autotunes(),
        "capacity": plan.capacity,
        "timed_steps": plan.steps,
        "repeats": plan.repeats,
        **shared_note(args),
        "step_times": [],
    }
    with in_turn(args.in_turn) as wait:

        def rates() -> Rates:
            wait()
            result["floors"] = found = measure_rates(default_dtype())
            return Rates(found["bytes_per_second"], found["operations_per_second"])

        for row in step_times(plan, log, rates):
            devices = f"on {args.tensor_parallel} devices " if args.tensor_parallel > 1 else ""
            print(
                f"{row['shape']:18} {row['quantised'] or '':5} batch {row['batch']:<3} "
                f"{row['kind']:7} {row['places']:8} context {row['context']:6} {devices}"
                f"{row['ms']:8.3f} ms, floor {row['floor_ms']:.3f}, {row['share_of_floor']:.1%}",
                flush=True,
            )
            for kernel in row.get("kernels", ()):
                each = f"{kernel['us']:9.1f} us of {kernel['launches']:5g} launches"
                print(f"  {each}: {kernel['name'][:90]}", flush=True)
            result["step_times"].append(row | shared_note(args))
            yield result
