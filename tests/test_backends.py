"""Which kernels a pair gets on which device, and what is refused by name."""

from types import SimpleNamespace

import jax
import pytest

from jflash.backends import with_backends
from jflash.evals.shapes import model_shape
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.speculative import Models
from tests.pairs import random_pair

HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
OLD = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


def qwen3() -> Models:
    target, drafter = model_shape("qwen3-8b")
    return Models(Target(target), Drafter(drafter), drafter.block_size)


@pytest.mark.parametrize(
    ("device", "dtype", "want"),
    [
        (HOPPER, "bfloat16", ("mosaic_gpu", "tuned", "triton")),
        (HOPPER, "float32", ("triton", "tuned", "triton")),
        (AMPERE, "bfloat16", ("triton", "xla", "triton")),
        (OLD, "bfloat16", ("xla", "xla", "xla")),
        (CPU, "float32", ("xla", "xla", "xla")),
    ],
)
def test_the_best_that_the_device_has(device, dtype, want):
    chosen = with_backends(qwen3(), dtype, device)
    assert (chosen.attention_backend, chosen.matmul_backend, chosen.heads_backend) == want


def test_sizes_that_no_kernel_takes_go_to_xla():
    models = random_pair().models  # heads of 16
    assert with_backends(models, "bfloat16", HOPPER).attention_backend == "xla"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "why"),
    [
        ("mosaic_gpu", CPU, "bfloat16", "compute capability 9"),
        ("mosaic_gpu", AMPERE, "bfloat16", "compute capability 9"),
        ("mosaic_gpu", HOPPER, "float32", "float32"),
        ("triton", OLD, "bfloat16", "compute capability 8"),
        ("flash", HOPPER, "bfloat16", "no backend 'flash'"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_by_name(name, device, dtype, why):
    with pytest.raises(ValueError, match=why):
        with_backends(qwen3(), dtype, device, name)


def test_a_backend_on_request():
    assert with_backends(qwen3(), "bfloat16", HOPPER, "triton").attention_backend == "triton"
    assert with_backends(qwen3(), "float32", jax.devices("cpu")[0], "xla").heads_backend == "xla"
