"""Which kernels a pair gets on which device, and what is refused by name."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jflash.bench.shapes import SHAPES, model_shape
from jflash.devices.backends import named, with_backends
from jflash.devices.mesh import over
from jflash.layers.gather import AXIS
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models
from jflash.records.kernels import BACKENDS, Kernels
from jflash.records.parts import OVER
from pallas_kernels import grouped_matmul
from pallas_kernels.choice import check
from tests.support.described_gpu import H200, device_mesh
from tests.support.pairs import random_pair

HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
BLACKWELL = SimpleNamespace(platform="gpu", compute_capability="10.0", device_kind="NVIDIA B200")
OLD = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
PUBLISHED = [name for name in SHAPES if not name.startswith("tiny")]


def of_shape(name: str, head_dim: int | None = None) -> Models:
    target, drafter = (
        config.attending(*[{"head_dim": head_dim} if head_dim else {}] * config.num_layers)
        for config in model_shape(name)
    )
    return Models(Target(target), Drafter(drafter), drafter.block_size)


def qwen3() -> Models:
    return of_shape("qwen3-8b")


@pytest.mark.parametrize(
    ("device", "dtype", "want"),
    [
        (HOPPER, "bfloat16", ("canonical", "canonical", "triton", "xla", "canonical")),
        (HOPPER, "float32", ("triton", "xla", "triton")),
        (AMPERE, "bfloat16", ("triton", "xla", "triton")),
        (BLACKWELL, "bfloat16", ("triton", "xla", "triton")),
        (OLD, "bfloat16", ("xla", "xla", "xla")),
        (CPU, "float32", ("cpu", "cpu", "cpu", "xla", "cpu")),
    ],
)
def test_the_best_that_the_device_has(device, dtype, want):
    chosen = with_backends(qwen3(), dtype, device)
    assert chosen.kernels == Kernels(*want)  # a pair without experts needs no kernel for them


def test_sizes_that_no_kernel_takes_go_to_xla():
    models = random_pair().models  # heads of 16
    assert with_backends(models, "bfloat16", HOPPER).kernels.attention == "xla"


def test_heads_of_512_in_some_layers_attend_by_the_kernel_of_one_arithmetic():
    """As in Gemma 4; the law was checked with them on an H200."""
    models = qwen3()
    layers = [{"head_dim": 512}, *[{}] * (models.target.config.num_layers - 1)]
    models = replace(models, target=Target(models.target.config.attending(*layers)))
    chosen = with_backends(models, "bfloat16", HOPPER)
    assert chosen.kernels.attention == "canonical" and chosen.one_arithmetic
    with pytest.raises(ValueError, match="not 512"):
        with_backends(models, "bfloat16", HOPPER, **{ATTENTION: "triton"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_one_arithmetic(name):
    """On one Hopper, so that the law holds for their targets."""
    assert with_backends(of_shape(name), "bfloat16", HOPPER).one_arithmetic


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "smollm2-135m"])
def test_devices_that_share_published_sizes_have_one_arithmetic(name, devices):
    models, mesh = of_shape(name), device_mesh(H200, devices, AXIS)
    for how in OVER if models.target.config.experts else OVER[:1]:
        assert with_backends(over(models, mesh, how), "bfloat16", HOPPER).one_arithmetic


def test_devices_whose_bits_would_not_be_those_of_one_are_refused():
    """A part of GLM-4.5-Air's first MLP has 1,368 columns on eight devices."""
    models = over(of_shape("glm-4.5-air"), device_mesh(H200, 8, AXIS), "columns")
    with pytest.raises(ValueError, match="8 devices would give other bits than one: matmul ba"):
        with_backends(models, "bfloat16", HOPPER)
    named = with_backends(models, "bfloat16", HOPPER, matmul_backend="xla", experts_backend="xla")
    assert not named.one_arithmetic


ATTENTION, MATMUL, HEADS, EXPERTS, NORM, DELTA, GATHER = BACKENDS


