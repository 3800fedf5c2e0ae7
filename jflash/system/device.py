"""The device, the versions and the date of a result."""

import datetime
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax


def device_name() -> str:
    """JAX's name of the device; a CPU's model, because 'cpu' says nothing about speed."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"CPU: {model}, {os.cpu_count()} cores"


def device_memory() -> int | None:
    """Bytes that JAX may take of the first device, or a CPU's free memory; None if unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats.get("bytes_limit")
    meminfo = Path("/proc/meminfo")  # Linux only
    if jax.default_backend() != "cpu" or not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else None


def describe_device() -> dict[str, Any]:
    """device, versions, xla_flags and date of a run; None for what this machine does not have."""
    return {
        "device": device_name(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def versions() -> dict[str, str | None]:
    """Of what compiles and runs a program."""
    return {
        "jax": jax.__version__,
        "jaxlib": _package("jaxlib"),
        "flax": _package("flax"),
        "platform": " ".join(jax.devices()[0].client.platform_version.split()),
        "driver": _driver(),
    }


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if jax.default_backend() == "cpu" or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None
