"""The canonical form's cut of K: a function of a weight's shape, never of a call's.

A weight that is split over devices keeps the pieces of the whole one: K and N are the unsharded
weight's. So a row's bits are the same at any number of rows, tile and kernel.

Measured on an H200 (jax 0.11.2, 2026-11-22), µs for the four products of a layer of Qwen3-8B in a
chain with its norms, XLA's beside those in pieces of qkv, out, gate_up and down:
rows   XLA    1,1,1,1  2,2,1,2  2,4,1,4  2,8,1,8
16     113.3  119.7    113.2    112.7    115.1
32     119.7  132.0    117.6    117.7    125.8
64     129.2  132.9    121.6    126.3    132.2
At 128 rows down in two pieces gains 10 of 151, qkv and out lose 1 each; at 512 rows qkv loses 4.7
of 341, out 1.6, down 0.4, which leaves XLA's time (347). The 40 column tiles of Qwen3-4B's out and
down want four pieces: 70.7 at 16 rows, with two 74.3, XLA 70.2.
As chosen here (benchmarks/h200-canonical-layer.json, which has more around each layer): 117.7,
126.6, 130.7, 146.4, 216.7 and 342.4 at 16, 32, 64, 128, 256 and 512 rows, XLA 116.9, 125.3, 134.9,
149.3, 201.8 and 346.8. So 256 rows pay 7 %: there out in two pieces costs 6, and no tile of 128
rows fills the GPU with whole K.
"""

OPS = ("matmul", "gate_up", "head_argmax", "head_logits")
STEP = 64  # pieces begin at multiples of it
SHORTEST = 3 * STEP
MOST = 4
COLUMNS, ENOUGH = 64, 128  # a column tile for few rows, and how many programs fill a GPU


def pieces(op: str, K: int, N: int) -> int:
    """Into how many pieces of equal length K is cut.

    op is one of OPS; N counts w's output columns (2F, V). The fewest that make `ENOUGH` programs of
    `COLUMNS` columns, as 16 rows want; each piece beyond the first costs many rows a sum beside its
    own. An MLP's two products and a head take their sums whole.
    """
    if op not in OPS:
        raise ValueError(f"no product is called {op!r}: use one of {', '.join(OPS)}")
    if op != "matmul" or K % STEP:
        return 1
    tiles = -(-N // COLUMNS)
    allowed = [s for s in range(1, MOST + 1) if K % (s * STEP) == 0 and K // s >= SHORTEST]
    return next((s for s in allowed if tiles * s >= ENOUGH), max(allowed, default=1))
