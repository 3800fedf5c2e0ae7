"""The interpreter of Mosaic GPU's kernels calls Python thousands of times for one product.

JAX gives each argument of such a call to a device, and the callee takes it back: half of the time
of files such as test_matmul.py (jax 0.11.2). Here a callee gets what XLA hands over, and a whole
number as Python's, which is what it makes of it anyway.
"""

import numpy as np
from jax._src import callback as callbacks
from jax.tree_util import tree_map

WHOLE = "biu"  # numpy's kinds


def _taken(x: np.ndarray) -> np.ndarray | int:
    return x.item() if x.ndim == 0 and x.dtype.kind in WHOLE else x


def _called(*args, callback, result_avals, sharding, ordered):
    del result_avals, sharding, ordered
    return tree_map(np.asarray, callback(*map(_taken, args)))


assert callable(callbacks.io_callback_impl), "another JAX calls Python in another way"
callbacks.io_callback_impl = _called
