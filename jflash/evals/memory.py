"""Device memory as measured: what weights and caches hold, and the most that was in use at once.

What a request will take is estimated, before anything is made, by jflash.memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jflash.config import DrafterConfig, TargetConfig
from jflash.io.names import abstract_params
from jflash.speculative import Models, Params, State


def peak_memory() -> int | None:
    """The most bytes in use at once so far in this process; None on a CPU, which does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def weight_bytes(configs: tuple[TargetConfig | DrafterConfig, ...], itemsize: int) -> int:
    """Bytes of models as published: what a program holds besides is its own doing."""
    return itemsize * sum(x.size for c in configs for x in jax.tree.leaves(abstract_params(c)))


def tree_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def memory(models: Models, params: Params, state: State, compiled: Any) -> dict[str, Any]:
    """Bytes of weights and caches, and of a program's own temporaries as it was compiled."""
    analysis = compiled.memory_analysis()
    return {
        "weights_bytes": _weights(models, str(params.target["embedding"].dtype)),
        "caches_bytes": tree_bytes((state.target_cache, state.drafter_cache)),
        "temporaries_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
    }


def _weights(models: Models, dtype: str) -> int:
    assert models.drafter is not None
    configs = (models.target.config, models.drafter.config)
    return weight_bytes(configs, jnp.dtype(dtype).itemsize)
