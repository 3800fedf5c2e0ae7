"""A text for a program that has all that the program hangs on, so that equal texts are one program.

A program is what a function of ours makes of its arguments. So the text has the function's name and
its arguments, spelled out to the last field, and what every function may look at: our sources, the
versions, the device, the settings of JAX and of the environment, and the tiles of products. What
cannot be spelled out has no text: an object of other people's classes, a function without a name,
a mesh of devices, sources that were edited since the process began, or JAX's settings for one
thread alone. Who replaces functions of ours while a process runs is not seen.
"""

import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import numpy as np

# JAX has no public way to ask for all that its traces hang on.
from jax._src.config import trace_context
from jax.sharding import PartitionSpec

import pallas_kernels
from jflash.system import sources
from jflash.system.device import versions
from pallas_kernels.matmul.tiles import preferred

OURS = ("jflash", "pallas_kernels")
# Of the environment, which change what is compiled; JAX's own variables are settings of it.
VARIABLES = ("XLA_FLAGS", "TF_XLA_FLAGS", "MOSAIC_", "TRITON_", "LLVM_", "CUDA_ROOT", "FLAX_")
IDLE = ("jax_compilation_cache_", "jax_persistent_cache_")  # settings that change nothing compiled
PLAIN = (type(None), bool, int, float, str, bytes)


class Unnamed(Exception):
    """A value that cannot be spelled out."""


def name_of(function: Callable[..., Any], given: tuple) -> str | None:
    """The text for what `function` makes of the arguments `given`; None if there is none."""
    try:
        return f"{_everywhere()}\n{spelled((function, given))}"
    except Unnamed:
        return None


def _everywhere() -> str:
    digest, flags = sources.digest(), os.environ.get("XLA_FLAGS", "").strip()
    if digest is None or Path(pallas_kernels.__file__).parent not in sources.ROOTS:
        raise Unnamed("sources")
    if flags and not flags.startswith("-"):
        raise Unnamed("XLA reads such flags from a file")
    with ThreadPoolExecutor(1) as new:
        if new.submit(trace_context).result() != trace_context():
            raise Unnamed("settings of this thread")
    settings = {k: v for k, v in jax.config.values.items() if not k.startswith(IDLE)}
    variables = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    known = (sorted(x.items()) for x in (settings, variables, preferred()))
    return spelled((digest, _machine(), jax.device_count(), *known))


@functools.cache
def _machine() -> tuple:
    """What programs are made with, and for."""
    device = jax.devices()[0]
    sizes = (getattr(device, name, None) for name in ("compute_capability", "core_count"))
    packages = [(name, version(name)) for name in ("numpy", "ml_dtypes")]
    return sys.version, versions(), packages, device.platform, device.device_kind, *sizes


def spelled(value: Any) -> str:
    """The value in full: unlike a repr it leaves out no field and no number. Unnamed for others."""
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({','.join(map(spelled, value))})"
    if type(value) is dict:
        return f"dict{spelled(list(value.items()))}"
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.ShapedArray):
        return f"array{_abstract(value)}"
    if isinstance(value, np.dtype):
        return f"dtype({value})"
    if isinstance(value, PartitionSpec):
        return f"spec{spelled(tuple(value))}"
    if type(value) is functools.partial:
        return f"partial{spelled((value.func, value.args, value.keywords))}"
    if isinstance(value, type | FunctionType):
        return _home(value)
    if is_dataclass(value):
        return _home(type(value)) + spelled(
            [(f.name, getattr(value, f.name)) for f in fields(value)]
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _home(type(value)) + spelled(tuple(value))
    raise Unnamed(f"{type(value)}")


def _abstract(x: Any) -> str:
    """Shape, dtype and place of an array that is not there, if it lies as arrays mostly do."""
    own = x if isinstance(x, jax.core.ShapedArray) else x.format
    mesh = getattr(x.sharding, "mesh", None)
    placed = x.sharding is not None and (mesh is None or not mesh.empty)
    if placed or str(own.layout) not in ("None", "AutoLayout") or getattr(x, "is_ref", False):
        raise Unnamed(f"{x}")
    return f"({tuple(x.shape)},{x.dtype},{x.weak_type},{getattr(x, 'memory_space', None)})"


def _home(named: type | FunctionType) -> str:
    """Where our sources have this class or function; Unnamed for one that was made elsewhere."""
    found: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    if named.__module__.split(".")[0] not in OURS or found is not named:
        raise Unnamed(f"{named}")
    return f"{named.__module__}.{named.__qualname__}"
