"""GGUF metadata to the config.json that the same target has in Hugging Face layout.

The result goes through hf_config like any other: nothing is guessed, and nothing is ignored.
Unknown metadata is refused by its name unless it is 0, false or empty.
"""

import re
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jflash.io.gguf.file import GgufFile
from jflash.io.hf_rope import DEFAULT_ROPE_THETA
from jflash.io.hf_values import ID, POSITIVE, SIZE, SWITCH, TEXT, TEXTS, shown
from jflash.layers.rope import rope_frequencies
from jflash.records.specs import Llama3Scaling, RopeConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
LAYER = re.compile(r"blk\.(\d+)\.")
NEEDED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_ALSO_KNOWN = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "vocab_size",
    "tensor_data_layout",
}  # fmt: skip
_OF_GEMMA = {"attention.sliding_window", "rope.scaling.factor", "rope.freq_base_swa"}
# Kinds of scaled RoPE, and what a file says of each. Gemma's is that of layers without windows.
_FACTOR, _ORIGINAL = "rope.scaling.factor", "rope.scaling.original_context_length"
_SCALED = {"linear": (_FACTOR,), "yarn": (_FACTOR, _ORIGINAL)}
GEMMA_27B = 62  # layers, by which llama.cpp tells the model whose scores have a scale of their own
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message
_TOKENS = "tokenizer.ggml.tokens"
# The ends of a turn that llama.cpp knows by their texts: files of Gemma 3 name none.
TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}
_KEYS = {
    SIZE: "block_count embedding_length feed_forward_length context_length vocab_size"
    " attention.head_count attention.head_count_kv attention.key_length attention.value_length"
    " rope.dimension_count attention.sliding_window rope.scaling.original_context_length",
    POSITIVE: "attention.layer_norm_rms_epsilon rope.freq_base rope.freq_base_swa"
    " rope.scaling.factor",
    SWITCH: "attention.causal",
    TEXT: "rope.scaling.type",
}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


