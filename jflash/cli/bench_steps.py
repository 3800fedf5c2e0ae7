"""bench-steps: whole steps of several shapes and batches in one process."""

from collections.abc import Iterator
from typing import Any

from jflash.bench.case import log
from jflash.bench.step_table import Plan, step_times
from jflash.cli.command import Options
from jflash.device import describe_device
from jflash.files import in_turn
from jflash.platform import autotunes


def run(args: Options) -> Iterator[dict[str, Any]]:
    plan = Plan(args.cases, args.contexts, args.capacity, args.steps, args.repeats)
    result: dict[str, Any] = describe_device() | {
        "autotune": autotunes(),
        "capacity": plan.capacity,
        "timed_steps": plan.steps,
        "repeats": plan.repeats,
        "step_times": [],
    }
    with in_turn(args.in_turn) as wait:
        for row in step_times(plan, log, wait):
            print(
                f"{row['shape']:18} batch {row['batch']:<3} {row['kind']:7} {row['places']:8} "
                f"context {row['context']:6} {row['ms']:8.3f} ms",
                flush=True,
            )
            result["step_times"].append(row)
            yield result
