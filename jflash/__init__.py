"""DFlash speculative decoding in JAX: one compiled fixed-shape step, lossless bit for bit."""

from jflash.generate import Chunk, Generation, Pair, generate, stream
from jflash.io import encode_prompt, load_pair, load_tokenizer, stop_token_ids

__all__ = [
    "Chunk",
    "Generation",
    "Pair",
    "encode_prompt",
    "generate",
    "load_pair",
    "load_tokenizer",
    "stop_token_ids",
    "stream",
]
