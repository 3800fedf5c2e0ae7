"""A sum whose order no compiler chooses, for Pallas-Triton kernels.

Triton adds a row's entries in the order in which its layout lays them out over threads, and the
layout comes of what was loaded, and how: two pieces in float32 lie otherwise than one in bfloat16.
"""


def sum_in_pairs(x):
    """Σ over the last axis, a power of two long: neighbours, then neighbouring pairs, and so on.

    A sum of two has no order, so the layout decides nothing.
    """
    while x.shape[-1] > 1:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).sum(axis=-1)
    return x[..., 0] if x.ndim > 1 else x.sum()
