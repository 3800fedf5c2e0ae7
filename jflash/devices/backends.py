"""Which kernels a pair decodes with: chosen once, from the device and the sizes, and then recorded.

On a CPU, and in bfloat16 on Hopper, every operation has a form whose bits are the same in every
program. Attention on other NVIDIA GPUs from sm80 on: Triton, as for cutting heads. Elsewhere, and
for sizes that no kernel takes, XLA compiles the same operation. A backend that is named and cannot
run is refused, never replaced.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from jflash.devices.kept import in_fragments
from jflash.devices.mesh import local
from jflash.pair import Models
from jflash.records.config import DecoderConfig, Drafter2Config, DrafterConfig
from jflash.records.kernels import AUTO, BACKENDS, ONE_ARITHMETIC, Kernels
from jflash.records.specs import AttentionSpec, DeltaSpec, LayerConfig, MoeSpec
from pallas_kernels import (
    block_attention,
    gated_delta,
    gather,
    grouped_matmul,
    heads_to_cache,
    matmul,
    rms_norm,
)
from pallas_kernels.choice import best, check
from pallas_kernels.matmul.pieces import pieces


def with_backends(models: Models, dtype: str, device: Any, **asked: str) -> Models:
    """The models in `dtype`, with the backends that suit it and a jax.Device.

    `asked` names some of BACKENDS: ValueError, with the reason, for one that cannot run here. The
    others, and AUTO, are the best that the device has for the pair's sizes, 'xla' if no kernel is
    or the pair has no such operation; ValueError for devices that share the pair, if their parts
    have no arithmetic that one device alone has.
    """
    assert set(asked) <= set(BACKENDS), f"{set(asked) - set(BACKENDS)} name no operation"
    models = models.of_dtype(dtype)
    chosen = {}
    for op, (module, sizes_of) in OPS.items():
        sizes, name = sizes_of(local(models)), asked.get(f"{op}_backend", AUTO)
        if name == AUTO:
            chosen[op] = best(module, sizes, device) if sizes else "xla"
            _check_shared(op, models, chosen[op], device)
        else:
            check(op, module, name, sizes, device)
            chosen[op] = name
    return in_fragments(replace(models, kernels=Kernels(**chosen)))


def _check_shared(op: str, models: Models, chosen: str, device: Any) -> None:
    """ValueError if one device alone has one arithmetic for an operation, and its parts do not."""
    forms = ONE_ARITHMETIC.get(op, (chosen,))
    if models.mesh is None or chosen in forms:
        return
    module, sizes_of = OPS[op]
    whole, parts = sizes_of(replace(models, mesh=None)), sizes_of(local(models))
    alone = best(module, whole, device) if whole else chosen
    if alone in forms:
        reason = next(filter(None, (module.refusal(alone, part, device) for part in parts)))
        raise ValueError(
            f"{models.mesh.size} devices would give other bits than one: {op} backend {alone!r} "
            f"{reason}. Use fewer devices, or name a backend, as {op}_backend {chosen!r}"
        )


def named(kernels: Kernels) -> dict[str, str]:
    """The backends by the names that options and results have for them."""
    return dict(zip(BACKENDS, kernels, strict=True))


def _attention(models: Models) -> list[block_attention.Sizes]:
    return [
        block_attention.Sizes(models.block_size, mixer.groups, mixer.head_dim, models.dtype)
        for mixer in _mixers(models)
    ]


def _heads(models: Models) -> list[heads_to_cache.Sizes]:
    return [heads_to_cache.Sizes(mixer.head_dim) for mixer in _mixers(models)]


def _mixers(models: Models) -> set[AttentionSpec]:
    return {mixer for config in models.configs for mixer in config.mixers}


def _products(models: Models) -> list[matmul.Sizes]:
    weights = {weight for config in models.configs for weight in _weights(config)}
    return [matmul.Sizes(models.dtype, *weight) for weight in weights]


def _experts(models: Models) -> list[grouped_matmul.Sizes]:
    width = models.target.config.hidden_size
    weights = set[tuple[int, int]]()
    for moe in models.target.config.experts:
        inner = moe.intermediate_size
        weights |= {(width, inner), (inner * moe.cut, width // moe.cut)}
    return [grouped_matmul.Sizes(*weight, models.dtype) for weight in weights]


def _norms(models: Models) -> list[rms_norm.Sizes]:
    return [rms_norm.Sizes(config.hidden_size, models.dtype) for config in models.configs]


def _deltas(models: Models) -> list[gated_delta.Sizes]:
    deltas = set(models.target.config.deltas)
    return [gated_delta.Sizes(delta.key_dim, delta.value_dim) for delta in deltas]


def _gathers(models: Models) -> list[gather.Sizes]:
    shards = models.target.config.shards
    return [gather.Sizes(shards)] if shards > 1 else []


def _weights(config: DecoderConfig) -> Iterator[tuple[Any, ...]]:
    """What each product sums over, and its columns: of gate and up those of one of them. Some with
    their kind, see `matmul.Sizes`."""
    width = config.hidden_size
    shards = config.shards
    yield width, config.vocab_size // shards, "head"
    for layer in config.layers:
        mixer = layer.mixer
        yield width, mixer.inputs_width, _inputs_kind(layer, config)
        yield mixer.out_width * shards, width if mixer.whole_out else width // shards
        if isinstance(layer.mlp, MoeSpec):
            yield width, layer.mlp.num_experts
            if layer.mlp.shared_size is not None:
                yield width, layer.mlp.shared_size
                yield layer.mlp.shared_size * shards, width // layer.mlp.cut
        else:
            if layer.beside is not None:
                yield width, layer.beside.num_experts
            yield width, layer.mlp.intermediate_size
            columns = width if layer.mlp.whole_out else width // shards
            yield layer.mlp.intermediate_size * shards, columns
    if isinstance(config, DrafterConfig):
        yield len(config.target_layer_ids) * width, width // shards
        yield width, sum(mixer.kv_width for mixer in config.mixers)
    if isinstance(config, Drafter2Config):
        groups = width // config.conv_group_size
        yield width, 2 * config.conv_kernel_size * groups


def _inputs_kind(layer: LayerConfig, config: DecoderConfig) -> str:
    """A layer's first product is plain if it is a delta net's array and K is summed whole."""
    mixer = layer.mixer
    if not isinstance(mixer, DeltaSpec) or layer.kept:
        return "any"
    whole = pieces("matmul", config.hidden_size, mixer.inputs_width * mixer.shards) == 1
    return "plain" if whole else "any"


# Each operation, and the sizes that a pair has for it.
OPS: dict[str, tuple[ModuleType, Callable[[Models], list]]] = {
    "attention": (block_attention, _attention),
    "matmul": (matmul, _products),
    "heads": (heads_to_cache, _heads),
    "experts": (grouped_matmul, _experts),
    "norm": (rms_norm, _norms),
    "delta": (gated_delta, _deltas),
    "gather": (gather, _gathers),
}
