"""Which kernels a pair decodes with: chosen once, from the device and the sizes, and then recorded.

On a CPU, and in bfloat16 on Hopper, every operation has a form whose bits are the same in every
program. Attention on other NVIDIA GPUs from sm80 on: Triton, as for cutting heads. Elsewhere, and
for sizes that no kernel takes, XLA compiles the same operation. What is asked for by name and
cannot run is refused, never replaced.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jflash.config import DecoderConfig, Drafter2Config, DrafterConfig
from jflash.kernels import AUTO, BACKENDS, Kernels
from jflash.mesh import local
from jflash.specs import MoeSpec
from jflash.speculative import Models
from pallas_kernels import (
    block_attention,
    gated_delta,
    grouped_matmul,
    heads_to_cache,
    matmul,
    rms_norm,
)
from pallas_kernels.choice import best, check

OPS = {
    "attention": block_attention,
    "matmul": matmul,
    "heads": heads_to_cache,
    "experts": grouped_matmul,
    "norm": rms_norm,
    "delta": gated_delta,
}


def with_backends(models: Models, dtype: str, device: Any, **asked: str) -> Models:
    """The models in `dtype`, with the backends that suit it and a jax.Device.

    `asked` names some of BACKENDS: ValueError, with the reason, for one that cannot run here. The
    others, and AUTO, are the best that the device has for the pair's sizes, 'xla' if no kernel is
    or the pair has no such operation.
    """
    assert set(asked) <= set(BACKENDS), f"{set(asked) - set(BACKENDS)} name no operation"
    models = models.of_dtype(dtype)
    chosen = {}
    for op, sizes in _sizes(local(models)).items():
        name = asked.get(f"{op}_backend", AUTO)
        if name == AUTO:
            chosen[op] = best(OPS[op], sizes, device) if sizes else "xla"
        else:
            check(op, OPS[op], name, sizes, device)
            chosen[op] = name
    return replace(models, kernels=Kernels(**chosen))


def named(kernels: Kernels) -> dict[str, str]:
    """The backends by the names that options and results have for them."""
    return dict(zip(BACKENDS, kernels, strict=True))


def _sizes(models: Models) -> dict[str, list]:
    """What the pair asks of each operation."""
    dtype = models.dtype
    sizes: dict[str, list] = {"attention": [], "matmul": [], "heads": [], "norm": []}
    for config in models.configs:
        sizes["norm"].append(rms_norm.Sizes(config.hidden_size, dtype))
        sizes["matmul"] += [matmul.Sizes(dtype, *weight) for weight in set(_weights(config))]
        for mixer in set(config.mixers):
            width, groups, head_dim = models.block_size, mixer.groups, mixer.head_dim
            sizes["attention"].append(block_attention.Sizes(width, groups, head_dim, dtype))
            sizes["heads"].append(heads_to_cache.Sizes(head_dim))
    target = models.target.config
    sizes["delta"] = [gated_delta.Sizes(x.key_dim, x.value_dim) for x in set(target.deltas)]
    sizes["experts"] = [
        grouped_matmul.Sizes(target.hidden_size, moe.intermediate_size, dtype)
        for moe in set(target.experts)
    ]
    return sizes


def _weights(config: DecoderConfig) -> Iterator[tuple[int, int]]:
    """What each product sums over, and its columns: of gate and up those of one of them."""
    width = config.hidden_size
    shards = config.shards
    yield width, config.vocab_size // shards
    for layer in config.layers:
        mixer = layer.mixer
        yield width, mixer.inputs_width
        yield mixer.out_width * shards, width // shards
        if isinstance(layer.mlp, MoeSpec):
            yield width, layer.mlp.num_experts
            if layer.mlp.shared_size is not None:
                yield width, layer.mlp.shared_size
                yield layer.mlp.shared_size * shards, width // shards
        else:
            if layer.beside is not None:
                yield width, layer.beside.num_experts
            yield width, layer.mlp.intermediate_size
            yield layer.mlp.intermediate_size * shards, width // shards
    if isinstance(config, DrafterConfig):
        yield len(config.target_layer_ids) * width, width // shards
        yield width, sum(mixer.kv_width for mixer in config.mixers)
    if isinstance(config, Drafter2Config):
        groups = width // config.conv_group_size
        yield width, 2 * config.conv_kernel_size * groups
