"""Options that name the replicas of a run on Ray."""

import argparse

from jflash.cli.command import Options
from jflash.cli.options.values import at_least_1, refuse

COUNT = "processes on Ray, each with the whole {}; needs jflash[ray]"
ADDRESS = (
    "a Ray cluster's, such as auto; default: a Ray of this machine, which ends with the command"
)


def replica_options(group: argparse._ArgumentGroup, what: str = "pair") -> None:
    """`what` each replica holds."""
    group.add_argument("--replicas", type=int, metavar="N", help=COUNT.format(what))
    group.add_argument("--ray-address", metavar="ADDRESS", help=ADDRESS)


def check_replicas(options: Options) -> None:
    o = options
    at_least_1(o, "replicas")
    why = f"--ray-address {o.ray_address} without --replicas N"
    refuse(o.ray_address is not None and o.replicas is None, why)
