"""A run by replicas on Ray: each makes its part in a process of its own, and a lost part is made
again. All processes work in one folder, which the hosts of a cluster share, and what a lost part
left there is its maker's to go on from. This file knows no model.
"""

# pyright: reportMissingImports=false
# Ray is an extra that `dev` lacks.

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TRIES = 3  # of a part
KNOCK = 10.0  # seconds for a cluster to take a connection
OF_COMMANDS = (ValueError, OSError, ModuleNotFoundError)  # which commands print as a line
Make = Callable[[int, int], Any]  # part `index` of `of`


@contextlib.contextmanager
def cluster(
    address: str | None, processes: int, devices: int = 1, at_once: int = 1
) -> Iterator[None]:
    """Ray for the block: the cluster at `address`, or one of this machine.

    ValueError if this machine has GPUs, but too few for `at_once` replicas of `devices` each: they
    would wait for ever. A cluster may get more.
    """
    import ray

    # "local": by itself Ray would join one that already runs here, or that RAY_ADDRESS names.
    own: dict[str, Any] = {"address": "local", "num_cpus": max(processes, os.cpu_count() or 1)}
    if address is not None:
        _knock(address)
        own = {"address": address}
    ray.init(logging_level=logging.ERROR, include_dashboard=False, **own)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if address is None and 0 < gpus < at_once * devices:
            need = f"the replicas need {at_once * devices} GPUs at once"
            raise ValueError(f"{need}, and this machine has {gpus}: ask for fewer")
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """ValueError if nobody listens at an address of a host and a port: Ray asks for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # a word, such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()
    except (OSError, OverflowError) as error:
        why = f"nothing answers there ({getattr(error, 'strerror', None) or error})"
        raise ValueError(f"--ray-address {address}: {why}") from None


def gpus_of(devices: int) -> int:
    """What to ask Ray for a replica of as many devices: GPUs if the cluster has any."""
    import ray

    return devices if ray.cluster_resources().get("GPU") else 0


class _Replica:
    def make(self, make: Make, index: int, parts: int, folder: Path) -> Any:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not on every host: replicas share a run's files")
        os.chdir(folder)
        return make(index, parts)


def made(make: Make, parts: int, devices: int) -> list[Any]:
    """What `make` returns for each part, made by as many replicas of `devices` each.

    An error of OF_COMMANDS is raised here as `make` raised it. A part whose process dies is made
    again, TRIES times in all.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    actor = ray.remote(num_cpus=1, num_gpus=gpus_of(devices))(_Replica)
    folder = Path.cwd()

    def begin(index: int) -> Any:
        replica = actor.remote()
        return replica.make.remote(make, index, parts, folder), replica

    results: dict[int, Any] = {}
    lost = dict.fromkeys(range(parts), 0)
    running = {index: begin(index) for index in range(parts)}
    while running:
        [ready], _ = ray.wait([future for future, _ in running.values()])
        [index] = [index for index, (future, _) in running.items() if future == ready]
        running.pop(index)
        try:
            results[index] = ray.get(ready)
        except RayActorError:
            lost[index] += 1
            if lost[index] == TRIES:
                raise ValueError(f"replica {index} of {parts} ended {TRIES} times") from None
            print(f"replica {index} of {parts} is lost: its part begins again", file=sys.stderr)
            running[index] = begin(index)
        except RayTaskError as error:
            # Ray's own error has the replica's trace as its text.
            raise error.cause if isinstance(error.cause, OF_COMMANDS) else error from None
    return [results[index] for index in range(parts)]
