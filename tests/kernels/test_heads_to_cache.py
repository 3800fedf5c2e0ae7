"""Head norms, RoPE and the cache write: Triton against plain jnp, and that against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.heads_to_cache import Heads, heads_to_cache, reference, triton
from tests.support.attention_checks import ON_GPU

# P, B, T, N, K, H, S, normed, first column (TURNED: the heads in reverse order), dtype
TURNED = -1
SHARED = -2  # values are the keys before norm and rotation, and normed without a scale
CASES = [
    (1, 2, 16, 8, 2, 64, 64, True, 0, "bfloat16"),
    (1, 3, 5, 4, 4, 128, 32, True, 0, "float32"),
    (1, 1, 1, 8, 2, 64, 64, False, 0, "bfloat16"),
    (1, 2, 10, 0, 2, 64, 64, True, 256, "float32"),  # keys and values of a drafter's context
    (1, 2, 3, 6, 2, 16, 40, True, TURNED, "float32"),
    (4, 2, 5, 8, 2, 64, 64, True, 0, "bfloat16"),  # the pieces of a product split over K
    (3, 1, 1, 4, 2, 16, 40, True, 0, "float32"),
    (2, 1, 3, 4, 1, 512, 32, True, SHARED, "float32"),  # Gemma 4's layers without a window
]
# Qwen3-8B's heads at a step's blocks, and a drafter's context: batches 1, 8 and 32.
QWEN3 = [
    (4, 1, 1, 32, 8, 128, 2048, True, 0, "bfloat16"),
    (4, 1, 16, 32, 8, 128, 2048, True, 0, "bfloat16"),
    (1, 8, 16, 32, 8, 128, 2048, True, 0, "bfloat16"),
    (1, 32, 16, 32, 8, 128, 2048, True, 0, "bfloat16"),
    (1, 32, 16, 32, 8, 128, 512, True, 0, "float32"),
    (1, 32, 16, 0, 8, 128, 2048, True, 8192, "bfloat16"),
]
run_triton = jax.jit(
    functools.partial(triton.heads_to_cache, interpret=not ON_GPU), static_argnames="heads"
)
run_default = jax.jit(heads_to_cache, static_argnames=("heads", "backend"))
run_reference = jax.jit(reference.heads_to_cache, static_argnames="heads")


def inputs(case, seed=0):
    P, B, T, N, K, H, S, normed, first, dtype = case
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(dtype))  # nothing is compiled for it

    angles = rng.normal(size=(B, T, H // 2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    scales = (normal(H) if N else None, normal(H)) if normed else (None, None)
    # The first sequence runs over the end of its cache, so its last rows are dropped.
    begin = np.array([S - T // 2 if b == 0 and T > 1 else 3 + b for b in range(B)])
    slots = jnp.asarray(begin[:, None] + np.arange(T), jnp.int32)
    columns = first, first + N * H, first + (N + K) * H
    if first == TURNED:
        first, columns = 0, (2 * K * H, K * H, 0)
    if first == SHARED:
        first, columns = 0, (0, N * H, N * H)
    x = normal(P, B, T, first + (N + 2 * K) * H).astype(dtype if P == 1 else "float32")
    caches = normal(B, S, K, H), normal(B, S, K, H)
    return (x, *scales, cos, sin, *caches, slots), Heads(N, K, H, 1e-6, columns, case[8] == SHARED)


def test_a_rows_bits_do_not_depend_on_the_width():
    (x, *scales, cos, sin, k, v, slots), heads = inputs(
        (1, 1, 40, 8, 2, 64, 64, True, 0, "bfloat16")
    )
    slots = jnp.arange(40)[None] + 5
    whole = run_triton(x, *scales, cos, sin, k, v, slots, heads=heads)
    for first, T in [(0, 1), (3, 5), (17, 16), (2, 33)]:
        at = slice(first, first + T)
        cut = (x[:, :, at], *scales, cos[:, at], sin[:, at], k, v, slots[:, at])
        q, new_k, new_v = run_triton(*cut, heads=heads)
        np.testing.assert_array_equal(q, whole[0][:, at])
        for new, all_new in ((new_k, whole[1]), (new_v, whole[2])):
            np.testing.assert_array_equal(new[:, 5:][:, at], all_new[:, 5:][:, at])


def by_hand(args, heads):
    """The contract in float64, one row and head at a time."""
    x, q_scale, k_scale, cos, sin, k, v, slots = (
        None if a is None else np.asarray(a, np.float64) for a in args
    )
    x = x.sum(axis=0)
    N, K, H, eps, firsts, value_norm = heads
    B, T = slots.shape
    q, k, v = np.zeros((B, T, N, H)), k.copy(), v.copy()
    for b in range(B):
        for t in range(T):
            for head in range(N + 2 * K):
                kind, number = (0, head) if head < N else (1 + (head - N) // K, (head - N) % K)
                row = x[b, t, firsts[kind] + number * H :][:H]
                scale = q_scale if head < N else k_scale
                if head < N + K:
                    if scale is not None:
                        row = row / np.sqrt(np.mean(row**2) + eps) * scale
                    low, high = row[: H // 2], row[H // 2 :]
                    c, s = cos[b, t], sin[b, t]
                    row = np.concatenate([low * c - high * s, high * c + low * s])
                elif value_norm:
                    row = row / np.sqrt(np.mean(row**2) + eps)
                slot = int(slots[b, t])
                if head < N:
                    q[b, t, head] = row
                elif slot < k.shape[1]:
                    (k if head < N + K else v)[b, slot, (head - N) % K] = row
    return q, k, v


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_contract(case):
    args, heads = inputs(case)
    got = run_default(*args, heads=heads, backend="xla")
    # bfloat16 rounds up to four times on the way; values are of size 1.
    tolerance = 2e-5 if case[-1] == "float32" else 6e-2
    for mine, want in zip(got, by_hand(args, heads), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), want, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_reference(case):
    args, heads = inputs(case)
    want = run_reference(*args, heads=heads)
    got = run_triton(*args, heads=heads)
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(a, np.float32) for a in (mine, theirs))
        # Sums of squares may differ in their last bit: one unit of bfloat16 at most.
        limit = 4e-6 if case[-1] == "float32" else 2**-7
        np.testing.assert_allclose(mine, theirs, rtol=limit, atol=limit)
    # Values of a whole product are copied, and rows that are not written stay: equal bits.
    if case[0] == 1:
        np.testing.assert_array_equal(np.asarray(got[2]), np.asarray(want[2]))


def test_a_row_past_the_capacity_is_dropped():
    args, heads = inputs(CASES[0])
    k, slots = args[5], np.asarray(args[7])
    assert (slots[0] >= k.shape[1]).any()
    for backend in (run_reference, run_triton):
        new = np.asarray(backend(*args, heads=heads)[1])
        untouched = sorted(set(range(k.shape[1])) - set(slots[0].tolist()))
        np.testing.assert_array_equal(new[0, untouched], np.asarray(k)[0, untouched])


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[4]], ids=str)
@pytest.mark.parametrize("run", [run_reference, run_triton], ids=["reference", "triton"])
def test_sequences_that_share_a_cache_have_the_rows_of_their_own(run, case):
    args, heads = inputs(case)
    *rest, k, v, slots = args
    want_q, *want = run(*args, heads=heads)
    (B, T), S = slots.shape, k.shape[1]
    past = B * S + jnp.arange(B * T).reshape(B, T)
    places = jnp.where(slots < S, slots + S * jnp.arange(B)[:, None], past)
    shared = (cache.reshape(1, B * S, *cache.shape[2:]) for cache in (k, v))
    q, *caches = run(*rest, *shared, places, heads=heads)
    np.testing.assert_array_equal(q, want_q)
    for mine, own in zip(caches, want, strict=True):
        assert not np.array_equal(own, k) and not np.array_equal(own, v)
        np.testing.assert_array_equal(mine.reshape(own.shape), own)


@pytest.mark.parametrize("case", QWEN3 if ON_GPU else CASES[-3:-2], ids=str)
def test_bits_of_a_row_depend_on_nothing_but_the_row(case):
    """Another place in the block, other neighbours and another sequence: the same bits."""
    args, heads = inputs(case)
    x, q_scale, k_scale, cos, sin, k, v, slots = args
    B = len(slots)

    def turned(a):
        return jnp.flip(jnp.roll(a, 3, axis=-2), axis=-3)

    there = turned(x), turned(cos), turned(sin)
    first = run_triton(*args, heads=heads)
    second = run_triton(there[0], q_scale, k_scale, *there[1:], k, v, slots, heads=heads)
    at = np.asarray(slots)
    kept = at < k.shape[1]

    def rows(result):
        """Queries, and what was written to the caches: [B, T, heads, H] each."""
        q, k, v = (np.asarray(a, np.float32) for a in result)
        return q, *(a[np.arange(B)[:, None], np.minimum(at, a.shape[1] - 1)] for a in (k, v))

    both = kept & np.roll(np.flip(kept, axis=0), -3, axis=1)
    for mine, other in zip(rows(first), rows(second), strict=True):
        back = np.roll(np.flip(other, axis=0), -3, axis=1)
        np.testing.assert_array_equal(mine[both], back[both])
        assert not mine.size or mine[both].any()


def test_an_unknown_backend_is_refused():
    args, heads = inputs(CASES[0])
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        heads_to_cache(*args, heads=heads, backend="cuda")
