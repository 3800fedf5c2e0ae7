"""Compiles the step of all layers for this GPU, autotuned, and shows what the program must show.

python scripts/check_program.py --shape qwen3-8b --batch 1,8,32

The gates of tests/proof/test_gates.py, which compiles four layers without a GPU: one command
buffer, no copy of a cache or of weights, bounded temporaries, no spills. Nothing is run and no
weights exist.
Exit code 0: all hold; 1: not so, and where; 2: bad input or no GPU.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jflash.backends import BACKENDS, named, with_backends
from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli.command import Parser, run_command
from jflash.cli.output_file import check_whole_file, keep_newest
from jflash.device import describe_device
from jflash.platform import leave_compilation_cache
from jflash.proof.compile_target import inspect
from jflash.proof.gates import Result, check
from jflash.proof.step_program import StepProgram, pair_models, plain_models, step_program

FAILED = 1
DTYPE = "bfloat16"
SHOWN = 3  # offences of a gate


def make_parser() -> Parser:
    parser = Parser("check_program.py", (__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--shape", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}, default qwen3-8b")
    add("--batch", type=numbers, default=(1, 8, 32), metavar="1,8,32", help="default 1,8,32")
    add("--capacity", type=int, default=2048, help="cache slots a sequence, default 2048")
    for field in BACKENDS:
        add(f"--{field.replace('_', '-')}", metavar="NAME", help="by default jflash's own choice")
    printed = "the last line, which is printed anyway, written there too"
    add("--json", type=Path, nargs="?", metavar="FILE", help=printed)
    add("--overwrite", action="store_true", help="replace an existing --json")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(piece) for piece in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1,8,32")
    return found


def programs(args: argparse.Namespace) -> dict[str, StepProgram]:
    """What is compiled, by name: plain decoding and the pair's step at every batch size."""
    shape = model_shape(args.shape)
    asked = {n: vars(args)[n] for n in BACKENDS if vars(args)[n] is not None}
    found = {}
    for kind, models in (("plain", plain_models(shape)), ("step", pair_models(shape))):
        models = with_backends(models, DTYPE, jax.devices()[0], **asked)
        for batch in args.batch:
            found[f"{kind} B={batch}"] = step_program(models, batch, args.capacity, DTYPE)
    return found


def check_one(program: StepProgram) -> tuple[list[Result], float]:
    """The gates' verdicts, and the seconds it took to compile."""
    begin = time.perf_counter()
    lowered = jax.jit(program.run, donate_argnums=1).lower(*program.arguments)
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


def main(args: argparse.Namespace) -> None:
    if args.capacity < 256 or args.capacity % 256:
        raise ValueError(f"--capacity {args.capacity}: a multiple of 256")
    if args.overwrite and args.json is None:
        raise ValueError("--overwrite without --json")
    model_shape(args.shape)  # a wrong name is the user's first concern
    if jax.default_backend() != "gpu":
        raise ValueError(
            "this compiles for the NVIDIA GPU of this machine, and JAX sees none: "
            "tests/proof/test_gates.py compiles for an H200 anywhere"
        )
    if args.json is not None:
        check_whole_file(args.json, args.overwrite)
    todo = programs(args)
    leave_compilation_cache()  # the assembler says nothing of a program that is not compiled
    report: dict[str, Any] = {**describe_device(), "shape": args.shape, "capacity": args.capacity}
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
    print(keep_newest(args.json, [json.dumps(report)]))
    if report["failed"]:
        raise SystemExit(FAILED)


if __name__ == "__main__":
    sys.exit(run_command(make_parser(), main, None))
