"""One device's part of a model that several share, as a config: what divides, and what is whole.

Every device has some heads, MLP columns and rows of the vocabulary. This file knows no device and
no array.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jflash.records.config import DecoderConfig, Drafter2Config, DrafterConfig
from jflash.records.specs import AttentionSpec, DeltaSpec, DenseSpec, LayerConfig, MoeSpec

# A layer's last product is whole on every device if the others' columns of its kernel hold at most
# so many numbers: by their bytes they are read in less time than a gather of the result and the
# copies around it take. A step of Qwen3-8B's pair on two H200s at batch 1 takes 5.49 ms so, and
# 5.88 ms if every result is gathered (0 here).
READ_RATHER = 2**24
# But a step of few rows pushes a result sooner (pallas_kernels/gather/lines.py) than more than so
# many are read: with Qwen3-8B's `out` split that step takes 4.08 ms in place of 4.15 (H200s, jax
# 0.11.2, 2026-11-26, benchmarks/h200-x2-out.json). Of many rows it is the arithmetic that counts:
# with 512 rows 11.50 ms in place of 11.79, with 128 5.46 in place of 5.43 (two of them, in one hold
# of that day, benchmarks/h200-x2-norms.json); over four 9.14 in place of 9.37
# (benchmarks/h200-x4-norms.json).
FEW_ROWS, MANY_ROWS, READ_BY_PUSHERS = 64, 512, 7 * 2**20
COLUMNS = 64  # of a tile, which split products are whole numbers of
OVER = ("columns", "devices")  # what devices share of experts


def indivisible(config: DecoderConfig, shards: int) -> Iterator[str]:
    """What does not divide, by the kind of layer."""
    sizes = {"vocabulary": config.vocab_size, "hidden size": config.hidden_size}
    if isinstance(config, DrafterConfig) and config.draft_vocab_size is not None:
        sizes["draft vocabulary"] = config.draft_vocab_size
    for layer in config.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, DeltaSpec):
            sizes["key heads of a gated delta net"] = mixer.num_key_heads
        else:
            N, K = mixer.num_heads, mixer.num_kv_heads
            if mixer.norm_all_heads and K % shards:
                yield f"norm over all keys of heads ({K}) that several devices keep"
            if N % shards or (K % shards and shards % K):
                yield f"attention heads ({N}, {K} for keys and values)"
        if isinstance(mlp, DenseSpec):
            sizes["columns of an MLP"] = mlp.intermediate_size
        if layer.moe is not None:
            sizes |= _sizes_of_experts(layer.moe, "" if layer.beside is None else " beside the MLP")
    yield from (f"{name} ({size})" for name, size in sizes.items() if size % shards)


def _sizes_of_experts(moe: MoeSpec, where: str) -> dict[str, int]:
    if moe.over == "devices":
        sizes = {f"experts{where}": moe.num_experts}
    else:
        sizes = {f"columns of an expert{where}": moe.intermediate_size}
    return sizes | {"columns of the shared expert": moe.shared_size or 0}


def with_experts_over[C: DecoderConfig](config: C, over: str) -> C:
    """The model whose experts devices share by their `columns`, or whole, over `devices`."""
    model: Any = config
    if over not in OVER:
        raise ValueError(f"experts_over {over!r} is not one of {', '.join(OVER)}")
    layers = tuple(
        replace(x, **{"beside" if x.beside else "mlp": replace(x.moe, over=over)}) if x.moe else x
        for x in model.layers
    )
    return replace(model, layers=layers)


def part_of[C: DecoderConfig](config: C, shards: int) -> C:
    """One device's part of a model whose sizes divide."""
    model: Any = config
    layers = tuple(_layer(layer, config, shards) for layer in config.layers)
    return replace(model, layers=layers, shards=shards)


def with_split_outputs[C: DecoderConfig](config: C, shards: int, *, normed: bool) -> C:
    """The model over so many devices that push their parts: they share a layer's last product
    unless it is very small, or kept in fewer bytes; if it pays as a norm's kernel gathers it
    (`normed`), that of layers whose norm is of the sum."""
    model: Any = config
    if isinstance(config, DrafterConfig) and config.products is not None:
        return model
    if normed and isinstance(config, Drafter2Config):
        return model

    def split(spec: Any, inner: int) -> Any:
        pays = _others(inner, config, shards) > READ_BY_PUSHERS
        even = config.hidden_size // shards % COLUMNS == 0
        return replace(spec, whole_out=False) if pays and even else spec

    def shared(layer: LayerConfig) -> LayerConfig:
        if layer.kept or (normed and layer.sandwich):
            return layer
        mlp, mixer = layer.mlp, split(layer.mixer, layer.mixer.out_width)
        dense = isinstance(mlp, DenseSpec)
        return replace(layer, mixer=mixer, mlp=split(mlp, mlp.intermediate_size) if dense else mlp)

    return replace(model, layers=tuple(map(shared, model.layers)))


def _others(rows: int, config: DecoderConfig, shards: int) -> int:
    """Numbers of the other devices' columns of a last product of `rows` rows."""
    return rows * config.hidden_size * (shards - 1) // shards


def _whole_out(spec: Any, rows: int, config: DecoderConfig, shards: int) -> bool:
    """Whether every device has the whole kernel of a last product of `rows` rows."""
    if spec.whole_out is not None:
        return spec.whole_out
    return _others(rows, config, shards) <= READ_RATHER


def _layer(layer: LayerConfig, config: DecoderConfig, shards: int) -> LayerConfig:
    mixer, mlp = layer.mixer, layer.mlp
    whole_out = _whole_out(mixer, mixer.out_width, config, shards)
    if isinstance(mixer, AttentionSpec):
        kv_heads = max(1, mixer.num_kv_heads // shards)
        mixer = replace(
            mixer,
            num_heads=mixer.num_heads // shards,
            num_kv_heads=kv_heads,
            shards=shards,
            copies=kv_heads * shards // mixer.num_kv_heads,
            whole_out=whole_out,
        )
    else:
        mixer = replace(
            mixer,
            num_key_heads=mixer.num_key_heads // shards,
            num_value_heads=mixer.num_value_heads // shards,
            shards=shards,
            whole_out=whole_out,
        )
    if isinstance(mlp, DenseSpec):
        rows = mlp.intermediate_size
        whole_out = _whole_out(mlp, rows, config, shards)
        mlp = replace(mlp, intermediate_size=rows // shards, shards=shards, whole_out=whole_out)
    else:
        mlp = part_of_experts(mlp, shards)
    beside = layer.beside and part_of_experts(layer.beside, shards)
    return replace(layer, mixer=mixer, mlp=mlp, beside=beside)


def part_of_experts(moe: MoeSpec, shards: int) -> MoeSpec:
    """One device's part of experts whose sizes divide."""
    moe = replace(moe, shards=shards)
    shared = moe.shared_size and moe.shared_size // shards
    return replace(moe, intermediate_size=moe.intermediate_size // moe.cut, shared_size=shared)
