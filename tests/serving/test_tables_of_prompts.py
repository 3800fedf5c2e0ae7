"""A prompt's table of pages as the kernels get it: an array of its own.

It comes in the one array that the host uploads, behind some other numbers. XLA may hand a kernel a
slice where it lies, and Mosaic's kernels refuse one that does not begin at a multiple of 256 bytes,
on a GPU and when it runs.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jflash.bench.shapes import model_shape
from jflash.compiled.shape import Shape
from jflash.devices.backends import with_backends
from jflash.devices.structs import param_structs
from jflash.proof.program.gates import no_slice_in_place
from jflash.proof.program.hlo import parse
from jflash.proof.program.step_program import cut, models_of
from jflash.serving.calls import prefill, slots
from jflash.serving.calls.layout import Layout, settled
from jflash.serving.calls.packing import CONTROL, row_size
from jflash.serving.calls.slots import empty_state, table_columns
from pallas_kernels.block_attention import PAGE
from tests.support.attention_checks import ON_GPU
from tests.support.described_gpu import H200, compile_for, device_mesh

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU is described to a process of CPUs alone")
COLUMNS = 64  # 256 bytes: XLA leaves slices of other sizes in arrays of their own


def compiled() -> str:
    """The pass over a last chunk of 512 tokens, in a context of 4,096."""
    models = models_of(cut(model_shape("smollm2-135m"), 1, 1))
    models = with_backends(models, "bfloat16", device_mesh(H200).devices.flat[0])
    models, shape = replace(models, sampled=False), Shape.of(1, COLUMNS * PAGE, chunk=512)
    layout = settled(models, Layout(shape, COLUMNS, 2, ("greedy",)))
    state = jax.eval_shape(lambda: empty_state(models, layout))
    assert table_columns(models, layout) == COLUMNS
    given = jax.ShapeDtypeStruct((1, CONTROL + COLUMNS + row_size(shape)), jnp.int32)
    whole = functools.partial(prefill.whole, shape, models, shape.chunk)
    program = compile_for(H200, whole, param_structs(models), state, given, donate=(1,))
    return program.as_text() or ""


def test_no_kernel_reads_a_table_where_the_host_put_it():
    text = compiled()
    kernels = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert any(f"s32[1,{COLUMNS}]" in line for line in kernels)
    assert no_slice_in_place(parse(text)).passed


@pytest.mark.long
def test_a_table_that_a_kernel_reads_where_it_lies_is_caught(monkeypatch):
    """The fault: a slice of what the host uploads, as it is."""
    monkeypatch.setattr(slots, "own_array", lambda table: table)
    [offence] = set(no_slice_in_place(parse(compiled())).offences)
    assert "a slice where it lies" in offence
