"""The weights of a GGUF file as parameters: dequantised while they are read, strict both ways.

What a dequantised number is, the `gguf` library says; names come from its table too. Rows go the
way of safetensors' rows, so the host holds some pieces of the file and never the model.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize, quant_shape_to_byte_shape

from jflash.config import TargetConfig
from jflash.io.gguf_config import ROPE_FACTORS
from jflash.io.gguf_file import GgufFile, Stored, open_gguf
from jflash.io.names import Source
from jflash.io.read_ahead import Piece, split_rows
from jflash.io.weights import check_problems, fill_leaves, sources_of

_Kind = GGMLQuantizationType
PLAIN = {_Kind.F32: np.float32, _Kind.F16: np.float16, _Kind.BF16: jnp.bfloat16}
QUANTISED = (
    _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1, _Kind.Q8_0, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K,
)  # fmt: skip
_NAMES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
_NO_WEIGHTS = {ROPE_FACTORS}  # read as part of the config


def load_gguf(path: Path, config: TargetConfig, dtype: str | None, progress: bool = False) -> dict:
    """Parameters of `config` from a GGUF file, as device arrays of `dtype`.

    None keeps the stored dtype, quantised tensors in float32. ValueError with every unknown,
    missing or wrongly shaped tensor, and every type of tensor that is not supported.
    """
    file, names = _checked(path, config)
    turned = _heads_to_turn(file, config)
    plan = {
        leaf: [piece for part in parts for piece in _pieces(file, names[part.name], turned)]
        for leaf, parts in sources_of(config).items()
    }
    return fill_leaves(plan, dtype, path.name, progress)


def check_gguf(path: Path, config: TargetConfig) -> None:
    """The errors of load_gguf, by the file's header alone."""
    _checked(path, config)


def _checked(path: Path, config: TargetConfig) -> tuple[GgufFile, dict[str, str]]:
    """The header and what Hugging Face's names are called there; ValueError if unfit."""
    file = open_gguf(path)
    sources = [part for parts in sources_of(config).values() for part in parts]
    table = get_tensor_name_map(_NAMES[file.need("general.architecture")], config.num_layers)
    names = {
        part.name: table.get_name(part.name, (".weight", ".bias")) or part.name for part in sources
    }
    expected = {names[part.name]: part for part in sources}
    problems = [f"missing: {name}" for name in expected if name not in file.tensors]
    for name, stored in file.tensors.items():
        if name in expected:
            problems += _problems(name, stored, expected[name])
        elif name not in _NO_WEIGHTS:
            problems.append(f"unknown: {name}")
    check_problems(path, problems)
    return file, names


def _problems(name: str, stored: Stored, expected: Source) -> list[str]:
    problems = []
    if stored.shape != expected.shape:
        problems.append(f"wrong shape: {name} is {stored.shape}, expected {expected.shape}")
    if stored.kind not in (*PLAIN, *QUANTISED):
        problems.append(f"unsupported type: {name} is {stored.kind.name}")
    return problems


def _heads_to_turn(file: GgufFile, config: TargetConfig) -> Mapping[str, int]:
    """Head width by the names of tensors whose rows llama.cpp stores in its own order.

    Its rotary embedding for `llama` turns neighbouring rows of a head, ours and transformers' turn
    row i with row i + H/2.
    """
    if file.metadata["general.architecture"] != "llama":
        return {}
    return {
        f"blk.{layer}.attn_{x}.{part}": config.head_dim
        for layer in range(config.num_layers)
        for x in "qk"
        for part in ("weight", "bias")
    }


def _pieces(file: GgufFile, name: str, turned: Mapping[str, int]) -> list[Piece]:
    """A tensor as pieces that give rows of Hugging Face's tensor, each of whole heads if turned."""
    stored, heads = file.tensors[name], turned.get(name, 0)
    decode = functools.partial(_decode, kind=stored.kind, head_dim=heads)
    if stored.kind in PLAIN:
        dtype, shape, growth = PLAIN[stored.kind], stored.shape, 1.0
    else:
        block, size = GGML_QUANT_SIZES[stored.kind]
        dtype, shape = np.uint8, quant_shape_to_byte_shape(stored.shape, stored.kind)
        growth = block * np.dtype(np.float32).itemsize / size
    whole = Piece(file.path, name, stored.begin, shape, np.dtype(dtype), decode=decode)
    return split_rows(whole, unit=heads or 1, growth=growth)


def _decode(rows: np.ndarray, kind: GGMLQuantizationType, head_dim: int) -> np.ndarray:
    """Rows as numbers, in Hugging Face's order."""
    if kind not in PLAIN:
        rows = dequantize(rows, kind)
    if not head_dim:
        return rows
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
