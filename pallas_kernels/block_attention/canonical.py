"""Block attention in the canonical form: the same bits for every batch, width, capacity and chunk.

It is the Mosaic GPU kernel with pieces of 256 absolute positions. If sequences, heads and row tiles
fill half the multiprocessors, a CTA walks all pieces of its rows, or two do (`mosaic_shares`); if
not, CTAs take pieces in turn and a second kernel merges them, in the same order by the same formula
(`pieces`). In a step a walk of a long text leaves its tail to the others (`mosaic_tails`).
On an H200 (jax 0.11.2, benchmarks/h200-canonical-attention.json), 16 rows at context 1024 of 2048,
µs beside the cut that suits batch and capacity best: batch 1 10.5 and 9.4, batch 8 23.8 and 22.9,
batch 32 49.5 and 48.8. Long texts pay more: batch 1 at 32,000 tokens 66.9 and 47.8, because 126
pieces are written and read again. In pieces of 128 batch 32 would take twice as long by a second
kernel, in pieces of 512 batch 1 15.0.
Blocks of more than 32 tokens are a prompt's chunks. In a ring, pieces are cut by slot: the form
does not hold for rings that wrap, which only drafters have.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import mosaic_gpu
from pallas_kernels.block_attention.mosaic_task import ROWS, STAGES, Task, Tiles
from pallas_kernels.block_attention.pieces import PIECE

BLOCK = 64
WALKERS = 64  # CTAs: batch 8 of Qwen3-8B's heads took 27.2 µs by a second kernel
# CTAs up to which a walk of narrow heads has two strands: in whole steps on an H200 (jax 0.11.2,
# 2026-11-23) 96 of 64 dims took 14.7 µs in place of 17.9. Of 128 dims 64 took 20.4 in place of
# 22.2, but two strands spill registers there.
ALONE = 96
# CTAs up to which two share a walk, so that each has a multiprocessor: steps of Qwen3-8B's sizes at
# batch 8 took 7.07 ms in place of 7.19 at context 1,024 on an H200, and 10.15 in place of 10.74 at
# 4,000 on an H100 (jax 0.11.2, 2026-11-26). More shares, and shares of fewer CTAs' walks, lost.
SHARING = 66
# Wider heads, of which several CTAs walk the same keys, are walked where CTAs of 128 columns fill
# the multiprocessors. By walks 512 rows of a prompt of Qwen3.5-35B-A3B took 53 µs in place of 70
# after 1,000 tokens, 976 in place of 1,340 after 30,000, and a step's at batch 32 42 in place of 64
# after 1,000 (one H200, jax 0.11.2, 2026-11-29).
WALKED_DIMS = 128
FULL = 256  # CTAs
MOST_OF_STEP = 32  # rows; more are a prompt's
EVEN = 4096  # positions of a window at most in which a walk leaves no tail
TAILS = 1024  # pieces of long texts that walks may leave: 32 KB each of 128 dims and a KV head


def block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    ring: bool = False,
    interpret: bool = False,
    table: Int[Array, "B _"] | None = None,
) -> Float[Array, "B T N H"]:
    """See the folder's contract."""
    B, T, N, H = q.shape
    return mosaic_gpu.block_attention(
        q, k, v, lengths, widths,
        causal=causal, scale=scale, window=window, sinks=sinks, softcap=softcap, ring=ring,
        interpret=interpret, tiles=tiles_for(B, T, N, k.shape[2], H, window), table=table,
    )  # fmt: skip


def tiles_for(B: int, T: int, N: int, K: int, H: int, window: int | None = None) -> Tiles:
    """The CTAs of the pieces, which change no bit."""
    row_tiles = -(-T // (ROWS // (N // K)))
    ctas, step = B * K * row_tiles, T <= MOST_OF_STEP
    walks = ctas >= WALKERS
    if H > WALKED_DIMS:
        alike = window is None or window <= EVEN or not step
        walks = alike and ctas * H // WALKED_DIMS >= FULL
    strands = 2 if walks and H <= 64 and ctas <= ALONE else 1
    shares = 2 if walks and H == WALKED_DIMS and ctas <= SHARING else 1
    tails = TAILS if walks and step and strands == 1 else 0
    how = {"stages": STAGES[H], "walk": walks, "strands": strands, "shares": shares}
    return Tiles(chunk=PIECE, block=BLOCK, ordered=True, tails=tails, **how)


def written_bytes(B: int, T: int, S: int, N: int, K: int, H: int, window: int | None = None) -> int:
    """Of float32 that lie in memory between the kernels of a causal block."""
    how = {"causal": True, "scale": 1.0, "window": window, "softcap": None, "ring": False}
    task = Task(B=B, T=T, S=S, K=K, G=N // K, H=H, tiles=tiles_for(B, T, N, K, H, window), **how)
    return 4 * task.written * K * task.row_tiles * ROWS * (H + 2)
