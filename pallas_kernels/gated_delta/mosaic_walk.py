"""The gated delta rule over a prompt's rows in Pallas-Mosaic: sooner, with the bits of `triton`.

A CTA has a sequence, a value head and COLUMNS of its columns, and a warp a quarter of these. Rows
come through shared memory before they are needed. A Triton program reads each number of a key by an
instruction of its own, and waits for it: 512 rows of Qwen3.5-35B-A3B's heads took 264 µs, and reads
further ahead and outputs a row later gave 8 % (one H200, 2026-11-29).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gated_delta.grid import Memory, Rows, Span
from pallas_kernels.gated_delta.mosaic_cta import Call, Walk
from pallas_kernels.gated_delta.mosaic_rule import COLUMNS, Lane
from pallas_kernels.gated_delta.mosaic_stages import STAGES, Sizes
from pallas_kernels.gated_delta.mosaic_values import Int, in_memory, shared

SPLAT = plgpu.Layout.WG_SPLAT


def gated_delta(
    q: Float[Array, "B T Hk dk"], rows: Rows, memory: Memory, span: Span
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "S Hv dk dv"]]:
    """As `triton.gated_delta`."""
    (B, T, Hk, dk), (Hv, _, dv) = q.shape, memory.state.shape[1:]
    sizes = Sizes(T, Hk, Hv, dk, dv)
    launch = plgpu.kernel(
        functools.partial(_kernel, sizes=sizes),
        out_type=jax.ShapeDtypeStruct((B, T, Hv, dv), jnp.float32),
        scratch_types={"staged": plgpu.SMEM((STAGES, sizes.stage), jnp.float32)},
        grid=(dv // COLUMNS, Hv, B),
        grid_names=("columns", "head", "sequence"),
        kernel_name="gated_delta",
    )
    state = jax.new_ref(memory.state)
    of_slots = memory.base, *span[:3], span.places
    out = launch(*of_slots, q, *rows, *memory.rows, state)
    return out, jax.freeze(state)


def _kernel(base_ref, start_ref, real_ref, kept_ref, slots_ref, *refs, sizes: Sizes, staged):
    h, b = lax.axis_index("head"), lax.axis_index("sequence")
    slot = slots_ref[b]
    base = base_ref[slot]
    ahead, real, kept = start_ref[b] - base, real_ref[b], kept_ref[b]
    numbers = [lax.axis_index("columns"), h, b, slot, base, ahead, real, kept]
    types = [SPLAT] * len(numbers), [plgpu.RefType()] * len(refs), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=types)
    def walk(context, numbers, refs, staged):
        del context
        call = Call(*(Int(x.registers.flat[0]) for x in numbers))
        arrays = [in_memory(ref) for ref in refs]
        Walk(sizes, call, Lane.of(call.block), arrays, shared(staged)).run()

    walk([jnp.int32(x) for x in numbers], list(refs), staged)  # pyright: ignore[reportCallIssue]
