"""Which kernels a pair decodes with: chosen once, from the device and the sizes, and then recorded.

A kernel is for NVIDIA GPUs. Attention: Mosaic GPU on Hopper, Triton on all others from sm80 on;
cutting heads: Triton from sm80 on; matrix products, the experts' too: on Hopper alone, where they
are measured. Elsewhere, and for sizes that no kernel takes, XLA compiles the same operation. What
is asked for by name and cannot run is refused, never replaced.
"""

from dataclasses import replace
from typing import Any, cast

from jflash.config import DecoderConfig
from jflash.speculative import Models
from pallas_kernels import grouped_matmul, matmul
from pallas_kernels import heads_to_cache as heads_op
from pallas_kernels.block_attention import Sizes, cannot_run, check_backend, default_backend

AUTO = "auto"
BACKENDS = ("attention_backend", "matmul_backend", "heads_backend")  # fields of Models
NEEDS = {"tuned": "mosaic_gpu"}  # what a backend runs on, where its name does not say it


def with_backends(models: Models, dtype: str, device: Any, **asked: str) -> Models:
    """The models with the backends that suit a jax.Device and parameters of `dtype`.

    `asked` names some of BACKENDS: ValueError, with the reason, for one that cannot run here. The
    others, and AUTO, are the best that the device has for the pair's sizes, 'xla' if no kernel is.
    """
    sizes = [_sizes(models, config, dtype) for config in _configs(models)]
    own = _best(sizes, device)
    chosen = own | {field: name for field, name in asked.items() if name != AUTO}
    for s in sizes:
        check_backend(chosen["attention_backend"], s, device)
    experts = models.target.config.moe is not None
    products = [n for n in matmul.BACKENDS if not experts or n in grouped_matmul.BACKENDS]
    for field, known in (("matmul_backend", products), ("heads_backend", heads_op.BACKENDS)):
        op, name = field.removesuffix("_backend"), chosen[field]
        if name not in known:
            why = " for experts" if experts and name in matmul.BACKENDS else ""
            raise ValueError(f"{op} has no backend {name!r}{why}: use one of {', '.join(known)}")
        reason = _lacks(op, name, sizes) or cannot_run(NEEDS.get(name, name), device)
        if reason:
            raise ValueError(f"{op} backend {name!r} {reason}: use {own[field]!r}")
    return replace(models, **cast(dict[str, Any], chosen))


def _best(sizes: list[Sizes], device: Any) -> dict[str, str]:
    best = default_backend(device)  # whatever the sizes
    fitting = {default_backend(device, s) for s in sizes}
    heads = "xla" if best == "xla" or _lacks("heads", "triton", sizes) else "triton"
    return {
        "attention_backend": fitting.pop() if len(fitting) == 1 else "xla",
        "matmul_backend": "tuned" if best == "mosaic_gpu" else "xla",
        "heads_backend": heads,
    }


def _lacks(op: str, name: str, sizes: list[Sizes]) -> str | None:
    """Why a kernel that is not attention's cannot take these sizes."""
    for s in sizes:
        # It cuts heads in halves, which Triton wants in powers of two.
        if (op, name) == ("heads", "triton") and s.head_dim & (s.head_dim - 1):
            return f"has head dims that are powers of two, not {s.head_dim}"
        if (op, name) == ("matmul", "mosaic_gpu") and s.dtype != "bfloat16":
            return f"has bfloat16 alone, not {s.dtype}"
    return None


def _configs(models: Models) -> list[DecoderConfig]:
    target = models.target.config
    return [target] if models.drafter is None else [target, models.drafter.config]


def _sizes(models: Models, config: DecoderConfig, dtype: str) -> Sizes:
    groups = config.num_heads // config.num_kv_heads
    return Sizes(models.block_size, groups, config.head_dim, dtype)
