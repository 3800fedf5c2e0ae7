"""A push of rows that are added to a residual and normed: its bits are a push's and a norm's.

A CPU has no push, so there the kernel is compiled for GPUs that are described, and others stand in
for it where a layer hands its sums on. Where two GPUs are at hand the kernel runs, with counts that
go round.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jflash.devices.mesh import tensor_mesh
from jflash.layers import gather, sums
from jflash.layers.gather import AXIS
from pallas_kernels.gather import Places, gather_normed, gather_sum, normed, push
from pallas_kernels.matmul import Unsummed, summed, unadded
from pallas_kernels.rms_norm import after, reference
from tests.support.attention_checks import ON_GPU
from tests.support.described_gpu import H200, device_mesh
from tests.support.places import WHERE, described, described_places, put, zeros

EPS = 1e-6
ALL = PartitionSpec()
# Rows, columns of a row, pieces (0: rounded already), the scale's dtype.
CASES = [(384, 4096, 3, "bfloat16"), (500, 2048, 2, "float32"), (512, 4096, 0, "bfloat16")]
CASES += [(512, 5120, 2, "float32"), (1000, 4096, 2, "bfloat16")]


def columns(pieces: int) -> PartitionSpec:
    return PartitionSpec(*[None] * (1 + (pieces > 0)), AXIS)


def over(mesh, compute, pieces: int):
    specs = (WHERE, columns(pieces), ALL, ALL), (ALL, WHERE)
    shared = jax.shard_map(
        compute, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )
    return jax.jit(shared, donate_argnums=0)


def once(places: Places, own, residual, scale):
    references = jax.tree.map(jax.new_ref, places)
    both = gather_normed(own, residual, scale, EPS, AXIS, references)
    return both, jax.tree.map(jax.freeze, references)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.long), 4])
def test_it_compiles_for_described_gpus_as_one_kernel_that_copies_no_place(devices: int):
    mesh = device_mesh(H200, devices, AXIS)
    for M, D, pieces, dtype in CASES:
        lead = (pieces,) if pieces else ()
        own = jnp.float32 if pieces else jnp.bfloat16
        given = (
            described(mesh, (*lead, M, D), own, columns(pieces)),
            described(mesh, (M, D), jnp.bfloat16, ALL),
            described(mesh, (D,), dtype, ALL),
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = over(mesh, once, pieces).lower(described_places(mesh), *given)
        program = lowered.compile().as_text()
        assert program.count('custom_call_target="mosaic_gpu') == 1
        assert f"= bf16[2,{devices},{push.MOST}]{{2,1,0}} copy(" not in program


def test_rows_that_it_takes():
    """In the longest parts of which a row has no more than lie in registers."""
    assert normed.length(512, 2048, 2) == 1024
    assert normed.length(384, 2560, 2) == 512 and normed.length(1024, 1280, 2) == 256
    assert normed.length(383, 2048, 2) is None and normed.length(1025, 2048, 2) is None
    assert normed.length(512, 1024, 4) == 1024 and normed.length(512, 1280, 4) == 256
    assert normed.length(512, 512, 8) is None
    assert normed.length(512, 2000, 2) is None  # no whole parts
    assert normed.length(512, 2816, 2) is None  # 22 of them
    assert normed.length(1024, 8192, 2) is None  # more than a landing place holds


class Pushed:
    """What stands in for pushes where no device is: one of two has every other column."""

    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("gather_sum", "gather_normed"):
            monkeypatch.setattr(gather.gather_op, name, getattr(self, name))
        monkeypatch.setattr(sums, "after", self.after)
        monkeypatch.setattr(sums, "sum_of", functools.partial(summed, interpret=True))

    def gather_sum(self, pieces, axis, places):
        self.calls.append("sum")
        rows = functools.reduce(jnp.add, pieces).astype(jnp.bfloat16)
        return jnp.concatenate([rows, -rows], axis=-1)

    def gather_normed(self, own, residual, scale, eps, axis, places):
        whole = unadded(self.gather_sum(own, axis, places), residual, backend="canonical")
        self.calls[-1] = "norm"
        return self.after(whole, scale, eps, backend="canonical")

    def after(self, given: Unsummed, scale, eps, *, backend: str):
        x = summed(given, interpret=True)
        return x, reference.rms_norm(x, scale, eps)


def test_layers_hand_on_what_a_norm_gathers(monkeypatch):
    """Where the norm is by another backend, or none follows, the rows are gathered by themselves;
    so are rows that no kernel takes, and what is pushed nowhere."""
    stand_in = Pushed(monkeypatch)
    rng = np.random.default_rng(0)
    own = Unsummed(jnp.asarray(rng.normal(size=(3, 2, 200, 512)), jnp.float32), None)
    residual = jnp.asarray(rng.normal(size=(2, 200, 1024)), jnp.bfloat16)
    scale = jnp.asarray(rng.normal(size=1024), jnp.bfloat16)
    whole = unadded(stand_in.gather_sum(own.pieces, AXIS, None), residual, backend="canonical")
    wanted = stand_in.after(whole, scale, EPS, backend="canonical")
    nowhere: Any = None
    with gather.pushing(Places(nowhere, nowhere, nowhere, nowhere)):
        left = sums.left(own, residual, 2, "canonical")
        few = sums.left(Unsummed(own.pieces[..., :500], None), residual[..., :1000], 2, "canonical")
        without = sums.left(own, None, 2, "canonical")
        assert isinstance(left, sums.Ungathered)
        assert isinstance(few, Unsummed) and isinstance(without, Unsummed)
        stand_in.calls.clear()
        found = [sums.normed(left, scale, EPS, name) for name in ("canonical", "xla")]
        alone = sums.summed(left)
        assert stand_in.calls == ["norm", "sum", "sum"]
    for x, norm in found:
        np.testing.assert_array_equal(np.asarray(x), np.asarray(wanted[0]))
        np.testing.assert_array_equal(np.asarray(norm), np.asarray(wanted[1]))
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(wanted[0]))
    assert isinstance(sums.left(own, residual, 2, "canonical"), Unsummed)


def compared(places: Places, own, residual, scale):
    """Numbers that one kernel and a push before a norm have differently, 20 times, in turn."""
    references = jax.tree.map(jax.new_ref, places)

    def several(i, wrong):
        part = own + (0.37 * i).astype(own.dtype)
        pieces = part[None].astype(jnp.float32) if part.ndim == 2 else part
        one = gather_normed(part, residual, scale, EPS, AXIS, references)
        whole = unadded(gather_sum(pieces, AXIS, references), residual, backend="canonical")
        apart = after(whole, scale, EPS, backend="canonical")
        return wrong + sum(jnp.sum(x != y) for x, y in zip(one, apart, strict=True))

    wrong = lax.fori_loop(0, 20, several, jnp.int32(0))
    return lax.psum(wrong, AXIS), jax.tree.map(jax.freeze, references)


@pytest.mark.skipif(
    not ON_GPU or jax.local_device_count() < 2, reason="a push needs two GPUs of a host"
)
@pytest.mark.parametrize("first", [0, -77])
def test_it_gives_the_bits_of_a_push_and_a_norm(first: int):
    """Also where counts go round: they are set to `first`, some gathers before 0."""
    mesh = tensor_mesh(max(n for n in normed.DEVICES if n <= jax.local_device_count()))
    assert mesh is not None
    places = jax.tree.map(
        lambda x: x + jnp.int32(first) if x.dtype == jnp.int32 else x, zeros(mesh)
    )
    rng = np.random.default_rng(0)
    for M, D, pieces, dtype in CASES:
        lead, own = ((pieces,), jnp.float32) if pieces else ((), jnp.bfloat16)
        given = (
            put(mesh, rng.normal(size=(*lead, M, D)).astype(own), columns(pieces)),
            put(mesh, rng.normal(size=(M, D)).astype(jnp.bfloat16), ALL),
            put(mesh, rng.normal(size=D).astype(dtype), ALL),
        )
        wrong, places = over(mesh, compared, pieces)(places, *given)
        assert int(wrong) == 0, (M, D, pieces)
