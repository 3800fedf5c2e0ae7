"""Small random GGUF files, of every supported type, written by the `gguf` library.

It cannot make K-quants: theirs are random blocks, valid as any bytes with finite scales are.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

Kind = GGMLQuantizationType
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
SIMPLE = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
K_QUANTS = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
KINDS = (*PLAIN, *SIMPLE, *K_QUANTS)
WIDTH, LAYERS = 256, 2  # a K-quant's block is 256 numbers of a row
HEADS = {"llama": (4, 2, 64), "qwen2": (8, 4, 32), "qwen3": (2, 1, 128)}  # query, KV, width
HEADS["gemma3"] = (1, 1, 256)  # transformers scales by 256 dims, whatever the file has
TEMPLATE = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["It", "Ġa", "12", "123", "ĠĠ", "Ġ1"]  # each merged of the one or two before it
MERGES = ["I t", "Ġ a", "1 2", "12 3", "Ġ Ġ", "Ġ 1"]
SPECIAL = ["<eos>", "<user>", "<assistant>", "<bos>"]
TOKENS = [*BYTES, *WORDS, *SPECIAL]
EOS, USER, ASSISTANT, BOS = range(len(TOKENS) - 4, len(TOKENS))
VOCABULARY = 320
PADDING = [f"[PAD{i}]" for i in range(len(TOKENS), VOCABULARY)]


def blocks(kind: GGMLQuantizationType, rng: np.random.Generator, shape: tuple[int, int]):
    """Rows of random K-quant blocks whose numbers are of size 0.05 or so, as bytes."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)

    def put(at: int, values: np.ndarray) -> None:
        raw[:, at : at + 2] = values.astype(np.float16)[:, None].view(np.uint8)

    scales = rng.uniform(1e-4, 3e-4, len(raw))
    if kind == Kind.Q6_K:
        raw[:, 192:208] = rng.integers(-20, 20, (len(raw), 16), dtype=np.int8).view(np.uint8)
        put(208, scales)
    else:
        put(0, scales)
        put(2, 7.5 * scales)
    return raw.reshape(shape[0], -1)


def stored(kind: GGMLQuantizationType, rng: np.random.Generator, shape: tuple[int, int]):
    """A random matrix as the file holds it."""
    if kind in K_QUANTS:
        return blocks(kind, rng, shape)
    return quantize((rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32), kind)


@functools.cache
def tensors(arch: str, kind: GGMLQuantizationType, seed: int, tied: bool) -> dict[str, Any]:
    """Every tensor of a small model by its name, with its type."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, head_dim = HEADS[arch]
    rows = {
        "attn_q": heads * head_dim, "attn_k": kv_heads * head_dim, "attn_v": kv_heads * head_dim,
        "attn_output": WIDTH, "ffn_gate": WIDTH, "ffn_up": WIDTH, "ffn_down": WIDTH,
    }  # fmt: skip

    def vector(size: int, mean: float) -> tuple[np.ndarray, GGMLQuantizationType]:
        return (mean + 0.1 * rng.standard_normal(size)).astype(np.float32), Kind.F32

    made = {"token_embd.weight": (stored(kind, rng, (VOCABULARY, WIDTH)), kind)}
    made["output_norm.weight"] = vector(WIDTH, 1)
    if not tied:
        made["output.weight"] = (stored(kind, rng, (VOCABULARY, WIDTH)), kind)
    for layer in range(LAYERS):
        own = {f"{name}.weight": (stored(kind, rng, (n, WIDTH)), kind) for name, n in rows.items()}
        own |= {f"{name}.weight": vector(WIDTH, 1) for name in ("attn_norm", "ffn_norm")}
        if arch == "qwen2":
            own |= {f"attn_{x}.bias": vector(rows[f"attn_{x}"], 0) for x in "qkv"}
        if arch in ("qwen3", "gemma3"):
            own |= {f"attn_{x}_norm.weight": vector(head_dim, 1) for x in "qk"}
        if arch == "gemma3":
            own |= {f"post_{x}_norm.weight": vector(WIDTH, 1) for x in ("attention", "ffw")}
        made |= {f"blk.{layer}.{name}": value for name, value in own.items()}
    return made


def metadata(arch: str) -> dict[str, Any]:
    """What a converter writes of a small model and its byte-level tokenizer."""
    heads, kv_heads, head_dim = HEADS[arch]
    own = {
        "block_count": LAYERS, "embedding_length": WIDTH, "feed_forward_length": WIDTH,
        "context_length": 240, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 50000.0,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    if arch == "llama":
        own["rope.dimension_count"] = head_dim
    if arch == "gemma3":
        own["attention.sliding_window"] = 8
    tokenizer = {
        "model": "gpt2", "pre": "smollm" if arch == "llama" else "qwen2", "merges": MERGES,
        "tokens": TOKENS + PADDING, "eos_token_id": EOS, "bos_token_id": BOS,
        "token_type": [1] * (len(TOKENS) - 4) + [3] * 4 + [5] * len(PADDING),
    }  # fmt: skip
    return (
        {"general.name": "small", "general.type": "model"}
        | {f"{arch}.{key}": value for key, value in own.items()}
        | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
        | {"tokenizer.chat_template": TEMPLATE}
    )


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: GGMLQuantizationType = Kind.F32,
    seed: int = 0,
    tied: bool = False,
    change: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> Path:
    """Writes a small model; `change` and `data` set metadata and tensors, None removing one."""
    writer = GGUFWriter(path, arch)
    known = HEADS.get(arch) and arch
    for key, value in (metadata(known or "llama") | (change or {})).items():
        put(writer, key, value)
    for name, value in (tensors(known or "llama", kind, seed, tied) | (data or {})).items():
        if value is not None:
            writer.add_tensor(name, value[0], raw_dtype=value[1])
    return finished(writer, path)


def finished(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def sentencepiece() -> dict[str, Any]:
    """Metadata of a small tokenizer of Llama 2's kind, in place of the byte-level one."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "a", "b", "c", "n", "▁a", "an", "ban", "ana", "▁b", "▁ban", "▁banana", "▁▁"]
    words += ["na", "anana"]
    specials = ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *fallback, *words, "<user>", "<tool>"]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words) + [3, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0, 0.0]
    padding = [f"[PAD{i}]" for i in range(len(tokens), VOCABULARY)]
    own = {
        "model": "llama", "pre": "default", "tokens": tokens + padding,
        "scores": scores + [0.0] * len(padding), "token_type": types + [5] * len(padding),
        "merges": None, "unknown_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}
