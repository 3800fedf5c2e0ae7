"""What loading takes of a host's memory: random checkpoints of a size, and the peak of a load.

Counted is what the process holds beside the page cache. On a CPU the weights lie there too, and are
taken off.
"""

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.io import configure_pair, load_weights
from jflash.io.hf_config import names_of
from jflash.io.hf_write import to_hf_config
from jflash.io.names import leaf_sources
from jflash.records.config import TargetConfig
from jflash.system.device import describe_device

BLOCK = 2**26  # bytes written at a time
LOOK_EVERY = 0.002  # seconds


class Peak:
    """A context that looks how much this process holds: bytes at its begin, and the most since."""

    def __enter__(self) -> "Peak":
        self.begin = self.most = held()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            self.most = max(self.most, held())


def held() -> int:
    """Bytes of this process that no file backs (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def write_random(folder: Path, config: TargetConfig) -> None:
    """A target in Hugging Face layout whose weights repeat random bfloat16, block by block.

    ValueError for a model that has not Qwen3's shape.
    """
    raw = to_hf_config(config, "bfloat16")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    header, end = {}, 0
    for source in (s for all in leaf_sources(config, names_of(raw)).values() for s in all):
        begin, end = end, end + 2 * math.prod(source.shape)
        header[source.name] = {
            "dtype": "BF16", "shape": list(source.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    draws = np.random.default_rng(0).normal(0, 0.02, BLOCK // 2).astype(jnp.bfloat16)
    block = draws.tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, BLOCK):
            file.write(block[: end - begin])


def measured(source: Path, devices: int, experts_over: str) -> dict[str, Any]:
    """A checkpoint loaded by this process for so many devices, in bytes and seconds."""
    files = configure_pair(
        source, dtype="bfloat16", tensor_parallel=devices, experts_over=experts_over
    )
    for device in jax.local_devices()[:devices]:
        jax.block_until_ready(jax.device_put(jnp.zeros(1), device))
    begin = time.perf_counter()
    with Peak() as peak:
        params = jax.block_until_ready(load_weights(files).params.target)
    seconds = time.perf_counter() - begin
    leaves = jax.tree.leaves(params)
    weights = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    here = weights if jax.default_backend() == "cpu" else 0
    return describe_device() | {
        "tensor_parallel": devices,
        "seconds": seconds,
        "weights_bytes": weights,
        "largest_array_bytes": max(x.nbytes for x in leaves),
        "held_before_bytes": peak.begin,
        "peak_bytes": peak.most,
        "peak_beside_weights_bytes": peak.most - here,
    }
