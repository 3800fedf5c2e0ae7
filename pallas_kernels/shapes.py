"""The real shapes of the kernels' tests and benchmarks. Knows sizes, no model's code.

Sizes are the models' (public config.json); a name says the model, the batch and the capacity,
or the rows of a matrix product.
"""

from typing import NamedTuple


class BlockShape(NamedTuple):
    """One call of block attention, all sequences `context` tokens long; see the op for the axes."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    context: int
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None


class MatmulShape(NamedTuple):
    """One call of an op of `pallas_kernels.matmul`: x [M, K], N columns (of a head, V)."""

    op: str
    M: int
    K: int
    N: int


class LayerShape(NamedTuple):
    """A decoder layer's products: M rows of width D, A columns of attention, Q of qkv, F of MLP."""

    M: int
    D: int
    A: int
    Q: int
    F: int


class GroupedShape(NamedTuple):
    """One call of an op of `pallas_kernels.grouped_matmul`: M tokens, each to k of E experts."""

    op: str
    M: int
    k: int
    E: int
    K: int
    N: int


class DeltaShape(NamedTuple):
    """One call of the gated delta rule, T rows that begin `ahead` positions after the kept state.

    A block of 16 that is accepted whole moves the state by a chunk, and begins anywhere in one.
    """

    B: int
    T: int
    Hk: int
    Hv: int
    dk: int
    dv: int
    ahead: int


def _qwen3(B: int, S: int, context: int, T: int = 16, causal: bool = True) -> BlockShape:
    """Qwen3-4B and -8B; their 5-layer drafters have the same heads."""
    return BlockShape(B=B, T=T, S=S, N=32, K=8, H=128, context=context, causal=causal)


BLOCK_ATTENTION: dict[str, BlockShape] = {
    # A verify of 16 tokens: where a step spends its attention.
    "qwen3-b1-2k": _qwen3(1, 2048, 1024),
    "qwen3-b8-2k": _qwen3(8, 2048, 1024),
    "qwen3-b32-2k": _qwen3(32, 2048, 1024),
    "qwen3-b1-8k": _qwen3(1, 8192, 8000),
    "qwen3-b1-32k": _qwen3(1, 32768, 32000),
    "qwen3-b8-8k": _qwen3(8, 8192, 8000),
    # The drafter's block, and plain decoding.
    "qwen3-b1-2k-draft": _qwen3(1, 2048, 1024, causal=False),
    "qwen3-b1-2k-plain": _qwen3(1, 2048, 1024, T=1),
    "qwen3-b8-2k-plain": _qwen3(8, 2048, 1024, T=1),
    # Other groups, head dims and widths: Llama-3.1-8B with b10, Qwen3-32B, Qwen2.5-7B, gpt-oss-20b
    # (sinks, every other layer a window), Gemma-2-9B (soft cap, window).
    "llama3.1-b1-2k": BlockShape(B=1, T=10, S=2048, N=32, K=8, H=128, context=1024),
    "qwen3-32b-b1-2k": BlockShape(B=1, T=16, S=2048, N=64, K=8, H=128, context=1024),
    "qwen2.5-7b-b1-2k": BlockShape(B=1, T=16, S=2048, N=28, K=4, H=128, context=1024),
    "gpt-oss-b1-4k": BlockShape(B=1, T=8, S=4096, N=64, K=8, H=64, context=3000, sinks=True),
    "gpt-oss-b1-4k-window": BlockShape(
        B=1, T=8, S=4096, N=64, K=8, H=64, context=3000, window=128, sinks=True
    ),
    "gemma2-b1-8k-window": BlockShape(
        B=1, T=16, S=8192, N=16, K=8, H=256, context=8000, window=4096, softcap=50.0
    ),
    # The contract's corners: the widest block with the most groups, and one head of each.
    "corner-widest": BlockShape(B=2, T=32, S=1024, N=16, K=1, H=128, context=700),
    "corner-narrowest": BlockShape(
        B=4, T=1, S=512, N=2, K=2, H=64, context=300, causal=False, window=64
    ),
}

# Qwen3-8B: 1, 8 and 32 sequences of 16 tokens.
MATMUL: dict[str, MatmulShape] = {
    f"qwen3-8b-{name}-m{M}": MatmulShape(op, M, K, N)
    for M in (16, 128, 512)
    for name, op, K, N in (
        ("qkv", "matmul", 4096, 6144),
        ("out", "matmul", 4096, 4096),
        ("down", "matmul", 12288, 4096),
        ("gate-up", "gate_up", 4096, 24576),
        ("head", "head_argmax", 4096, 151936),
    )
}

# The four products of a layer, in a chain with its norms: models, and rows of a step.
LAYER: dict[str, LayerShape] = {
    f"{name}-m{M}": LayerShape(M, *sizes)
    for name, sizes in (
        ("qwen3-8b", (4096, 4096, 6144, 12288)),
        ("qwen3-4b", (2560, 4096, 6144, 9728)),
        ("llama-3.1-8b", (4096, 4096, 6144, 14336)),
        ("smollm2-135m", (576, 576, 960, 1536)),
    )
    for M in (16, 32, 64, 128, 256, 512)
}

# Qwen3-30B-A3B and Qwen3-Coder-30B-A3B: 1, 8 and 32 sequences of one token (plain decoding), and
# of 16.
GROUPED_MATMUL: dict[str, GroupedShape] = {
    f"qwen3-30b-a3b-{name}-m{M}": GroupedShape(op, M, 8, 128, K, N)
    for M in (1, 8, 16, 32, 128, 512)
    for name, op, K, N in (
        ("gate-up", "grouped_gate_up", 2048, 1536),
        ("down", "grouped_matmul", 768, 2048),
    )
}

# Qwen3.5-27B and 35B-A3B: a verify of 16 tokens whose last one was accepted whole, and one token
# of plain decoding in the middle of a chunk.
GATED_DELTA: dict[str, DeltaShape] = {
    f"{name}-b{B}{kind}": DeltaShape(B, T, 16, Hv, 128, 128, ahead)
    for name, Hv in (("qwen3.5-27b", 48), ("qwen3.5-35b-a3b", 32))
    for B in (1, 8)
    for kind, T, ahead in (("", 16, 6), ("-plain", 1, 1))
}
