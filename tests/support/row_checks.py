"""What every matrix product of a step must do: a row's bits are that row's alone.

The probe cancels: the weights hold every row of theirs twice, and the probe's two entries for it
add up to 0. So a product is what rounding left over, and a sum in any other order shows in every
entry, in bfloat16 too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

NOISE = 50.0  # of the other rows, where weights and probe are of size 1


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(seed, shape: tuple[int, ...], dtype=jnp.bfloat16):
    key = jax.random.key(seed, impl="rbg")  # in a GPU's memory, at once
    return jax.random.normal(key, shape).astype(dtype)


@functools.cache
def cancelling(*shape: int, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    """Weights [..., K, N] and a probe [K], whose product is 0 but for rounding."""
    half = shape[-2] // 2
    order = np.random.default_rng(half).permutation(half)
    w, probe = draw(1, (*shape[:-2], half, shape[-1]), dtype), draw(2, (half,), dtype)
    return jnp.concatenate([w, w[..., order, :]], axis=-2), jnp.concatenate([probe, -probe[order]])


def whole_numbers(*shape: int) -> tuple[jax.Array, jax.Array]:
    """Weights and a probe whose product no order of summation changes.

    For the interpreter of Mosaic's kernels: it multiplies by NumPy, whose sums depend on the index.
    """
    return jnp.round(draw(1, shape)), jnp.round(draw(2, shape[-2:-1]))


def halves(rows: np.ndarray) -> list[np.ndarray]:
    """Every other one of `rows` (a mask), and the others; one alone is both."""
    odd = rows & (np.cumsum(rows) % 2 == 1)
    return [odd, rows & ~odd if rows.sum() > 1 else odd]


def result_of(run, probe, own: np.ndarray, seed: int) -> jax.Array:
    """The one result of a probe in the rows `own` of run([M, K]) -> [M, ...], the rest noise."""
    noise = NOISE * draw(10 + seed, (len(own), len(probe)), probe.dtype)
    out = run(jnp.where(own[:, None], probe, noise))
    places = np.flatnonzero(own)
    first = out[places[0]]
    assert (first != 0).any()
    same = np.asarray((out == first).reshape(len(own), -1).all(axis=1))
    assert same[own].all(), f"rows {places[0]} and {places[~same[own]][:5]} of {len(own)} differ"
    return first


def check_rows(run, probe, M: int) -> None:
    """run([M, K]) -> [M, ...]: the same bits at every index, whatever the other rows hold."""
    found = [
        np.asarray(result_of(run, probe, own, seed), np.float32)
        for seed, own in enumerate(halves(np.ones(M, bool)))
    ]
    np.testing.assert_array_equal(*found)