@pytest.mark.parametrize(
    ("field", "name", "device", "dtype", "why"),
    [
        (ATTENTION, "mosaic_gpu", CPU, "bfloat16", "9.x, and this is a cpu device: use 'cpu'"),
        (ATTENTION, "mosaic_gpu", AMPERE, "bfloat16", "9.x, and this is sm80: use 'triton'"),
        (ATTENTION, "mosaic_gpu", HOPPER, "float32", "not float32: use 'triton'"),
        (ATTENTION, "triton", OLD, "bfloat16", "8.0 or more, and this is sm75: use 'xla'"),
        (ATTENTION, "flash", HOPPER, "bfloat16", "no backend 'flash'"),
        (MATMUL, "canonical", CPU, "bfloat16", "9.x, and this is a cpu device: use 'cpu'"),
        (MATMUL, "canonical", AMPERE, "bfloat16", "9.x, and this is sm80: use 'xla'"),
        (MATMUL, "canonical", HOPPER, "float32", "only bfloat16, not float32: use 'xla'"),
        (MATMUL, "triton", HOPPER, "bfloat16", "matmul has no backend 'triton': use one of"),
        (HEADS, "triton", CPU, "float32", "heads backend 'triton' needs .* cpu device: use 'cpu'"),
        (HEADS, "triton", OLD, "bfloat16", "8.0 or more, and this is sm75: use 'xla'"),
        (ATTENTION, "cpu", HOPPER, "bfloat16", "is for CPUs, and this is sm90: use 'canonical'"),
        (MATMUL, "cpu", AMPERE, "bfloat16", "is for CPUs, and this is sm80: use 'xla'"),
        (HEADS, "cpu", HOPPER, "bfloat16", "is for CPUs, and this is sm90: use 'triton'"),
        (NORM, "cpu", HOPPER, "bfloat16", "is for CPUs, and this is sm90: use 'canonical'"),
        (NORM, "canonical", HOPPER, "float32", "only bfloat16, not float32: use 'xla'"),
        (NORM, "triton", HOPPER, "bfloat16", "norm has no backend 'triton': use one of"),
        (HEADS, "mosaic_gpu", HOPPER, "bfloat16", "heads has no backend 'mosaic_gpu': use one of"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_by_name(field, name, device, dtype, why):
    with pytest.raises(ValueError, match=why):
        with_backends(qwen3(), dtype, device, **{field: name})


def test_sizes_and_layers_that_a_backend_lacks_are_refused():
    with pytest.raises(ValueError, match="powers of two, not 96: use 'xla'"):
        with_backends(of_shape("qwen3-8b", 96), "bfloat16", HOPPER, heads_backend="triton")
    unknown = (
        "experts has no backend 'mosaic_gpu': use one of canonical, cpu, xla, triton, reference"
    )
    with pytest.raises(ValueError, match=unknown):
        with_backends(of_shape("tiny-moe"), "bfloat16", HOPPER, experts_backend="mosaic_gpu")
    narrow = grouped_matmul.Sizes(64, 40, "bfloat16")
    with pytest.raises(ValueError, match="columns in 16s, not 64 and 40: use 'xla'"):
        check("experts", grouped_matmul, "triton", [narrow], HOPPER)


def test_experts_have_a_backend_of_their_own():
    moe = of_shape("tiny-moe")
    assert with_backends(moe, "bfloat16", HOPPER).kernels.experts == "canonical"
    assert with_backends(moe, "bfloat16", AMPERE).kernels.experts == "xla"
    chosen = with_backends(moe, "bfloat16", HOPPER, experts_backend="xla").kernels
    assert (chosen.matmul, chosen.experts) == ("xla", "xla")  # its router has 8 columns


def test_a_hybrid_has_an_operation_more():
    with pytest.raises(ValueError, match=r"delta backend 'cpu' is for CPUs.* use 'mosaic_gpu'"):
        with_backends(of_shape("tiny-hybrid"), "bfloat16", HOPPER, **{DELTA: "cpu"})
    hybrid = with_backends(of_shape("tiny-hybrid"), "float32", CPU)
    assert hybrid.one_arithmetic and hybrid.kernels.delta == "cpu"
    xla = hybrid.kernels._replace(delta="xla")
    assert not replace(hybrid, kernels=xla).one_arithmetic and xla.chunk == xla


@pytest.mark.parametrize(("device", "dtype"), [(CPU, "float32"), (HOPPER, "bfloat16")])
def test_what_promises_one_arithmetic(device, dtype):
    """All operations that the pair has: with experts or without."""
    hybrid_and_windowed = ("qwen3.5-27b", "gpt-oss-20b", "gemma-3-12b")
    for name in (*hybrid_and_windowed, "qwen3-8b", "qwen3-coder-30b"):
        models = with_backends(of_shape(name), dtype, device)
        assert models.one_arithmetic
        assert models.kernels.chunk == models.kernels
        for op in ("attention", "matmul", "heads", "norm"):
            kernels = models.kernels._replace(**{op: "xla"})
            assert not replace(models, kernels=kernels).one_arithmetic
            assert kernels.chunk == kernels
    assert not replace(models, kernels=models.kernels._replace(experts="xla")).one_arithmetic


def test_what_promises_nothing():
    """A chunk has more rows than the kernels take."""
    older = Kernels("mosaic_gpu", "xla", "xla", "triton", "xla")
    assert not older.one_arithmetic
    assert older.chunk == Kernels(experts="triton")
    for device, dtype in ((HOPPER, "float32"), (AMPERE, "bfloat16")):
        assert not with_backends(qwen3(), dtype, device).one_arithmetic


def test_a_weight_that_the_canonical_products_lack():
    """One of them, and the pair's products all go to the next best; a head may have any columns."""
    models = qwen3()
    config = models.target.config
    tuned = Target(replace(config, vocab_size=151_937))  # with a token of one's own
    assert with_backends(replace(models, target=tuned), "bfloat16", HOPPER).one_arithmetic
    layers = [replace(x, mlp=replace(x.mlp, intermediate_size=12_296)) for x in config.layers]
    odd = Target(replace(config, layers=tuple(layers)))
    chosen = with_backends(replace(models, target=odd), "bfloat16", HOPPER).kernels
    assert (chosen.matmul, chosen.attention) == ("xla", "canonical")
    with pytest.raises(ValueError, match="columns in 16s, not 4096 and 12296: use 'xla'"):
        with_backends(replace(models, target=odd), "bfloat16", HOPPER, matmul_backend="canonical")


def test_a_backend_on_request():
    own = with_backends(qwen3(), "bfloat16", HOPPER)
    asked = {ATTENTION: "triton", MATMUL: "xla", HEADS: "xla", EXPERTS: "reference"}
    asked |= {NORM: "reference", DELTA: "reference", GATHER: "xla"}
    chosen = with_backends(qwen3(), "bfloat16", HOPPER, **asked)
    assert chosen == replace(own, kernels=Kernels(*asked.values()))
    assert named(chosen.kernels) == asked
    assert with_backends(qwen3(), "bfloat16", HOPPER, **dict.fromkeys(BACKENDS, "auto")) == own


def test_devices_that_share_a_pair_push_where_they_can():
    """And only there: a push that is asked of one device, or of a CPU, is refused."""
    shared = over(qwen3(), device_mesh(H200, 2, AXIS))
    for device, dtype, best in ((HOPPER, "bfloat16", "push"), (CPU, "float32", "xla")):
        assert with_backends(shared, dtype, device).kernels.gather == best
    with pytest.raises(ValueError, match=r"gather backend 'push' needs an NVIDIA GPU .* use 'xla'"):
        with_backends(shared, "float32", CPU, **{GATHER: "push"})
