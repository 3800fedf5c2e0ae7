"""Which backend of an op runs: what a device has, what is refused by name, what is best.

An op's package has BACKENDS, its modules by name with the best first, where what stands after "xla"
runs on request only; and `refusal(backend, sizes, device)`, which says why a backend cannot do it,
or None. `device` is a jax.Device, or None to leave it out of the question.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def backend_of(op: str, name: str, backends: Mapping[str, Any]) -> Any:
    """An op's backend by its name; ValueError for a name that the op does not know."""
    if name not in backends:
        raise ValueError(f"{op} has no backend {name!r}: use one of {', '.join(backends)}")
    return backends[name]


def best(package: Any, sizes: Iterable[Any], device: Any) -> str:
    """The first of a package's backends that takes all of `sizes` on a jax.Device."""
    sizes = list(sizes)
    return next(
        name
        for name in package.BACKENDS
        if not any(package.refusal(name, x, device) for x in sizes)
    )


def check(op: str, package: Any, backend: str, sizes: Iterable[Any], device: Any) -> None:
    """ValueError, with the reason and what to use instead, if `backend` cannot do this."""
    sizes = list(sizes)
    backend_of(op, backend, package.BACKENDS)
    for each in sizes:
        reason = package.refusal(backend, each, device)
        if reason:
            instead = "xla" if device is None else best(package, sizes, device)
            raise ValueError(f"{op} backend {backend!r} {reason}: use {instead!r}")


def device_refusal(kind: str, device: Any) -> str | None:
    """Why a jax.Device runs nothing of a kind ("mosaic_gpu", "triton", "cpu"); None if it does."""
    if device is None:
        return None
    major, minor = _compute_capability(device)
    here = f"sm{major}{minor}" if major else f"a {device.platform} device"
    if kind == "cpu" and device.platform != "cpu":
        return f"is for CPUs, and this is {here}"
    if kind == "mosaic_gpu" and major != 9:  # only sm90 has wgmma: sm100 and sm120 lack it
        return f"needs an NVIDIA GPU of compute capability 9.x, and this is {here}"
    if kind == "triton" and major < 8:
        return f"needs an NVIDIA GPU of compute capability 8.0 or more, and this is {here}"
    return None


def _compute_capability(device: Any) -> tuple[int, int]:
    """(9, 0) for sm90; (0, 0) for what is no NVIDIA GPU (other makers' say "gfx942" there)."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if device.platform not in ("gpu", "cuda") or not (major.isdigit() and minor.isdigit()):
        return 0, 0
    return int(major), int(minor)
