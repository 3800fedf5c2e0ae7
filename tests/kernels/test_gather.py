"""Gathers: bits of any dtype go through a push as they are, and pushes are XLA's gathers.

A CPU has no push, so there the kernel is compiled for GPUs that are described, and XLA moves in its
place what it would. Where two GPUs are at hand the kernel runs, with counts that go round.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jflash.devices.mesh import tensor_mesh
from jflash.layers.gather import AXIS, gather, gather_sum, pushing
from pallas_kernels.gather import Places, Sizes, lines, push, refusal
from pallas_kernels.gather.push import CTAS
from pallas_kernels.matmul import Unsummed
from tests.support.attention_checks import ON_GPU
from tests.support.described_gpu import H200, device_mesh
from tests.support.places import WHERE, described, described_places, put, zeros
from tests.support.virtual_devices import result, start

SHAPES = [(1, 256), (16, 2048), (5, 768), (16, 6144), (128, 2048), (300, 256), (512, 6144)]
SHAPES += [(64, 6144), (200, 11008), (2048, 2048), (16, 64), (128, 192), (1024, 192), (300, 704)]
COMPILED = [(1, 256), (16, 2048), (5, 768), (64, 6144), (200, 11008)]  # in each of three ways
COMPILED += [(128, 192), (1024, 192)]  # tiles of several rows, in two
ADDED = [(16, 2048), (5, 768), (64, 2048)]  # in pieces
COLUMNS = PartitionSpec(None, AXIS)
BITS = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jflash.layers.gather import AXIS, gather, pushing
from jflash.devices.mesh import tensor_mesh
from pallas_kernels.gather import push
seen = []
def moved(x, places, axis):
    seen.append([x.dtype.name, x.shape])
    bits = lax.bitcast_convert_type(x, jnp.uint16)  # a CPU's gather would round what is no number
    return lax.bitcast_convert_type(lax.all_gather(bits, axis, axis=1, tiled=True), x.dtype)
push.gather = moved
def both(x):
    with pushing(object()):
        pushed = gather(x, 4)
    return jnp.all(pushed == lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True))[None]
rng, same = np.random.default_rng(0), []
for dtype, shape in (("int32", (3, 2)), ("float32", (2, 5, 75)), ("bfloat16", (7, 300))):
    x = rng.integers(-2**15, 2**15, (*shape[:-1], 4 * shape[-1])).astype(dtype)
    part = PartitionSpec(*[None] * (x.ndim - 1), AXIS)
    over = jax.shard_map(both, mesh=tensor_mesh(4), in_specs=part, out_specs=PartitionSpec(AXIS), check_vma=False)
    same += np.asarray(jax.jit(over)(x)).tolist()
print(json.dumps({"same": same, "seen": seen}))
"""  # noqa: E501


def test_numbers_of_any_dtype_are_moved_as_bits():
    """In whole tiles of columns: 2 int32s, 75 float32s and 300 bfloat16s are filled up."""
    found = result(start(BITS))
    assert found["same"] == [True] * 12
    assert found["seen"] == [
        ["bfloat16", [3, 256]],
        ["bfloat16", [10, 256]],
        ["bfloat16", [7, 512]],
    ]


def compared(places: Places, parts: list[jax.Array]):
    """Numbers that a push and XLA's gather have differently, all shapes in turn, 20 times."""
    references = jax.tree.map(jax.new_ref, places)

    def several(i, wrong):
        for part in parts:
            x, devices = part + i.astype(part.dtype), lax.axis_size(AXIS)
            with pushing(references):
                pushed = gather(x, devices)
            wrong += jnp.sum(pushed != gather(x, devices))
        return wrong

    wrong = lax.fori_loop(0, 20, several, jnp.int32(0))
    return lax.psum(wrong, AXIS), jax.tree.map(jax.freeze, references)


def over(mesh, compute=compared):
    specs = (WHERE, COLUMNS), (PartitionSpec(), WHERE)
    shared = jax.shard_map(
        compute, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )
    return jax.jit(shared, donate_argnums=0)


