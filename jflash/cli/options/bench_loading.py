"""Measure the host's memory while a checkpoint is loaded, also for devices that share it.

Random weights of a published shape are written first, and each load has a process of its own. The
peak counts what no file backs; on a CPU the weights lie there too, and are taken off.
"""

import argparse
import tempfile
from pathlib import Path

from jflash.bench.shapes import SHAPES, model_shape
from jflash.cli.command import Options, Parser
from jflash.cli.options.values import at_least_1, counts, refuse
from jflash.records.parts import OVER

KEPT = "kept there load by load"
FORMS = ("safetensors", "orbax")


def declare(parser: Parser) -> None:
    add = parser.add_argument
    shapes = f"whose target, default qwen3-32b: {', '.join(SHAPES)}"
    add("--shape", default="qwen3-32b", metavar="NAME", help=shapes)
    add("--layers", type=int, metavar="N", help="of the target, by default all")
    add("--tensor-parallel", type=counts, default=(1,), metavar="1,2", help="default 1")
    add("--experts-over", choices=OVER, default=OVER[0], help="as for generate")
    forms = f"of the checkpoint, default all: {','.join(FORMS)}"
    add("--forms", type=lambda text: tuple(text.split(",")), default=FORMS, help=forms)
    where = "where the checkpoints are written and deleted again, default the system's"
    add("--folder", type=Path, metavar="DIR", default=Path(tempfile.gettempdir()), help=where)

    # One load, in a process that does nothing else: a checkpoint and a file for its result.
    add("--load", nargs=2, type=Path, metavar=("SOURCE", "RESULT"), help=argparse.SUPPRESS)


def check(args: Options) -> None:
    target = model_shape(args.shape).target
    layers = target.num_layers
    at_least_1(args, "layers")
    refuse((args.layers or 0) > layers, f"--layers {args.layers}: {args.shape} has {layers}")
    refuse(set(args.forms) - set(FORMS), f"--forms {','.join(args.forms)}: of {','.join(FORMS)}")
    whole = args.experts_over != OVER[0] and min(args.tensor_parallel) < 2
    refuse(whole, "--experts-over devices needs --tensor-parallel of 2 or more")
    dense = args.experts_over != OVER[0] and not target.experts
    refuse(dense, f"--experts-over devices: {args.shape} has no experts")
    refuse(not args.folder.is_dir(), f"--folder {args.folder}: no such folder")
