"""Which kernels a pair decodes with: chosen once, from the device and the sizes, and then recorded.

A kernel is for NVIDIA GPUs. Attention: Mosaic GPU on Hopper, Triton from sm80 on; cutting heads:
Triton from sm80 on; matrix products, the experts' too: on Hopper alone, where they are measured.
Elsewhere, and for sizes that no kernel takes, XLA compiles the same operation.
"""

from dataclasses import replace
from typing import Any

from jflash.config import DecoderConfig
from jflash.speculative import Models
from pallas_kernels.block_attention import Sizes, check_backend, default_backend

AUTO = "auto"
BACKENDS = ("attention_backend", "matmul_backend", "heads_backend")  # fields of Models


def with_backends(models: Models, dtype: str, device: Any, attention: str = AUTO) -> Models:
    """The models with the backends that suit a jax.Device and parameters of `dtype`.

    `attention` names block attention's backend: ValueError, with the reason, if it cannot run here.
    By default it is the best kernel that the device has for the pair's sizes, else 'xla'.
    """
    sizes = [_sizes(models, config, dtype) for config in _configs(models)]
    best = default_backend(device)  # whatever the sizes
    if attention == AUTO:
        fitting = {default_backend(device, s) for s in sizes}
        attention = fitting.pop() if len(fitting) == 1 else "xla"
    for s in sizes:
        check_backend(attention, s, device)
    # It cuts heads in halves, which Triton wants in powers of two.
    halves = all(s.head_dim & (s.head_dim - 1) == 0 for s in sizes)
    return replace(
        models,
        attention_backend=attention,
        matmul_backend="tuned" if best == "mosaic_gpu" else "xla",
        heads_backend="triton" if best in ("mosaic_gpu", "triton") and halves else "xla",
    )


def _configs(models: Models) -> list[DecoderConfig]:
    target = models.target.config
    return [target] if models.drafter is None else [target, models.drafter.config]


def _sizes(models: Models, config: DecoderConfig, dtype: str) -> Sizes:
    groups = config.num_heads // config.num_kv_heads
    return Sizes(models.block_size, groups, config.head_dim, dtype)
