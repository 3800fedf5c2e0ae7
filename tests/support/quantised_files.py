"""Small quantised checkpoints, and the numbers that their formats' definitions give them.

Every format is written here anew, number by number, so that it shares nothing with the reader.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.small_checkpoints import edit_config

Arrays = dict[str, np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Case(NamedTuple):
    """A quantization_config, and tensors by suffix with their weight, for a shape and draws."""

    config: dict[str, Any]
    make: Callable[[tuple[int, int], np.random.Generator], tuple[Arrays, np.ndarray]]


def e4m3(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any codes but those of NaN."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(codes & 127 == 127, 8, codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


def block_fp8(shape, rng):
    """Blocks of 16 by 32, those at the edges partly filled."""
    O, I = shape
    codes = e4m3(shape, rng)
    scale = rng.uniform(1e-3, 2e-3, (-(-O // 16), -(-I // 32))).astype(np.float32)
    weight = np.empty(shape, np.float32)
    for o in range(O):
        for i in range(I):
            weight[o, i] = np.float32(codes[o, i]) * scale[o // 16, i // 32]
    return {"weight": codes, "weight_scale_inv": scale}, weight


def power_fp8(shape, rng):
    """As `block_fp8`, with scales of one byte."""
    tensors, _ = block_fp8(shape, rng)
    codes, exponents = tensors["weight"], rng.integers(115, 125, tensors["weight_scale_inv"].shape)
    scale = 2.0 ** (exponents - 127)
    whole = np.kron(scale, np.ones((16, 32)))[: shape[0], : shape[1]]
    weight = codes.astype(np.float32) * whole.astype(np.float32)
    return {"weight": codes, "weight_scale_inv": exponents.astype(np.uint8)}, weight


def row_fp8(shape, rng):
    codes, scale = e4m3(shape, rng), rng.uniform(1e-3, 2e-3, (shape[0], 1)).astype(np.float32)
    spare = {"input_scale": np.ones(1, np.float32)}
    return {"weight": codes, "weight_scale": scale} | spare, codes.astype(np.float32) * scale


def bf16_row_fp8(shape, rng):
    tensors, _ = row_fp8(shape, rng)
    scale = tensors["weight_scale"].astype(ml_dtypes.bfloat16)
    weight = tensors["weight"].astype(np.float32) * scale.astype(np.float32)
    return {"weight": tensors["weight"], "weight_scale": scale}, weight


def tensor_fp8(shape, rng):
    codes, scale = e4m3(shape, rng), np.float32(rng.uniform(1e-3, 2e-3))
    spare = {"input_scale": np.float32(1)}
    return {"weight": codes, "weight_scale": scale} | spare, codes.astype(np.float32) * scale


def packed(bits: int, group: int, symmetric: bool):
    """compressed-tensors' words: numbers plus half their range, the lowest bits first."""

    def make(shape, rng):
        (O, I), half = shape, 1 << bits - 1
        G = -(-I // group)
        codes = rng.integers(-half, half, shape)
        zeros = np.zeros((O, G), int) if symmetric else rng.integers(-half, half, (O, G))
        scale = rng.uniform(0.01, 0.02, (O, G)).astype(ml_dtypes.bfloat16)
        weight = np.empty(shape, np.float32)
        for i in range(I):
            g = i // group
            weight[:, i] = (codes[:, i] - zeros[:, g]).astype(np.float32) * scale[:, g].astype(
                np.float32
            )
        tensors = {
            "weight_packed": words(codes + half, bits),
            "weight_scale": scale,
            "weight_shape": np.array(shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words((zeros + half).T, bits).T.copy()
        return tensors, weight

    return make


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers in rows of int32, the lowest bits first, the last word filled with zeros."""
    per, (rows, count) = 32 // bits, numbers.shape
    out = np.zeros((rows, -(-count // per)), np.uint32)
    for i in range(count):
        out[:, i // per] |= numbers[:, i].astype(np.uint32) << np.uint32(bits * (i % per))
    return out.view(np.int32)


def row_int8(shape, rng):
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scale = rng.uniform(0.001, 0.002, (shape[0], 1)).astype(np.float32)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale


def int4_in_int8(shape, rng):
    """As the library stores INT4 where activations are INT8: each number in an int8."""
    codes, G = rng.integers(-8, 8, shape).astype(np.int8), shape[1] // 16
    scale = rng.uniform(0.01, 0.02, (shape[0], G)).astype(np.float32)
    weight = np.stack([codes[:, i] * scale[:, i // 16] for i in range(shape[1])], axis=1)
    return {"weight": codes, "weight_scale": scale}, weight


def awq(group: int):
    def make(shape, rng):
        (O, I), G = shape, shape[1] // group
        codes, zeros = rng.integers(0, 16, (I, O)), rng.integers(0, 16, (G, O))
        scale = rng.uniform(0.01, 0.02, (G, O)).astype(np.float16)

        def in_order(numbers):
            out = np.zeros((len(numbers), O // 8), np.uint32)
            for column in range(O):
                place = AWQ_ORDER.index(column % 8)
                out[:, column // 8] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * place)
            return out.view(np.int32)

        groups = np.arange(I) // group
        weight = ((codes - zeros[groups]).astype(np.float32) * scale.astype(np.float32)[groups]).T
        return {"qweight": in_order(codes), "qzeros": in_order(zeros), "scales": scale}, weight

    return make


def gptq(bits: int, group: int, less: int, act_order: bool):
    """`less` is what a stored zero lacks: 1 in version 1, taken from whole words of zeros."""

    def make(shape, rng):
        (O, I), G = shape, -(-shape[1] // group)
        codes = rng.integers(0, 1 << bits, (I, O))
        zeros = rng.integers(0, 1 << bits, (G, O))
        lacking = sum(less << place for place in range(0, 32, bits))
        scale = rng.uniform(0.01, 0.02, (G, O)).astype(np.float16)
        groups = np.arange(I) // group
        groups = (rng.permutation(groups) if act_order else groups).astype(np.int32)
        weight = ((codes - zeros[groups]).astype(np.float32) * scale.astype(np.float32)[groups]).T
        return {
            "qweight": words(codes.T, bits).T.copy(),
            "qzeros": (words(zeros, bits).view(np.uint32) - np.uint32(lacking)).view(np.int32),
            "scales": scale,
            "g_idx": groups,
            "bias": np.zeros(O, np.float16),  # AutoGPTQ writes one everywhere
        }, weight

    return make


def of_compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def of_gptq(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16} | keys


_PACKED, _BLOCK = "pack-quantized", {"quant_method": "fp8", "weight_block_size": [16, 32]}
_INT4 = dict(num_bits=4, type="int", strategy="group", group_size=16)
_CHANNEL = dict(num_bits=8, type="float", strategy="channel")
CASES = {
    "fp8-block": Case(_BLOCK, block_fp8),
    "fp8-block-e8m0": Case(_BLOCK, power_fp8),
    "fp8-tensor": Case({"quant_method": "fp8", "activation_scheme": "static"}, tensor_fp8),
    "fbgemm": Case({"quant_method": "fbgemm_fp8"}, row_fp8),
    "modelopt": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, tensor_fp8),
    "ct-fp8-channel": Case(of_compressed("float-quantized", **_CHANNEL), bf16_row_fp8),
    "ct-int4-group": Case(of_compressed(_PACKED, **_INT4), packed(4, 16, True)),
    "ct-int4-zeros": Case(
        of_compressed(_PACKED, **_INT4 | {"symmetric": False}), packed(4, 16, False)
    ),
    "ct-int8-packed": Case(
        of_compressed(_PACKED, num_bits=8, type="int", strategy="channel"), packed(8, 4096, True)
    ),
    "ct-int8": Case(
        of_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), row_int8
    ),
    "ct-int4-in-int8": Case(of_compressed("int-quantized", **_INT4), int4_in_int8),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 16}, awq(16)),
    "gptq": Case(of_gptq(), gptq(4, 16, 1, False)),
    "gptq-act-order": Case(of_gptq(desc_act=True), gptq(4, 16, 1, True)),
    "gptq-v2-int8": Case(
        of_gptq(bits=8, group_size=-1, checkpoint_format="gptq_v2"), gptq(8, 4096, 0, False)
    ),
}


def quantise(
    folder: Path,
    case: Case,
    drop: tuple[str, ...] = (),
    endings: tuple[str, ...] = ("_proj.weight",),
    **changes: Any,
) -> Arrays:
    """Rewrites a checkpoint's projections in a case's form; the weights that they stand for.

    Then some tensors are taken out, and others put in.
    """
    file, rng = folder / "model.safetensors", np.random.default_rng(0)
    stored, weights = load_file(file), {}
    tensors = dict(stored)
    for name in sorted(stored):
        if not name.endswith(endings):
            continue
        made, weights[name] = case.make(stored[name].shape, rng)
        del tensors[name]
        tensors |= {name.removesuffix("weight") + s: np.asarray(t) for s, t in made.items()}
    save_file({k: v for k, v in tensors.items() if k not in drop} | changes, file)
    edit_config(folder, quantization_config=case.config)
    return weights
