"""The interpreter of Mosaic GPU's kernels (jax 0.11.2), made faster, and with registers for wgmma.

It calls Python thousands of times for one product. JAX gives each argument of such a call to a
device, and the callee takes it back: half of the time of files such as test_matmul.py. Here a
callee gets what XLA hands over, and a whole number as Python's, which is what it makes of it.

And a left operand of wgmma comes as its numbers where a kernel has it in registers. JAX's own
callee takes the name of a place in shared memory alone.
"""

from typing import Any

import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.tree_util import tree_map

WHOLE = "biu"  # numpy's kinds


def _taken(x: np.ndarray) -> np.ndarray | int:
    return x.item() if x.ndim == 0 and x.dtype.kind in WHOLE else x


def _called(*args, callback, result_avals, sharding, ordered):
    del result_avals, sharding, ordered
    return tree_map(np.asarray, callback(*map(_taken, args)))


assert callable(callbacks.io_callback_impl), "another JAX calls Python in another way"
callbacks.io_callback_impl = _called


_callees: Any = gpu_callbacks
_of_shared_memory = _callees.wgmma


def _wgmma(
    *,
    mesh_location: Any,
    thread: Any,
    a_allocation_key_as_array: Any,
    source_info: Any = None,
    **at,
) -> Any:
    left = a_allocation_key_as_array
    if np.ndim(left) < 2:
        at |= {"mesh_location": mesh_location, "thread": thread, "source_info": source_info}
        return _of_shared_memory(a_allocation_key_as_array=left, **at)
    memory = _callees._get_shared_memory()
    note = _callees.memory.GPULoggingInfo(mesh_location, thread, source_info)

    def place(name: str) -> tuple[Any, Any]:
        key = _callees.HostAllocationKey.from_array(at[f"{name}_allocation_key_as_array"])
        steps = _callees._remove_noop_transforms(at[f"{name}_transforms"])
        return key, memory.access(key, tree_map(int, steps))

    def content(where: tuple[Any, Any]) -> Any:
        return memory.get_buffer_content(*where, thread, logging_info=note)[0]

    sums = content(place("acc"))
    made = sums + np.matmul(left, content(place("b")), dtype=sums.dtype)
    memory.store_buffer_content(*place("acc"), made, thread, logging_info=note)
    return at["token"]


_callees.wgmma = _callees.fail_on_exception(_wgmma)
