"""check-program: the step of all layers, compiled for GPUs of this host, held to the gates."""

import sys
import time
from collections.abc import Generator
from typing import Any

import jax

from jflash.bench.shapes import model_shape
from jflash.cli.command import Options
from jflash.cli.options.pair import shared_note
from jflash.cli.options.results import chosen_backends
from jflash.compiled.programs import lower_run
from jflash.devices.backends import named, with_backends
from jflash.devices.mesh import for_batch, over, tensor_mesh
from jflash.proof.program.compiled import inspect
from jflash.proof.program.gates import Result, check
from jflash.proof.program.step_program import StepProgram, models_of, step_program
from jflash.system.device import describe_device
from jflash.system.program_cache import leave_program_cache

FAILED = 1
DTYPE = "bfloat16"
SHOWN = 3  # offences of a gate


def programs(args: Options) -> dict[str, StepProgram]:
    """The programs to compile, by name: plain decoding and the pair's step at every batch size."""
    pair = models_of(model_shape(args.shape))
    pair = over(pair, tensor_mesh(args.tensor_parallel), args.experts_over)
    found = {}
    for kind, models in (("plain", pair.plain()), ("step", pair)):
        models = with_backends(models, DTYPE, jax.devices()[0], **chosen_backends(args))
        for batch in args.batch:
            found[f"{kind} B={batch}"] = step_program(
                for_batch(models, batch), batch, args.capacity
            )
    return found


def check_one(program: StepProgram) -> tuple[list[Result], float]:
    """The gates' verdicts, and the seconds it took to compile."""
    begin = time.perf_counter()
    lowered = lower_run(program.models, *program.arguments[:2])
    left = inspect(lambda options: lowered.compile(compiler_options=dict(options)))
    seconds = time.perf_counter() - begin
    return check(left, program.temporary_bound), seconds


def print_results(name: str, results: list[Result], seconds: float) -> None:
    print(f"{name}, compiled in {seconds:.0f} s")
    for result in results:
        print(f"  {'ok' if result.passed else 'FAILED':<7}{result.gate:<20}{result.measured}")
        for offence in result.offences[:SHOWN]:
            print(f"         {offence}")
        if len(result.offences) > SHOWN:
            print(f"         and {len(result.offences) - SHOWN} more")
    sys.stdout.flush()


def run(args: Options) -> Generator[dict[str, Any], None, int]:
    if jax.default_backend() != "gpu":
        why = "this compiles for the NVIDIA GPU of this machine, and JAX sees none"
        raise ValueError(f"{why}: tests/proof/test_gates.py compiles for an H200 anywhere")
    todo = programs(args)
    leave_program_cache()  # the assembler reports only on a program that it compiles
    report: dict[str, Any] = {**describe_device(), "shape": args.shape, "capacity": args.capacity}
    report |= shared_note(args)
    models = next(iter(todo.values())).models
    report |= named(models.kernels) | {"programs": {}, "failed": 0}
    for name, program in todo.items():
        results, seconds = check_one(program)
        print_results(name, results, seconds)
        report["programs"][name] = {
            "compile_seconds": round(seconds, 1),
            **{r.gate: {"passed": r.passed, "value": r.value, "measured": r.measured,
                        "offences": r.offences} for r in results},
        }  # fmt: skip
        report["failed"] += sum(not r.passed for r in results)
    yield report
    return FAILED if report["failed"] else 0
