"""The canonical cut of attention: pieces of 256 positions, merged in ascending order.

A piece is (sums of values [R, H], a scale [R], the sum of its weights [R]), R rows or none: weights
are relative to 2 ** scale, and the scale is a row's largest logit in units of log 2, *rounded to a
whole number*. So what is scaled is scaled by powers of two, which is exact, and the bits do not
depend on whether a compiler makes one operation of a product and a sum: Mosaic GPU does, XLA's
Triton does not. `across` gives [R] the shape of [R, H]. A row that sees nothing of a piece has
(0, LOWEST, 0) there, which merging leaves out exactly.
"""

import jax.numpy as jnp

PIECE = 256
# No score is ever below this. Finite, so that a row which has seen nothing yet does not make NaN.
LOWEST = -1e30
# If scales lie further apart, the lower one is ignored: compilers differ in whether they keep
# numbers that are too small to be normal.
FURTHEST = -100.0


def merge(before, piece, across):
    """Both pieces in one, relative to the larger scale."""
    (sums, scale, weight), (more, more_scale, more_weight) = before, piece
    both = jnp.maximum(scale, more_scale)
    old, new = power(scale - both), power(more_scale - both)
    sums = sums * across(old, sums) + more * across(new, more)
    return sums, both, weight * old + more_weight * new


def finish(piece, sink, across):
    """The attention of all pieces merged; a sink, if there is one, is a weight with no value."""
    sums, scale, weight = piece
    if sink is not None:
        both = jnp.maximum(scale, _whole(sink))
        old = power(scale - both)
        sums, weight = sums * across(old, sums), weight * old + jnp.exp2(sink - both)
    # A row that sees nothing has sums of 0 and stays 0.
    return sums / across(jnp.where(weight > 0, weight, 1.0), sums)


def _whole(x):
    """The nearest whole number: float32 has no smaller steps from 2 ** 23 on."""
    return (x + 1.5 * 2**23) - 1.5 * 2**23


def power(scale):
    """2 ** scale of a whole number, up to 0."""
    return jnp.exp2(jnp.maximum(scale, FURTHEST))
