"""`jflash bench-devices` of this clone: python scripts/bench_devices.py --help."""

import tree

tree.run("bench-devices")
