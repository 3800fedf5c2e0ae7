"""soak: a server under load for minutes; exit code 1 if a text, a slot or memory went wrong."""

from collections.abc import Generator
from typing import Any

from jflash.cli.command import Options, require
from jflash.cli.options.pair import DEFAULT_TARGET
from jflash.cli.options.values import option_name
from jflash.device import describe_device

FAILED = 1


def run(options: Options) -> Generator[dict[str, Any], None, int]:
    require("httpx", "starlette", "uvicorn", "prometheus_client", "msgspec", "llguidance")
    from jflash.proof.soak import soak

    o = options
    served = ["--max-queue", str(2 * o.clients)]
    if o.verify_rows is not None:
        served += ["--verify-rows", str(o.verify_rows)]
    names = ("target", "drafter", "dtype", "block_size", "attention_backend")
    for name in (*names, "max_batch", "max_context"):
        value = getattr(o, name)
        # The embedded pair is also the server's default, so the result names no local folder.
        if value is not None and value != DEFAULT_TARGET:
            served += [option_name(name), str(value)]
    result = soak(served, o.minutes, o.clients, o.seed)
    for problem in result.problems[:20]:
        print(problem)
    ends = ", ".join(f"{count} {how}" for how, count in sorted(result.ends.items()))
    first, last = result.resident[0] / 2**20, result.resident[-1] / 2**20
    print(f"{ends}; memory {first:.0f} → {last:.0f} MiB; {result.compiled} programs compiled")
    yield {"check": "soak", "server": served} | result.body() | describe_device()
    return FAILED if result.problems else 0
