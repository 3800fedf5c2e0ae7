"""soak: a server under load for minutes; exit code 1 if a text, a slot or memory went wrong."""

from collections.abc import Generator
from typing import Any

from jflash.cli.command import Options, require
from jflash.cli.options.pair import DEFAULT_TARGET
from jflash.cli.options.values import option_name
from jflash.system.device import describe_device

FAILED = 1
SERVED = (
    "target", "drafter", "dtype", "quantised", "drafter_dtype", "attention_backend", "block_size",
    "verify_rows", "tensor_parallel", "experts_over", "max_batch", "max_context",
)  # fmt: skip


def server_options(options: Options) -> list[str]:
    """The command line of the server: every option of the models and of its sizes."""
    served = ["--max-queue", str(2 * options.clients)]
    for name in SERVED:
        value = getattr(options, name)
        # The embedded pair is also the server's default, so the result names no local folder.
        if value not in (None, "", DEFAULT_TARGET):
            served += [option_name(name), str(value)]
    return served


def run(options: Options) -> Generator[dict[str, Any], None, int]:
    require("httpx", "starlette", "uvicorn", "prometheus_client", "msgspec", "llguidance")
    from jflash.proof.soak import soak

    served = server_options(options)
    result = soak(served, options.minutes, options.clients, options.seed)
    for problem in result.problems[:20]:
        print(problem)
    ends = ", ".join(f"{count} {how}" for how, count in sorted(result.ends.items()))
    first, last = result.resident[0] / 2**20, result.resident[-1] / 2**20
    if result.device_bytes:
        low, high = (bound(result.device_bytes) / 2**20 for bound in (min, max))
        print(f"the device's memory in use: {low:.0f} to {high:.0f} MiB")
    print(f"{ends}; memory {first:.0f} → {last:.0f} MiB; {result.compiled} programs compiled")
    yield {"check": "soak", "server": served} | result.body() | describe_device()
    return FAILED if result.problems else 0
