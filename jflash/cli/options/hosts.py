"""Options that name the hosts of a run."""

import argparse
import re

from jflash.cli.command import Options
from jflash.cli.options.values import at_least_1, refuse

COORDINATOR = "where host 0 listens for the others; default: what Slurm or Kubernetes says"
COUNT = "hosts that share the work, each with the whole {}; default 1"
ADDRESS = re.compile(r"[\w.-]+|\[[\w.:%]+\]")  # a name or a number, of version 6 in brackets
INDEX = "this host, from 0; default: what Slurm or Kubernetes says"


def host_options(group: argparse._ArgumentGroup, what: str = "pair") -> None:
    """`what` each host holds."""
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help=COORDINATOR)
    add("--num-hosts", type=int, metavar="N", help=COUNT.format(what))
    add("--host-index", type=int, metavar="I", help=INDEX)


def check_hosts(options: Options) -> None:
    o = options
    at_least_1(o, "num_hosts")
    for name, value in (("--coordinator", o.coordinator), ("--host-index", o.host_index)):
        refuse(value is not None and o.num_hosts is None, f"{name} {value} without --num-hosts N")
    if o.coordinator is not None:
        host, _, port = o.coordinator.rpartition(":")
        wrong = not ADDRESS.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 2**16
        refuse(wrong, f"--coordinator {o.coordinator}: give HOST:PORT, such as 10.0.0.1:9000")
    if o.host_index is not None:
        last = (o.num_hosts or 1) - 1
        refuse(not 0 <= o.host_index <= last, f"--host-index {o.host_index}: within 0 … {last}")
