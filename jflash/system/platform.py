"""The settings of JAX for a whole process: XLA's flags, GPU memory, compiled programs.

`import jflash` sets none of them. A program calls `configure` once, before JAX touches a device;
every command does. This file knows no model, and imports JAX only where it must.
What the environment sets already (XLA_FLAGS, XLA_CLIENT_MEM_FRACTION,
XLA_PYTHON_CLIENT_PREALLOCATE, JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE) stays.
"""

import os
from typing import NamedTuple

from jflash.system.program_cache import leave_program_cache, use_program_cache


class Flag(NamedTuple):
    """An XLA flag and why it is set."""

    name: str
    value: str
    reason: str


# The flags that the GPU programs rely on, always set: one line each.
XLA_FLAGS: tuple[Flag, ...] = ()

NO_CUDA_GRAPHS = Flag(
    "--xla_gpu_enable_command_buffer",
    "",  # of no kind of operation
    "kernels are launched one by one: slower, for profilers and to find a fault",
)
# The newer name first: it is the one that is set.
MEMORY_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
AUTOTUNE, AUTOTUNE_DEFAULT = "JFLASH_AUTOTUNE", "0"


def configure(
    *,
    cuda_graphs: bool = True,
    autotune: bool | None = None,
    memory_fraction: float | None = None,
    preallocate: bool = True,
    compilation_cache: bool = True,
) -> list[str]:
    """Sets up this process before JAX touches a device; returns a line for each thing left undone.

    cuda_graphs False launches GPU kernels one by one. autotune says whether the tiles
    of our products are timed, else the environment's JFLASH_AUTOTUNE does.
    memory_fraction is the share of a GPU's memory that JAX may take, 0.75 if neither this nor the
    environment says; it takes it at once unless preallocate is False. compilation_cache keeps
    compiled programs in `cache_folder()` for the next process.

    ValueError for a fraction or a variable that is none, RuntimeError if a device is in use already
    and something would have to change.
    """
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise ValueError(f"memory fraction {memory_fraction} must be above 0 and at most 1")
    notices: list[str] = []
    changes = _xla_flags(() if cuda_graphs else (NO_CUDA_GRAPHS,), notices)
    if autotune is not None:
        os.environ[AUTOTUNE] = str(int(autotune))
    autotunes()  # a value that is none is refused now
    if memory_fraction is not None:
        changes |= _variable(MEMORY_FRACTION, str(memory_fraction), notices)
    if not preallocate:
        changes |= _variable((PREALLOCATE,), "false", notices)
    if changes and _in_use():
        raise RuntimeError(f"too late to set {', '.join(changes)}: JAX is using a device already")
    os.environ.update(changes)
    if compilation_cache:
        notices += use_program_cache()
    else:
        leave_program_cache()
    return notices


def autotunes() -> bool:
    """Whether the tiles of our products are timed on this device; ValueError for a value of the
    environment that is neither 1 nor 0."""
    value = os.environ.get(AUTOTUNE, AUTOTUNE_DEFAULT)
    if value not in ("0", "1"):
        raise ValueError(f"{AUTOTUNE} is {value!r} in the environment: set it to 1 or 0")
    return value == "1"


def _in_use() -> bool:
    # JAX has no public way to ask whether a backend has started.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _xla_flags(asked: tuple[Flag, ...], notices: list[str]) -> dict[str, str]:
    """XLA_FLAGS with ours before the user's; a flag that the user sets is left out of ours."""
    users = os.environ.get("XLA_FLAGS", "").strip()
    ours = [*XLA_FLAGS, *asked]
    if users and not users.startswith("-"):  # XLA reads such a value as a file's name
        if ours:
            notices.append(f"XLA_FLAGS={users} names a file: only its flags are used")
        return {}
    set_already = {name: value for name, _, value in (f.partition("=") for f in users.split())}
    for flag in asked:
        if set_already.get(flag.name, flag.value) != flag.value:
            notices.append(f"XLA_FLAGS sets {flag.name} already: that is kept")
    new = [f"{flag.name}={flag.value}" for flag in ours if flag.name not in set_already]
    return {"XLA_FLAGS": " ".join([*new, users]).strip()} if new else {}


def _variable(names: tuple[str, ...], value: str, notices: list[str]) -> dict[str, str]:
    """The first of `names` as `value`, unless the environment has one of them."""
    for name in names:
        present = os.environ.get(name, "")
        if present:
            if present != value:
                notices.append(f"{name}={present} is set in the environment: that is kept")
            return {}
    return {names[0]: value}
