"""bench-devices: whole steps on one device and on several that share the pair."""

from collections.abc import Iterator
from typing import Any

import jax

from jflash.bench.kernels.gathers import time_gathers
from jflash.bench.shapes import form_of, model_shape
from jflash.bench.steps.case import Task
from jflash.bench.steps.report import collect, device_line
from jflash.cli.benchmark import measure
from jflash.cli.command import BAD_INPUT, Options
from jflash.cli.results import partial
from jflash.devices.mesh import tensor_mesh
from jflash.records.parts import OVER
from jflash.system.device import describe_device
from pallas_kernels import gather
from pallas_kernels.choice import check


def run(args: Options) -> Iterator[dict[str, Any]]:
    """Prints a line a case, and yields all cases so far after each number of devices."""
    if args.gathers:
        yield gathers_of(jax.local_device_count())
        return
    todo = [(shape, batch) for shape, batches in args.cases for batch in batches]
    cases: list[dict[str, Any]] = []
    missing = sum(len(ways(args, shape)) for shape, _ in todo)
    for shape, batch in todo:
        first = None
        for devices, experts in ways(args, shape):
            last = devices == args.devices[-1]
            case = timed(task(args, shape, batch, devices, experts), last)
            missing -= 1
            if case is None:
                print(f"{shape}, batch {batch}: not on {devices}, as the line above says")
                continue
            first = first or case
            add_share(case, first)
            print(*([] if cases else [device_line(case)]), line(case), sep="\n", flush=True)
            cases.append(case)
            yield partial(collect(cases, None), missing)


def gathers_of(devices: int) -> dict[str, Any]:
    """Prints a line a size; ValueError for a single device, or one that does not push."""
    check("gather", gather, "push", [gather.Sizes(devices)], jax.local_devices()[0])
    mesh, times = tensor_mesh(devices), []
    assert mesh is not None
    for each in time_gathers(mesh):
        same = "the same" if each["same"] else "NOT the same"
        print(
            f"{each['rows']} rows of {each['columns']} columns of each of {devices} devices: "
            f"{each['push_us']:.1f} us pushed, {each['xla_us']:.1f} us by XLA, {same}", flush=True,
        )  # fmt: skip
        times.append(each)
    return describe_device() | {"gathers": times}


def ways(args: Options, shape: str) -> list[tuple[int, str]]:
    """Numbers of devices, each with what they share of a shape's experts."""
    several = args.experts_over if model_shape(form_of(shape)[0]).target.experts else OVER[:1]
    return [(n, how) for n in args.devices for how in (several if n > 1 else OVER[:1])]


def task(args: Options, shape: str, batch: int, devices: int, experts: str) -> Task:
    """The whole step of a shape, with twice the context as capacity."""
    shape, form = form_of(shape)
    return Task(
        **{name: getattr(args, name) for name in ("context", "dtype", "steps", "repeats")},
        shape=shape,
        target=None,
        drafter=None,
        batch=batch,
        capacity=-(-2 * args.context // 256) * 256,
        widths=(),
        only_step=True,
        backends={},
        prompts=(),
        max_new_tokens=1,
        stop_token_ids=(),
        tensor_parallel=devices,
        experts_over=experts,
        quantised=form,
    )


def timed(task: Task, last: bool) -> dict[str, Any] | None:
    """A case; None if its process printed a refusal and more devices are still to come."""
    try:
        return measure(task, with_memory=False)
    except SystemExit as refused:
        if last or refused.code != BAD_INPUT:
            raise
        return None


def add_share(case: dict[str, Any], first: dict[str, Any]) -> None:
    """Adds the share that the step takes of its time on the smallest number of devices."""
    if case is not first:
        share = case["step"]["ms"] / first["step"]["ms"]
        case["against"] = {"tensor_parallel": first["tensor_parallel"], "share_of_time": share}


def line(case: dict[str, Any]) -> str:
    devices, step = case["tensor_parallel"], case["step"]
    over = ", experts whole" if case.get("experts_over") == "devices" else ""
    kept = f" in {case['quantised']}" if case.get("quantised") else ""
    text = (
        f"{case['shape']}{kept}, batch {case['batch']}, context {case['context']:.0f}, "
        f"{devices} device{'s' * (devices > 1)}{over}: {step['ms']:.3f} ms, "
        f"{step['share_of_floor']:.1%} of the floor"
    )
    if "against" in case:
        other = case["against"]
        text += f", {other['share_of_time']:.3f} × the time of {other['tensor_parallel']}"
    return text
