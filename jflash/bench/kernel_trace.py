"""The kernels of a call by a profiler's trace: how often each runs, and how long.

While a trace is made XLA launches kernels one by one, so the time between them says nothing; what a
kernel takes is the same.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

DEVICE, STREAM = "/device:GPU:0", "Stream"  # what XLA calls a device's plane and its lines
NUMBER = re.compile(r"(_\d+)+$|\.\d+$")


class Kernel(NamedTuple):
    """All kernels of one name without its trailing number, over one step."""

    name: str
    launches: float
    us: float


def kernels_of(call: Callable[[], Any], steps: int) -> list[Kernel]:
    """The kernels of one `call` of `steps` steps on the first GPU, the longest first.

    ValueError if the trace has no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return by_name(ProfileData.from_file(str(file)), steps)


def by_name(trace: Any, steps: int) -> list[Kernel]:
    """What a ProfileData of `steps` steps has on the first GPU; copies are kernels too."""
    plane = trace.find_plane_with_name(DEVICE)
    if plane is None:
        raise ValueError(f"the trace has no {DEVICE}: kernels are traced on GPUs alone")
    nanoseconds: dict[str, list[float]] = defaultdict(list)
    for line in plane.lines:
        if line.name.startswith(STREAM):
            for event in line.events:
                nanoseconds[NUMBER.sub("", event.name)].append(event.duration_ns)
    found = [Kernel(n, len(ns) / steps, sum(ns) / steps / 1e3) for n, ns in nanoseconds.items()]
    return sorted(found, key=lambda kernel: -kernel.us)
