"""jflash.bench.kernel_trace: what it makes of a profiler's trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from jflash.bench.kernel_trace import by_name, kernels_of

TRACE = """
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 duration_ps: 3000000 }
    events { metadata_id: 2 duration_ps: 5000000 }
    events { metadata_id: 3 duration_ps: 1000000 } }
  lines { name: "Stream #14(MemcpyD2D)" events { metadata_id: 4 duration_ps: 7000000 } }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 90000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_add_fusion_3" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion_12_1" } }
  event_metadata { key: 3 value { id: 3 name: "gated_delta" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2D" } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 1000 } }
  event_metadata { key: 1 value { id: 1 name: "python" } } }
"""


def test_kernels_of_one_name_are_added_and_told_by_the_step():
    found = by_name(ProfileData.from_text_proto(TRACE), steps=2)
    assert found == [
        ("loop_add_fusion", 1.0, 4.0),
        ("MemcpyD2D", 0.5, 3.5),
        ("gated_delta", 0.5, 0.5),
    ]


def test_a_trace_without_a_gpu_is_refused():
    if jax.default_backend() == "gpu":
        found = kernels_of(lambda: jnp.ones(9) + 1, 1)
        assert found and all(kernel.us > 0 for kernel in found)
    else:
        with pytest.raises(ValueError, match="has no /device:GPU:0: kernels are traced on GPUs"):
            kernels_of(lambda: jnp.ones(9) + 1, 1)
