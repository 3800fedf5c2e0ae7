"""The weights of a GGUF file as parameters: dequantised while they are read, strict both ways.

The `gguf` library dequantises, and its table gives the names. Rows are read as those of safetensors
are, so the host holds a few pieces of the file and never the whole model.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize, quant_shape_to_byte_shape

from jflash.io.assemble import fill_leaves
from jflash.io.folder import Fill, check_tokenizer, read_config
from jflash.io.foreign import named
from jflash.io.gguf import drafter
from jflash.io.gguf.config import ROPE_FACTORS, architecture, hf_config_of, stop_ids
from jflash.io.gguf.file import GgufFile, read_gguf
from jflash.io.gguf.header import Stored
from jflash.io.gguf.tokenizer import gguf_tokenizer, has_gguf_tokenizer
from jflash.io.hf_config import names_of
from jflash.io.names import Source, leaf_sources
from jflash.io.problems import check_problems
from jflash.io.read_ahead import Piece, split_rows
from jflash.models.params import leaf_paths
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import Kept

_Kind = GGMLQuantizationType
PLAIN = {_Kind.F32: np.float32, _Kind.F16: np.float16, _Kind.BF16: jnp.bfloat16}
QUANTISED = (
    _Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1, _Kind.Q8_0, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K,
)  # fmt: skip
_NAMES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
_NAMES |= {"gemma3": MODEL_ARCH.GEMMA3}
_NO_WEIGHTS = {ROPE_FACTORS}  # read as part of the config


@dataclass(frozen=True)
class Gguf:
    path: Path
    file: GgufFile

    @functools.cached_property
    def raw(self) -> dict[str, Any]:
        """The file's metadata as a config.json."""
        read = drafter.config_of if self.is_drafter else hf_config_of
        return read(self.file)

    @property
    def is_drafter(self) -> bool:
        return architecture(self.file) == drafter.ARCHITECTURE

    def config[C](self, read: Callable[[dict[str, Any]], C]) -> C:
        """The config through one of hf_config's readers; its errors name the file."""
        return read_config(self.path, self.raw, read)

    @property
    def quantised(self) -> str | None:
        return None  # by tensor, without scales of activations

    def companions(self) -> dict[str, bytes]:
        """The files that describe the model in Hugging Face's form, by name."""
        config = json.dumps(self.raw, indent=2) + "\n"
        files = {"config.json": config.encode()}
        if self.has_tokenizer() and not self.is_drafter:  # whose tokenizer is its target's
            with tempfile.TemporaryDirectory() as folder:
                self.tokenizer().save_pretrained(folder)
                files |= {file.name: file.read_bytes() for file in Path(folder).iterdir()}
        return files

    def has_tokenizer(self) -> bool:
        """Whether the file has a tokenizer, supported or not."""
        return has_gguf_tokenizer(self.file)

    def tokenizer(self) -> Any:
        """The tokenizer, as transformers'; ValueError if there is none or it is not supported."""
        check_tokenizer(self.path, self.has_tokenizer())
        with named(f"the tokenizer in {self.path} does not load"):
            return gguf_tokenizer(self.file)

    def stop_ids(self, tokenizer: Any = None) -> list[int]:
        """The ids for the ends of a text, a turn and a message."""
        return stop_ids(self.file)

    def kept(self, config: TargetConfig | DrafterConfig) -> dict[str, Kept | None]:
        """None: products read no form of GGUF's."""
        return {}

    def check(self, config: TargetConfig | DrafterConfig) -> Fill:
        """The function that reads the parameters; with dtype None quantised ones are float32.

        ValueError with every unknown, missing or wrongly shaped tensor, and every type of tensor
        that is not supported.
        """
        sources = leaf_sources(config, names_of(self.raw))
        names = _fitting_names(self.file, config, sources)
        turned = _heads_to_turn(self.file, config)
        plan: dict[str, list[Piece]] = {leaf: [] for leaf in sources}
        for leaf, parts in sources.items():
            for part in parts:
                # Norms lie as leaves do, with the constant that Hugging Face's files leave out.
                plan[leaf] += _pieces(self.file, names[part.name], turned)
        return functools.partial(fill_leaves, plan, leaf_paths(config), self.path.name)


def open_gguf(path: Path) -> Gguf:
    """A GGUF file by its header; ValueError if it is no whole file of one model."""
    return Gguf(path, read_gguf(path))


def _fitting_names(
    file: GgufFile, config: TargetConfig | DrafterConfig, sources: dict[str, tuple[Source, ...]]
) -> dict[str, str]:
    """The file's names by Hugging Face's; ValueError if the file is unfit."""
    parts = [part for parts in sources.values() for part in parts]
    if isinstance(config, DrafterConfig):
        names = {part.name: drafter.stored_name(part.name) for part in parts}
    else:
        table = get_tensor_name_map(_NAMES[architecture(file)], config.num_layers)
        endings = (".weight", ".bias")
        names = {part.name: table.get_name(part.name, endings) or part.name for part in parts}
    expected = {names[part.name]: part for part in parts}
    problems = [f"missing: {name}" for name in expected if name not in file.tensors]
    for name, stored in file.tensors.items():
        if name in expected:
            problems += _problems(name, stored, expected[name])
        elif name not in _NO_WEIGHTS:
            problems.append(f"unknown: {name}")
    check_problems(file.path, problems)
    return names


def _problems(name: str, stored: Stored, expected: Source) -> list[str]:
    problems = []
    if stored.shape != expected.shape:
        problems.append(f"wrong shape: {name} is {stored.shape}, expected {expected.shape}")
    if stored.kind not in (*PLAIN, *QUANTISED):
        problems.append(f"unsupported type: {name} is {stored.kind.name}")
    return problems


def _heads_to_turn(file: GgufFile, config: TargetConfig | DrafterConfig) -> Mapping[str, int]:
    """Head width by the names of tensors whose rows llama.cpp stores in another order.

    Its rotary embedding for `llama` rotates neighbouring rows of a head; ours and transformers'
    rotate row i with row i + H/2.
    """
    if file.metadata["general.architecture"] != "llama":
        return {}
    return {
        f"blk.{layer}.attn_{x}.{part}": mixer.head_dim
        for layer, mixer in enumerate(config.mixers)
        for x in "qk"
        for part in ("weight", "bias")
    }


def _pieces(file: GgufFile, name: str, turned: Mapping[str, int]) -> list[Piece]:
    """A tensor as pieces of its rows; each has whole heads where `turned` names the tensor."""
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
