"""Which attention backend runs where, what it refuses, and what Triton's becomes on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from pallas_kernels import block_attention as package
from pallas_kernels.block_attention import BACKENDS, Sizes, block_attention
from pallas_kernels.choice import best, check
from tests.support.attention_checks import ON_GPU, SHAPES, SMALLEST, inputs

COMPILED_FULLY = True  # what the compiler makes of the kernels is what is looked at
ROOT = Path(__file__).parents[2]


def test_unknown_backend_is_refused_by_name():
    q, k, v = inputs(SHAPES[0])
    sizes = jnp.zeros(1, int), jnp.ones(1, int)
    with pytest.raises(ValueError, match="no backend 'cudnn'"):
        block_attention(q, k, v, *sizes, causal=True, scale=1.0, backend="cudnn")


def device(platform, capability=None):
    return SimpleNamespace(platform=platform, compute_capability=capability)


CPU, SM75, SM80, SM89, SM90, SM100, SM120 = DEVICES = (
    device("cpu"),
    *(device("gpu", capability) for capability in ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0")),
)
QWEN3 = Sizes(width=16, groups=4, head_dim=128, dtype=jnp.bfloat16)


def test_default_backend_suits_the_device():
    chosen = [best(package, [QWEN3], d) for d in DEVICES]
    assert chosen == ["cpu", "xla", "triton", "triton", "canonical", "triton", "triton"]
    narrow, odd = QWEN3._replace(dtype=jnp.float32), QWEN3._replace(head_dim=96)
    assert best(package, [QWEN3], device("gpu", "gfx942")) == "xla"
    assert best(package, [narrow], SM90) == "triton"
    assert best(package, [odd], SM90) == "xla"
    assert best(package, [QWEN3, narrow], SM90) == "triton"  # one that takes all of them
    for d in DEVICES:
        check("attention", package, best(package, [QWEN3], d), [QWEN3], d)
        for backend in ("xla", "reference"):
            check("attention", package, backend, [odd._replace(dtype=jnp.float16)], d)


@pytest.mark.parametrize(
    "backend,sizes,where,message",
    [
        ("mosaic_gpu", QWEN3, CPU, "capability 9.x, and this is a cpu device: use 'cpu'"),
        ("mosaic_gpu", QWEN3, SM80, "capability 9.x, and this is sm80: use 'triton'"),
        ("mosaic_gpu", QWEN3, SM100, "9.x, and this is sm100: use 'triton'"),
        ("triton", QWEN3, CPU, "8.0 or more, and this is a cpu device: use 'cpu'"),
        ("triton", QWEN3, SM75, "this is sm75: use 'xla'"),
        ("mosaic_gpu", QWEN3._replace(dtype=jnp.float32), SM90, "not float32: use 'triton'"),
        ("triton", QWEN3._replace(dtype=jnp.float16), SM89, "not float16: use 'xla'"),
        ("triton", QWEN3._replace(head_dim=96), None, "64, 128, 256, not 96: use 'xla'"),
        ("triton", QWEN3._replace(width=33), None, "1 to 32 tokens, not 33: use 'xla'"),
        ("triton", QWEN3._replace(groups=17), None, "1 to 16 query heads a KV head, not 17"),
        ("canonical", QWEN3._replace(width=2049), None, "1 to 2048 tokens, not 2049: use 'xla'"),
        ("canonical", QWEN3, SM89, "needs an NVIDIA GPU of compute capability 9.x"),
        (
            "cudnn",
            QWEN3,
            CPU,
            "no backend 'cudnn': use one of canonical, mosaic_gpu, triton, cpu, xla",
        ),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused(backend, sizes, where, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check("attention", package, backend, [sizes], where)


def test_bad_options_are_refused():
    q, k, v = inputs(SMALLEST)
    at = (jnp.zeros(2, int), jnp.ones(2, int))
    how = {"causal": True, "scale": 1.0}
    with pytest.raises(ValueError, match="window is 0"):
        block_attention(q, k, v, *at, **how, window=0, backend="xla")
    with pytest.raises(ValueError, match="softcap is 0"):
        block_attention(q, k, v, *at, **how, softcap=0.0, backend="xla")
    with pytest.raises(ValueError, match="one dtype, not q float32, k bfloat16"):
        block_attention(q, k.astype(jnp.bfloat16), v, *at, **how, backend="triton")
    assert set(BACKENDS) == {"mosaic_gpu", "triton", "cpu", "xla", "canonical", "reference"}


@pytest.mark.skipif(ON_GPU, reason="needs the CPU to itself")
def test_nothing_is_interpreted_unasked():
    q, k, v = inputs(SMALLEST)
    at = (jnp.zeros(2, int), jnp.ones(2, int))
    with pytest.raises(ValueError, match="interpret"):
        block_attention(q, k, v, *at, causal=True, scale=1.0, backend="triton")


COMPILE = """
import json, jax, jax.numpy as jnp
from tests.support.described_gpu import A100, H200, L4, compile_for
from pallas_kernels.block_attention import block_attention
from pallas_kernels.shapes import BLOCK_ATTENTION

B200 = H200._replace(name="NVIDIA B200", capability=(10, 0))
spills_fail = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
for name, dtype, parts in [
    ("qwen3-b1-2k", jnp.bfloat16, (H200, A100, L4, B200)),
    ("qwen3-b32-2k", jnp.bfloat16, (A100, L4)),
    ("gemma2-b1-8k-window", jnp.float32, (H200, L4)),
    ("corner-widest", jnp.bfloat16, (L4,)),
]:
    s = BLOCK_ATTENTION[name]
    cache = jax.ShapeDtypeStruct((s.B, s.S, s.K, s.H), dtype)
    number = jax.ShapeDtypeStruct((s.B,), jnp.int32)
    args = [jax.ShapeDtypeStruct((s.B, s.T, s.N, s.H), dtype), cache, cache, number, number]
    args += [jax.ShapeDtypeStruct((s.N,), jnp.float32)] * s.sinks
    attend = lambda q, k, v, lengths, widths, sinks=None: block_attention(
        q, k, v, lengths, widths, causal=s.causal, scale=0.1, window=s.window, sinks=sinks,
        softcap=s.softcap, backend="triton",
    )
    for part in parts:
        text = compile_for(part, attend, *args, options=spills_fail).as_text()
        kernels, fusions = text.count(" custom-call("), text.count(" fusion(")
        print(json.dumps([name, part.name, kernels, fusions]))
"""


@pytest.mark.skipif(ON_GPU, reason="there the kernels are compiled for the GPU that it has")
def test_triton_compiles_for_gpus_without_spills_or_a_third_kernel():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(compiled) == 9
    for name, part, kernels, fusions in compiled:
        # Where one chunk is enough the result needs no combining.
        assert (kernels, fusions) == (1 if name == "qwen3-b32-2k" else 2, 0), (name, part)
