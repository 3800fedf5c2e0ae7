"""An MLP that is one kernel between devices: what it cuts, that it compiles, and on GPUs its bits.

A CPU has no pushes, so what is made and what is waited for is followed tile by tile, with a fault
planted; for GPUs that are described the kernel is compiled, and where two are at hand it runs.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jflash.devices.mesh import tensor_mesh
from jflash.layers.gather import AXIS, gated_product, gather, pushing
from pallas_kernels.gather import Places
from pallas_kernels.gather.blocks import ALL, BLOCK, MOST, WAVES, Cut
from pallas_kernels.matmul import gate_up, matmul, summed
from pallas_kernels.matmul.pushed.plan import Plans, held, plans, turns
from pallas_kernels.matmul.tuning import SHARED_MEMORY, SMS
from tests.support.attention_checks import ON_GPU
from tests.support.described_gpu import H200, device_mesh
from tests.support.places import OWN, WHERE, described, described_places, put, zeros

D, F = 4096, 12288  # of Qwen3-8B's MLP
ROWS = {2: [320, 384, 448, 512, 640, 768, 1024], 4: [640, 768, 1024]}  # by devices
EACH = [(devices, rows) for devices in ROWS for rows in ROWS[devices]]


def of_rows(rows: int, devices: int, cores: int = SMS) -> Plans:
    found = plans(rows, (D, 2 * F // devices), (F, D // devices), 2, cores)
    assert found is not None
    return found


def made(both: Plans, cut: Cut) -> Counter:
    """How many tiles of each wave's columns the CTAs make, by the numbers that they are given."""
    plan, count = both.gate_up, Counter()
    for cta in range(plan.row_groups * plan.clusters):
        first = cta // plan.row_groups
        for i in range(-(-(plan.columns - first) // plan.clusters)):
            column = (first + i * plan.clusters) * plan.half_n
            assert min(i, WAVES - 1) == min(column // cut.width, WAVES - 1)
            count[min(i, WAVES - 1)] += 1
    return count


@pytest.mark.parametrize(("devices", "rows"), EACH)
def test_every_tile_is_counted_in_the_wave_that_is_waited_for(devices: int, rows: int):
    both = of_rows(rows, devices)
    assert list(made(both, both.cut).elements()) and both.ctas <= SMS
    assert dict(made(both, both.cut)) == dict(enumerate(both.cut.counted))
    assert sum(both.cut.waves) == rows // 64 * both.gate_up.columns <= ALL
    assert both.cut.columns == F // devices and rows % both.gate_up.tuning.block_m == 0
    for plan in both:
        assert plan.tuning.stages >= 4
    assert held(both.gate_up) + both.gate_up.tuning.ring_bytes <= SHARED_MEMORY
    taken = held(both.gate_up) + held(both.down) + both.down.tuning.ring_bytes
    assert taken <= SHARED_MEMORY
    if turns(both.gate_up) > 1:
        shifted = both.cut._replace(width=both.cut.width + both.gate_up.half_n)
        with pytest.raises(AssertionError):  # a wave that is one tile too wide
            made(both, shifted)


def test_tiles_are_wide_and_waves_as_full_as_their_number_allows():
    """Columns of a tile, CTAs and waves of gate and up: no more CTAs than the waves need."""
    found = {}
    for rows in (320, 384, 448, 512, 1024):
        plan = of_rows(rows, 2).gate_up
        found[rows] = plan.tuning.block_n, plan.row_groups * plan.clusters, turns(plan)
    assert found == {
        320: (256, 120, 2),
        384: (192, 132, 3),
        448: (256, 112, 3),
        512: (256, 128, 3),
        1024: (256, 128, 6),
    }


@pytest.mark.parametrize(
    ("rows", "gate", "down"),
    [
        (256, (D, F), (F, D // 2)),  # few rows have tiles of their own
        (500, (D, F), (F, D // 2)),  # rows that are no whole tiles
        (2048, (D, F), (F, D // 2)),  # more than a landing place holds
        (512, (D, 2 * 80), (160, D // 2)),  # no whole blocks of columns
        (512, (D, F), (F, D // 2 + 8)),  # no tile
        (512, (D, F // 2), (F, D // 4)),  # of four: a CTA would make too few columns
    ],
)
def test_other_sizes_are_not_for_it(rows: int, gate: tuple[int, int], down: tuple[int, int]):
    assert plans(rows, gate, down, 2, SMS) is None


@pytest.mark.parametrize("cores", [78, 114, 132])
def test_no_more_ctas_than_run_at_once(cores: int):
    """Each may wait for all others."""
    assert all(of_rows(rows, 2, cores).ctas <= cores for rows in ROWS[2])
    assert plans(512, (D, F), (F, D // 2), 2, 0) is None


def test_more_waves_than_are_counted_are_counted_with_the_last():
    cut = Cut(rows=64, columns=64 * BLOCK, width=BLOCK, waves=(3,) * (WAVES + 2))
    assert cut.counted == [3] * (WAVES - 1) + [9]
    assert [int(cut.wave(column)) for column in (0, BLOCK, 40 * BLOCK)] == [0, 1, WAVES - 1]


def both_ways(places: Places, x, weights, firsts, times: int):
    """Numbers that one kernel and two with a gather have differently, layer after layer."""
    references, devices = jax.tree.map(jax.new_ref, places), lax.axis_size(AXIS)

    def layer(carry, w):
        (x, wrong), (both, down) = carry, w
        with pushing(references, SMS):
            own = gated_product(x, both, firsts, down, D)
            inner = gather(gate_up(x, both, firsts, backend="canonical"), devices)
        assert own is not None
        own, other = summed(own), matmul(inner, down, backend="canonical", columns=D)
        x = gather(own, devices)
        return (jnp.clip(4 * x, -3, 3), wrong + jnp.sum(own != other)), None

    def several(_, carry):
        return lax.scan(layer, carry, weights)[0]

    x, wrong = lax.fori_loop(0, times, several, (x, jnp.int32(0)))
    spread = jnp.mean(jnp.abs(x.astype(jnp.float32)))
    places = jax.tree.map(jax.freeze, references)
    return lax.psum(wrong, AXIS), lax.pmean(spread, AXIS), places


def over(mesh, devices: int, times: int):
    none, parts = PartitionSpec(), PartitionSpec(None, None, AXIS)
    return jax.jit(
        jax.shard_map(
            functools.partial(both_ways, firsts=(0, F // devices), times=times),
            mesh=mesh, in_specs=(WHERE, none, (parts, parts)), out_specs=(none, none, WHERE),
            check_vma=False,
        ),
        donate_argnums=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "rows"),
    [*(pytest.param(2, rows, marks=pytest.mark.long) for rows in (512, 320)), (4, 640)],
)
def test_it_compiles_for_described_gpus_and_copies_no_place(devices: int, rows: int):
    mesh = device_mesh(H200, devices, AXIS)

    third, none = PartitionSpec(None, None, AXIS), PartitionSpec()
    weights = tuple(
        described(mesh, shape, jnp.bfloat16, third) for shape in ((2, D, 2 * F), (2, F, D))
    )
    x, places = described(mesh, (rows, D), jnp.bfloat16, none), described_places(mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = over(mesh, devices, 3).lower(places, x, weights).compile().as_text()
    assert program.count("mlp_pushed") > 0
    size = f"2,{MOST // BLOCK},{BLOCK}"
    assert f"= bf16[{size}]" in program and f"= bf16[{size}]{{2,1,0}} copy(" not in program


@pytest.mark.skipif(
    not ON_GPU or jax.local_device_count() < 2, reason="a push needs two GPUs of a host"
)
@pytest.mark.parametrize("first", [0, 2**31 - 5])
@pytest.mark.parametrize("rows", ROWS[4] if jax.local_device_count() == 4 else ROWS[2])
def test_it_gives_the_bits_of_two_products_and_a_gather(rows: int, first: int):
    """Also where turns and counts go round."""
    devices = jax.local_device_count()
    mesh = tensor_mesh(devices)
    assert mesh is not None

    def full(x, number):
        return put(mesh, np.full(x.shape, number % 2**32, np.uint32).view(np.int32), OWN)

    places = zeros(mesh)
    turn, sent = places.blocks.turn, places.blocks.sent
    numbers = {"turn": full(turn, first), "sent": full(sent, first * ALL)}
    places = places._replace(blocks=places.blocks._replace(**numbers))
    third = NamedSharding(mesh, PartitionSpec(None, None, AXIS))

    @functools.partial(jax.jit, out_shardings=(third, third))
    def drawn(key):
        keys, shapes = jax.random.split(key), ((3, D, 2 * F), (3, F, D))
        return tuple(
            jax.random.normal(key, shape, jnp.bfloat16) / 50
            for key, shape in zip(keys, shapes, strict=True)
        )

    weights = drawn(jax.random.key(rows))
    x = np.random.default_rng(rows).normal(size=(rows, D)).astype(jnp.bfloat16)
    x = put(mesh, x, PartitionSpec())
    jax.block_until_ready((places, weights))
    wrong, spread, places = over(mesh, devices, 5)(places, x, weights)
    assert int(wrong) == 0 and float(spread) > 1
    assert (np.asarray(places.blocks.turn).astype(np.uint32) == (first + 15) % 2**32).all()
