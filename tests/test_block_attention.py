"""Both attention ops: every backend against the float32 reference, and the contract's promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import BACKENDS, block_attention
from pallas_kernels.prefill_attention import prefill_attention

# B, T, S, N, K, H
SHAPES = [(1, 16, 64, 4, 2, 16), (3, 7, 40, 6, 2, 24), (2, 1, 33, 4, 4, 16), (4, 5, 24, 8, 1, 32)]


def inputs(shape, dtype=jnp.float32, seed=0):
    B, T, S, N, K, H = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    draw = lambda key, *s: jax.random.normal(key, s).astype(dtype)  # noqa: E731
    return draw(keys[0], B, T, N, H), draw(keys[1], B, S, K, H), draw(keys[2], B, S, K, H)


def edges(shape):
    """Lengths 0, 1, in between and as long as fits; widths from 1 to T."""
    B, T, S = shape[:3]
    lengths = np.resize([0, 1, S // 2, S - T], B)
    widths = np.resize([T, 1, (T + 1) // 2], B)
    return jnp.asarray(lengths), jnp.asarray(widths)


def by_hand(q, k, v, lengths, widths, causal):
    """The contract once more, in numpy with loops and float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, H = q.shape
    out = np.zeros_like(q)
    for b in range(B):
        for t in range(T):
            seen = list(range(int(lengths[b])))
            for j in range(int(widths[b])):
                if j <= t or not causal:
                    seen.append(int(lengths[b]) + j)
            for n in range(N):
                kv = n // (N // k.shape[2])
                scores = k[b, seen, kv] @ q[b, t, n] * H**-0.5
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights / weights.sum() @ v[b, seen, kv]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_contract(shape, causal):
    q, k, v = inputs(shape)
    lengths, widths = edges(shape)
    got = block_attention(
        q, k, v, lengths, widths, causal=causal, scale=shape[-1] ** -0.5, backend="reference"
    )
    np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, causal), atol=2e-6)


@pytest.mark.parametrize("dtype,tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"reference"}))
def test_backend_equals_reference(backend, shape, causal, dtype, tolerance):
    q, k, v = inputs(shape, dtype)
    for lengths, widths in [edges(shape), tuple(x[::-1] for x in edges(shape))]:
        args = (q, k, v, lengths, widths)
        how = {"causal": causal, "scale": shape[-1] ** -0.5}
        want = block_attention(*args, **how, backend="reference")
        got = block_attention(*args, **how, backend=backend)
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance
        )


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("causal", [True, False])
def test_dead_slots_may_hold_nan(backend, causal):
    shape = SHAPES[1]
    q, k, v = inputs(shape)
    lengths, widths = edges(shape)
    dead = jnp.arange(shape[2])[None, :] >= (lengths + widths)[:, None]
    poison = lambda x: jnp.where(dead[:, :, None, None], jnp.nan, x)  # noqa: E731
    how = {"causal": causal, "scale": 0.2, "backend": backend}
    clean = block_attention(q, k, v, lengths, widths, **how)
    poisoned = block_attention(q, poison(k), poison(v), lengths, widths, **how)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean, poisoned)


def test_bits_do_not_depend_on_row_length_or_neighbours():
    """One query against the same 20 keys: first or last row of its block, alone or in company."""
    B, T, S, N, K, H = 2, 6, 48, 4, 2, 16
    q, k, v = inputs((B, T, S, N, K, H))
    seen = 20  # the slots that the query sees: its own is the last of them

    @jax.jit
    def attend(q, k, v, lengths):
        widths = jnp.full(B, T)
        return block_attention(q, k, v, lengths, widths, causal=True, scale=0.25, backend="xla")

    results = []
    for row in range(T):
        for slot in range(B):
            noise_q, noise_k, noise_v = inputs((B, T, S, N, K, H), seed=10 + row)
            block = noise_q.at[slot, row].set(q[0, 0])
            keys = noise_k.at[slot, :seen].set(k[0, :seen])
            values = noise_v.at[slot, :seen].set(v[0, :seen])
            lengths = jnp.full(B, 3).at[slot].set(seen - 1 - row)
            results.append(np.asarray(attend(block, keys, values, lengths)[slot, row]))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("offset", [0, 1, 9, 24])
def test_prefill_is_bottom_right_causal(backend, offset):
    shape = (2, 16, 40, 4, 2, 16)
    q, k, v = inputs(shape)
    lengths, widths = jnp.full(2, offset), jnp.full(2, 16)
    got = prefill_attention(q, k, v, jnp.int32(offset), scale=0.25, backend=backend)
    np.testing.assert_allclose(got, by_hand(q, k, v, lengths, widths, True), atol=2e-6)


@pytest.mark.parametrize("op", [block_attention, prefill_attention])
def test_unknown_backend_is_refused_by_name(op):
    q, k, v = inputs(SHAPES[0])
    sizes = (jnp.zeros(1, int), jnp.ones(1, int)) if op is block_attention else (jnp.int32(0),)
    how = {"causal": True} if op is block_attention else {}
    with pytest.raises(ValueError, match="no backend 'cudnn'"):
        op(q, k, v, *sizes, **how, scale=1.0, backend="cudnn")
