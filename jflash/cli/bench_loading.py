"""bench-loading: what loading takes of the host's memory."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jflash.bench.loading import measured, write_random
from jflash.bench.shapes import model_shape
from jflash.cli.benchmark import call
from jflash.cli.command import Options
from jflash.cli.interrupts import sigterm_cleans_up
from jflash.system.sources import same_paths

SAME = ("device", "versions", "xla_flags", "date")  # of all loads


def run(args: Options) -> Iterator[dict[str, Any]]:
    """Prints a line a load, and yields all loads so far."""
    if args.load:
        source, file = args.load
        [devices] = args.tensor_parallel
        file.write_text(json.dumps(measured(source, devices, args.experts_over)), encoding="utf-8")
        return
    config = model_shape(args.shape).target
    config = replace(config, layers=config.layers[: args.layers])
    result: dict[str, Any] = {"shape": args.shape, "layers": config.num_layers}
    result |= {"experts_over": args.experts_over, "loads": []}
    place = tempfile.TemporaryDirectory(prefix="jflash-loading-", dir=args.folder)
    with sigterm_cleans_up(), place as name:
        folder = Path(name)
        write_random(folder / "safetensors", config)
        for form in args.forms:
            if form == "orbax":
                command("convert", str(folder / "safetensors"), str(folder / form))
            for devices in args.tensor_parallel:
                load = loaded(folder / form, devices, args.experts_over)
                result |= {key: load.pop(key) for key in SAME}
                result["loads"].append({"form": form} | load)
                print(line(form, load), flush=True)
                yield result


def loaded(source: Path, devices: int, experts_over: str) -> dict[str, Any]:
    """A load by a fresh process."""
    file = source.with_suffix(".json")
    how = ["--tensor-parallel", str(devices), "--experts-over", experts_over]
    command("bench-loading", *how, "--load", str(source), str(file))
    return json.loads(file.read_text(encoding="utf-8"))


def command(*words: str) -> None:
    """A command of this jflash, installed or not; SystemExit if it refuses."""
    call([sys.executable, "-P", "-m", "jflash.cli.main", *words], os.environ | same_paths())


def line(form: str, load: dict[str, Any]) -> str:
    several = f" over {load['tensor_parallel']} devices" if load["tensor_parallel"] > 1 else ""
    before, peak = load["held_before_bytes"] / 2**30, load["peak_beside_weights_bytes"] / 2**30
    return (
        f"{form}{several}: {load['weights_bytes'] / 2**30:.2f} GiB of weights in "
        f"{load['seconds']:.0f} s, at most {peak:.2f} GiB beside them and the page cache, "
        f"{before:.2f} before"
    )