def compiled(devices: int, compute, shapes) -> str:
    """`compute` of places and of parts of these shapes, for described GPUs."""
    mesh = device_mesh(H200, devices, AXIS)
    parts = [described(mesh, (M, C * devices), jnp.bfloat16, COLUMNS) for M, C in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return over(mesh, compute).lower(described_places(mesh), parts).compile().as_text()


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.long), 4])
def test_pushes_compile_for_described_gpus_and_copy_no_place(devices: int):
    program = compiled(devices, compared, COMPILED)
    assert program.count('custom_call_target="mosaic_gpu') == len(COMPILED)
    assert (
        "copy(%param" not in program and f"= s32[{devices + 1},{CTAS}]{{1,0}} copy(" not in program
    )
    landing = f"= bf16[2,{devices},{push.MOST}]{{2,1,0}} copy("
    few = f"= s32[2,{devices},{lines.MOST}]{{2,1,0}} copy("
    assert landing not in program and few not in program


def in_pieces(part: jax.Array) -> Unsummed:
    third = part.astype(jnp.float32) / 3
    return Unsummed(jnp.stack([third, -7 * third, jnp.sin(third)]), None)


def sums_compared(places: Places, part: jax.Array):
    """As `compared`, of parts in pieces: pushed, and added before XLA gathers them."""
    references = jax.tree.map(jax.new_ref, places)

    def several(i, wrong):
        sums, devices = in_pieces(part + i.astype(part.dtype)), lax.axis_size(AXIS)
        with pushing(references):
            pushed = gather_sum(sums, devices)
        return wrong + jnp.sum(pushed != gather_sum(sums, devices))

    wrong = lax.fori_loop(0, 20, several, jnp.int32(0))
    return lax.psum(wrong, AXIS), jax.tree.map(jax.freeze, references)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_push_adds_pieces_on_its_way(devices: int):
    """Compiled for described GPUs: of few rows by the push itself, of many before it."""

    def pushed(places, parts):
        references, (part,) = jax.tree.map(jax.new_ref, places), parts
        with pushing(references):
            gathered = gather_sum(in_pieces(part), devices)
        return gathered, jax.tree.map(jax.freeze, references)

    for rows, adds in ((16, 0), (64, 0), (512, 1)):
        program = compiled(devices, pushed, [(rows, 2048)])
        assert program.count('custom_call_target="mosaic_gpu') == 1
        assert program.count('custom_call_target="__gpu$xla.gpu.triton') == adds


@pytest.mark.skipif(
    not ON_GPU or jax.local_device_count() < 2, reason="a push needs two GPUs of a host"
)
@pytest.mark.parametrize("first", [0, 2**31 - 77, -77])
def test_pushes_give_what_xla_gathers(first: int):
    """Also where counts go round: they are set to `first`, some gathers before the largest int."""
    devices = jax.local_device_count()
    mesh = tensor_mesh(devices)
    assert mesh is not None

    def filled(x):
        return x + jnp.int32(first) if x.dtype == jnp.int32 else x

    places = jax.tree.map(filled, zeros(mesh))
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(M, C * devices)).astype(jnp.bfloat16) for M, C in SHAPES]
    jax.block_until_ready(places)
    wrong, places = over(mesh)(places, [put(mesh, x, COLUMNS) for x in parts])
    assert int(wrong) == 0
    for M, C in ADDED:
        part = put(mesh, rng.normal(size=(M, C * devices)).astype(jnp.bfloat16), COLUMNS)
        wrong, places = over(mesh, sums_compared)(places, part)
        assert int(wrong) == 0
    turns = ((len(SHAPES) + len(ADDED)) * 20 + first) % 2**32
    assert (np.asarray(places.counts)[devices].astype(np.uint32) == turns).all()


def test_one_device_and_others_than_hopper_are_refused():
    cpu = jax.devices("cpu")[0]
    assert "this is one" in str(refusal("push", Sizes(1), cpu))
    assert "compute capability 9.x" in str(refusal("push", Sizes(2), cpu))
    assert refusal("push", Sizes(2), None) is None and refusal("xla", Sizes(2), cpu) is None
