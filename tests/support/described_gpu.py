"""Compiles for an NVIDIA GPU on a machine that has none.

XLA needs only a device's published numbers: the plugin holds the whole compiler and assembler.
Nothing is timed, so matrix products get XLA's default tiling where a real device tries several.

Needs JAX's CUDA plugin (the `test` extra) and JAX_PLATFORMS=cpu, without which the plugin looks for
a driver and gives up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jflash.proof.program.compiled import Options


class Part(NamedTuple):
    """A GPU as its data sheet and CUDA's table of compute capabilities give it; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes_per_core: int  # float32
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int  # the most that a kernel can ask for
    l2_cache: int
    memory: int
    bandwidth: int  # bytes a second
    clock_ghz: float


H200 = Part(
    "NVIDIA H200", capability=(9, 0), cores=132, lanes_per_core=128, threads_per_core=2048,
    shared_memory_per_core=233472, shared_memory_per_block=232448, l2_cache=52428800,
    memory=141_000_000_000, bandwidth=4_800_000_000_000, clock_ghz=1.98,
)  # fmt: skip
A100 = Part(
    "NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, lanes_per_core=64,
    threads_per_core=2048, shared_memory_per_core=167936, shared_memory_per_block=166912,
    l2_cache=41943040, memory=80_000_000_000, bandwidth=2_039_000_000_000, clock_ghz=1.41,
)  # fmt: skip
L4 = Part(
    "NVIDIA L4", capability=(8, 9), cores=58, lanes_per_core=128, threads_per_core=1536,
    shared_memory_per_core=102400, shared_memory_per_block=101376, l2_cache=50331648,
    memory=24_000_000_000, bandwidth=300_000_000_000, clock_ghz=2.04,
)  # fmt: skip


def description(part: Part) -> str:
    """The part as the text form of XLA's GpuTargetConfigProto."""
    major, minor = part.capability
    # wgmma and TMA belong to sm_90a, which plain 9.0 leaves out.
    features = "feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {part.cores}
  fpus_per_core: {part.lanes_per_core}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {part.threads_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {part.shared_memory_per_block}
  shared_memory_per_core: {part.shared_memory_per_core}
  l2_cache_size: {part.l2_cache}
  device_memory_size: {part.memory}
  memory_bandwidth: {part.bandwidth}
  clock_rate_ghz: {part.clock_ghz}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{part.name}"
"""


@functools.cache
def device_mesh(part: Part, devices: int = 1, axis: str = "x") -> Mesh:
    """A mesh of such devices. RuntimeError where JAX has no CUDA plugin to describe them to."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description(part), topology=f"1x1x{devices}"
        )
    except NotImplementedError:
        raise RuntimeError(
            f"cannot compile for {part.name}: install the `test` extra (JAX's CUDA plugin) "
            "and set JAX_PLATFORMS=cpu before JAX starts"
        ) from None
    return topologies.make_mesh(topology, (devices,), (axis,))


def lower_for(
    part: Part, fn: Callable, *args: Any, donate: Sequence[int] = ()
) -> jax.stages.Lowered:
    """`fn` lowered for `part` at the shapes and dtypes of `args` (pytrees, arrays or abstract).

    A function that is jitted already keeps its own options, and `donate` must stay empty.
    """
    mesh = device_mesh(part)
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    if not hasattr(fn, "lower"):
        fn = jax.jit(fn, donate_argnums=tuple(donate))
    elif donate:
        raise ValueError("fn is jitted already: donate its arguments there")
    # Kernels ask the mesh which GPU they are lowered for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return fn.lower(*placed)


def compile_for(
    part: Part, fn: Callable, *args: Any, donate: Sequence[int] = (), options: Options | None = None
) -> jax.stages.Compiled:
    """Compiles what `lower_for` gives; `options` hold for this program only."""
    lowered = lower_for(part, fn, *args, donate=donate)
    with jax.sharding.use_abstract_mesh(device_mesh(part).abstract_mesh):
        return lowered.compile(compiler_options=dict(options or {}))