def hf_config_of(file: GgufFile) -> dict[str, Any]:
    """config.json of the model in `file`; ValueError for what is missing or not supported."""
    name = architecture(file)
    if "dflash" in name:  # the drafters of llama.cpp's forks
        raise ValueError(
            f"{file.path}: drafters of the architecture {shown(name)} are not read, only those of "
            "'dflash', llama.cpp's: give the drafter's folder of safetensors"
        )
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: unsupported GGUF architecture {name!r}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    metadata = _metadata(file, name)
    if EMBEDDING not in file.tensors:
        raise ValueError(f"{file.path} does not fit: missing: {EMBEDDING}")
    if len(shape := file.tensors[EMBEDDING].shape) != 2:
        raise ValueError(f"{file.path} does not fit: wrong shape: {EMBEDDING} is {shape}")
    config = trunk_of(file, name, metadata) | {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": metadata.get("vocab_size", shape[0]),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if name == "gemma3":
        config |= _gemma(file, metadata, config)
    elif (scaling := metadata.get("rope.scaling.type", "none")) != "none":
        names = {_FACTOR: "factor", _ORIGINAL: "original_max_position_embeddings"}
        given = {names[key]: file.need(f"{name}.{key}") for key in _SCALED[scaling]}
        config["rope_scaling"] = {"rope_type": scaling} | given
    if ROPE_FACTORS in file.tensors:
        if "rope_scaling" in config:
            raise ValueError(
                f"{file.path}: {ROPE_FACTORS} beside {name}.{_FACTOR}: only one is supported"
            )
        config["rope_scaling"] = _rope_scaling(file, config["rope_theta"], config["head_dim"])
    stops = stop_ids(file)
    return config | ({"eos_token_id": stops} if stops else {})


def architecture(file: GgufFile) -> str:
    """The name of the file's architecture."""
    file.check({"general.architecture": TEXT})
    return file.need("general.architecture")


def trunk_of(file: GgufFile, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """What targets and drafters share of a config.json: sizes, heads and RoPE's theta.

    `metadata` is that of the architecture `name`, without its prefix.
    """
    config = {key: file.need(f"{name}.{source}") for key, source in NEEDED.items()}
    _check_layers(file, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    config |= {
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": metadata.get("attention.key_length", config["hidden_size"] // heads),
        "rope_theta": metadata.get("rope.freq_base", DEFAULT_ROPE_THETA),
        "hidden_act": "silu",
    }
    _check_heads(file, metadata, config["head_dim"])
    return config


def _gemma(file: GgufFile, metadata: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has besides. Files leave out what llama.cpp knows: every sixth layer is full."""
    whole = config["num_hidden_layers"] == GEMMA_27B
    heads = config["hidden_size"] // config["num_attention_heads"]
    factor = metadata.get("rope.scaling.factor", 1.0)
    return {
        "model_type": "gemma3_text",
        "sliding_window": file.need("gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": heads if whole else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": metadata.get("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 1e4),  # of windowed layers
    } | ({} if factor == 1 else {"rope_scaling": {"rope_type": "linear", "factor": factor}})


def stop_ids(file: GgufFile) -> list[int]:
    """Ids that end a text, a turn or a message: those that the metadata names, then TURN_ENDS."""
    keys = [f"tokenizer.ggml.{name}" for name in _STOPS]
    file.check(dict.fromkeys(keys, ID) | {_TOKENS: TEXTS})
    named = [file.metadata[key] for key in keys if key in file.metadata]
    texts = enumerate(file.metadata.get(_TOKENS, ()))
    return list(dict.fromkeys([*named, *(i for i, text in texts if text in TURN_ENDS)]))


def _check_layers(file: GgufFile, num_layers: int) -> None:
    """Compares the number of layers with the tensors' names, before anything is made of each."""
    numbers = [int(match[1]) for match in map(LAYER.match, file.tensors) if match]
    if num_layers != (stored := max(numbers, default=-1) + 1):
        raise ValueError(
            f"{file.path} does not fit: block_count is {num_layers}, the tensors are those of "
            f"{stored} layers"
        )


def _metadata(file: GgufFile, name: str) -> dict[str, Any]:
    """The metadata of a target's architecture; ValueError for what is not supported."""
    metadata = metadata_of(file, name)
    scaling = metadata.get("rope.scaling.type", "none")
    gemma = name == "gemma3"
    if scaling not in ("none", "linear", *(() if gemma else _SCALED)):
        raise ValueError(f"{file.path}: {name}.rope.scaling.type {scaling!r} is not supported")
    if not metadata.get("attention.causal", True):
        raise ValueError(f"{file.path}: {name}.attention.causal: false is not supported")
    refuse_foreign(file, name, metadata, _OF_GEMMA if gemma else _SCALED.get(scaling, ()))
    return metadata


def metadata_of(file: GgufFile, name: str) -> dict[str, Any]:
    """The metadata with its architecture's prefix, without it; values are of their known kinds."""
    file.check({f"{name}.{key}": kind for kind, keys in _KEYS.items() for key in keys.split()})
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}


def refuse_foreign(
    file: GgufFile, name: str, metadata: dict[str, Any], known: Collection[str]
) -> None:
    """ValueError for keys that are neither those of all architectures nor in `known`."""
    every = {*NEEDED.values(), *_ALSO_KNOWN, *known}
    foreign = [key for key in metadata if metadata[key] and key not in every]
    if foreign:
        named = ", ".join(f"{name}.{key} ({shown(metadata[key])})" for key in foreign)
        raise ValueError(f"{file.path}: not supported: {' '.join(named.split())}")


def _check_heads(file: GgufFile, metadata: dict[str, Any], head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {key} {metadata[key]} differs from the heads' width {head_dim}: "
                "not supported"
            )


def _rope_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which GGUF stores only the frequencies' divisors.

    Llama 3.1 to 3.3 have the same bounds and differ in the factor; other bounds are refused.
    """
    stored = file.tensors[ROPE_FACTORS]
    if stored.kind != GGMLQuantizationType.F32 or stored.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path}: {ROPE_FACTORS} is {stored.kind.name} {stored.shape}, "
            f"expected F32 ({head_dim // 2},)"
        )
    divisors = np.fromfile(file.path, np.float32, head_dim // 2, offset=stored.begin)
    if not np.all((divisors > 0) & np.isfinite(divisors)):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} holds numbers that divide nothing")
    scaling = Llama3Scaling(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = rope_frequencies(RopeConfig(theta=theta, scaling=None), head_dim)
    scaled = rope_frequencies(RopeConfig(theta=theta, scaling=scaling), head_dim)
    if not np.allclose(plain / scaled, divisors, rtol=1e-4):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} is not Llama 3's scaling: not supported")
    return {"rope_type": "llama3", **asdict(scaling)}
