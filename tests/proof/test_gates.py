"""The step as an H200 gets it, compiled here: what the gates ask of it, and what each one refuses.

Qwen3-8B's widths with two target layers and a two-layer drafter. Every gate is also shown a
program that breaks it.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash.bench.shapes import model_shape, quantised
from jflash.compiled.programs import lower_run
from jflash.compiled.shape import Shape
from jflash.devices.backends import with_backends
from jflash.devices.kept import in_fragments
from jflash.devices.mesh import EVERYWHERE, for_batch, over, param_specs, spread
from jflash.devices.structs import param_structs
from jflash.layers.gather import AXIS
from jflash.memory import memory_budget
from jflash.models.decoder import Target
from jflash.pair import Models
from jflash.proof.devices import added_over_devices
from jflash.proof.program.compiled import inspect
from jflash.proof.program.gates import (
    Program,
    bounded_temporaries,
    check,
    cublas_workspace,
    no_cache_copy,
    no_spills,
    no_weight_copy,
    one_command_buffer,
    only_gathers,
    read_kernels,
    read_thunks,
)
from jflash.proof.program.hlo import parse
from jflash.proof.program.step_program import StepProgram, cut, models_of, step_program
from jflash.records.specs import DeltaSpec, Kept
from jflash.speculative import draft, speculative_step, verify
from pallas_kernels import block_attention as attention_op
from pallas_kernels.block_attention import block_attention
from pallas_kernels.choice import best
from pallas_kernels.matmul.float8.rounded import Rounded
from pallas_kernels.matmul.kept.fragments import Fragments
from pallas_kernels.shapes import BLOCK_ATTENTION
from tests.support.described_gpu import A100, H200, L4, Part, compile_for, device_mesh, lower_for

COMPILED_FULLY = True  # what the compiler makes of the step is what is looked at
SHAPE = cut(model_shape("qwen3-8b"), target_layers=2, drafter_layers=2)
SMALL = cut(model_shape("qwen3-8b"), target_layers=1, drafter_layers=1)
CAPACITY, DTYPE = 2048, "bfloat16"


def on_h200(models: Models, **asked: str) -> Models:
    """With the kernels that jflash takes on an H200."""
    return with_backends(models, DTYPE, device_mesh(H200).devices.flat[0], **asked)


def compiled(step: StepProgram, run=None, donate=(1,), **options) -> Program:
    return inspect(
        lambda dump: compile_for(
            H200, run or step.run, *step.arguments, donate=donate, options={**dump, **options}
        )
    )


def failed(program: Program, bound: int) -> dict[str, tuple[str, ...]]:
    return {r.gate: r.offences for r in check(program, bound) if not r.passed}


def looped(body):
    """`run` with another step: `body(params, state)`, until all sequences are done."""

    def run(params, state, max_steps, cancel):
        def unfinished(carry):
            step, state = carry
            return (step < max_steps) & ~jnp.all(state.sequences.done)

        start = (jnp.int32(0), state.with_sequences(done=state.sequences.done | cancel))
        return lax.while_loop(unfinished, lambda c: (c[0] + 1, body(params, c[1])), start)[1]

    return run


@pytest.mark.parametrize(
    ("kind", "batch"), [("pair", 1), pytest.param("pair", 32, marks=pytest.mark.long), ("plain", 1)]
)
def test_the_step_passes_every_gate(kind: str, batch: int):
    models = {"pair": models_of(SHAPE), "plain": models_of(SHAPE).plain()}[kind]
    step = step_program(on_h200(models), batch, CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    # What was looked at is the step: all layers of attention, in one loop.
    layers = 4 if kind == "pair" else 2
    assert program.hlo.count('custom_call_target="mosaic_gpu') >= layers
    launches = [t.inside for t in read_thunks(program.thunks)]
    assert launches.count(("kWhile/body", "kCommandBuffer")) > 10 * layers


def test_a_step_whose_long_texts_leave_tails_passes():
    """Each layer merges them by a second kernel, in place; who has one is known once for all."""
    step = step_program(on_h200(models_of(SHAPE)), 32, 2 * CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    assert len(re.findall(r"custom-call\(.*block_attention_tails", program.hlo)) == 4
    plans = re.findall(r"= (s32\[67\])\S* fusion\(", program.hlo)
    assert 1 <= len(plans) <= 2, plans  # the target's, and the drafter's, which is not causal


def test_the_step_with_delta_nets_and_wide_heads_passes():
    """A head of 256 dims has pieces of attention in memory at every batch, and they are counted.
    Two delta nets, then attention."""
    whole = model_shape("qwen3.5-27b")
    last = whole._replace(target=replace(whole.target, layers=whole.target.layers[1:4]))
    shape = cut(last, target_layers=3, drafter_layers=1)
    mixers = [layer.mixer for layer in shape.target.layers]
    assert [isinstance(mixer, DeltaSpec) for mixer in mixers] == [True, True, False]
    step = step_program(on_h200(models_of(shape)), 8, CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    pieces = 8 * 4 * 2 * CAPACITY // 256 * 64 * 256 * 4
    assert program.temporary_bytes > pieces > step.temporary_bound // 2


@pytest.mark.parametrize(
    ("batch", "width"),
    [(3, 7), *(pytest.param(*x, marks=pytest.mark.long) for x in ((1, 5), (9, 9), (31, 11)))],
)
def test_a_step_of_any_batch_and_width_can_be_made(batch: int, width: int):
    """Rows that fill no tile of the kernels' shared memory: they are padded, or go to XLA."""
    models = on_h200(replace(models_of(SMALL), block_size=width))
    step = step_program(models, batch, CAPACITY)
    lowered = lower_for(H200, step.run, *step.arguments, donate=(1,))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(("heads", "width"), [(2, 5), (3, 16), (5, 6), (7, 10), (9, 7), (16, 31)])
def test_attention_of_any_group_and_width_can_be_made(heads: int, width: int):
    q = jax.ShapeDtypeStruct((1, width, heads, 64), DTYPE)
    cache, at = jax.ShapeDtypeStruct((1, 128, 1, 64), DTYPE), jax.ShapeDtypeStruct((1,), jnp.int32)
    attend = functools.partial(block_attention, causal=True, scale=0.1, backend="mosaic_gpu")
    assert "mosaic_gpu" in lower_for(H200, attend, q, cache, cache, at, at).as_text()


@pytest.mark.long
def test_the_step_of_dflash_2_with_windows_passes_and_sorts_nothing():
    """The best of a vocabulary are found by XLA's own kernel; drafts are followed in one or two.

    With 128 rows to verify; the steps above have 16, 512 and 1.
    """
    shape = cut(model_shape("qwen3-8b-dflash2"), target_layers=2, drafter_layers=2)
    sights = (dict(window=700, causal=True), dict(window=300))  # in rings that wrap
    shape = shape._replace(drafter=shape.drafter.attending(*sights))
    step = step_program(on_h200(models_of(shape)), 8, CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    assert program.hlo.count('custom_call_target="__gpu$TopK"') == 2
    assert " sort(" not in program.hlo


def test_the_step_with_experts_passes():
    """Grouped products by our kernel, for 16 tokens at 8 experts each, and no weight copied.

    Routing, lists of rows and sums are kernels of ours too: nothing is sorted or gathered.
    """
    shape = cut(model_shape("qwen3-coder-30b"), target_layers=1, drafter_layers=1)
    step = step_program(on_h200(models_of(shape)), 1, CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    kernel = re.compile(r"= bf16\[128,(\d+)\]\S+ custom-call\(.*__gpu\$xla\.gpu\.triton")
    assert sorted(kernel.findall(program.hlo)) == ["2048", "768"]
    assert " sort(" not in program.hlo and "TopK" not in program.hlo


@pytest.mark.long
@pytest.mark.parametrize("order", ["by column", "in fragments"])
def test_the_step_with_kept_weights_and_a_float8_drafter_passes(order: str):
    """FP8 in blocks and INT4 in groups, at more rows than a tile has: codes go into the kernels.

    The drafter multiplies codes by codes: none of its weights is converted or turned round.
    """
    models = on_h200(models_of(SMALL)).drafting_in("float8")
    fp8, int4 = Kept("fp8", 128, "float32", False), Kept("int4", 128, "float16", True)
    leaves = {"attention/qkv": fp8, "attention/out": int4, "mlp/gate_up": fp8, "mlp/down": int4}
    kept = {f"layers_0/{leaf}/kernel": form for leaf, form in leaves.items()}
    models = replace(models, target=Target(models.target.config.keeping(kept)))
    step = step_program(in_fragments(models) if order == "in fragments" else models, 5, CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    arrays = re.findall(r"= (f8e4m3fn\[\d+|u8|u32\[\d+,\d+,\d+,64)\S+ parameter", program.hlo)
    assert {"f8e4m3fn[151936", "f8e4m3fn[24576", "f8e4m3fn[4096"} <= set(arrays)
    tiles = {"u32[96,32,33,64", "u32[64,32,18,64", "u32[384,32,33,64", "u32[64,96,18,64"}
    assert (tiles if order == "in fragments" else {"u8"}) <= set(arrays)


@pytest.mark.parametrize(
    ("batch", "tiles"), [pytest.param(1, 128, marks=pytest.mark.long), (2, 145)]
)
def test_the_step_with_experts_in_fragments_passes(batch: int, tiles: int):
    """Of 16 tokens each expert has a tile, of more the rows do; the words go into the kernels."""
    shape = cut(model_shape("qwen3-coder-30b"), target_layers=1, drafter_layers=1)
    shape = shape._replace(target=quantised(shape.target, "fp8"))
    models = in_fragments(on_h200(models_of(shape).plain()))
    program = compiled(step := step_program(replace(models, block_size=1), 16 * batch, CAPACITY))
    assert not failed(program, step.temporary_bound)
    words = set(re.findall(r"= u32\[128,(\d+),(\d+),33,64\]\S+ parameter", program.hlo))
    assert words == {("24", "16"), ("32", "6")}
    kernels = re.findall(r"= bf16\[(\d+),(\d+)\]\S+ custom-call\(.*mosaic_gpu", program.hlo)
    assert {(str(16 * tiles), "768"), (str(16 * tiles), "2048")} <= set(kernels)


def test_the_step_with_experts_kept_in_mxfp4_passes():
    """gpt-oss-120b's experts are read as codes of one byte, by both grouped products."""
    shape = cut(model_shape("gpt-oss-120b"), target_layers=1, drafter_layers=1)
    shape = shape._replace(target=quantised(shape.target, "mxfp4"))
    step = step_program(on_h200(models_of(shape).plain()), 1, CAPACITY)
    program = compiled(step)
    assert not failed(program, step.temporary_bound)
    codes = set(re.findall(r"= f8e4m3fn\[128,2880,(\d+)\]\S+ parameter", program.hlo))
    kernel = re.compile(r"= bf16\[4,(\d+)\]\S+ custom-call\(.*__gpu\$xla\.gpu\.triton")
    assert codes == {"2880", "5760"}
    assert kernel.findall(program.hlo) == ["2880"] * 2  # the first one's gate is in it


def on_two(
    models: Models,
    experts_over: str = "columns",
    batch: int = 1,
    rows: int | None = None,
    **asked: str,
) -> tuple[Program, int]:
    """The step of two H200s that share the models, and the bound of its temporaries."""
    models = on_h200(over(models, device_mesh(H200, 2, AXIS), experts_over), **asked)
    models = replace(for_batch(models, batch), rows=rows)
    step = step_program(models, batch, CAPACITY)
    lowered = lower_run(models, *step.arguments[:2])
    program = inspect(lambda dump: lowered.compile(compiler_options=dict(dump)))
    return program, step.temporary_bound


def pushes(program: Program) -> int:
    return len(re.findall(r'custom-call\(.*?op_name="[^"]*/push(?:_lines)?/mpmd_map"', program.hlo))


def test_two_devices_push_what_they_exchange():
    """Four gathers a layer, and five of features and tokens: kernels that peers write to.

    So one device's gates hold, the step is one command buffer, and the places are never copied.
    Pieces of a product are added as they are pushed.
    """
    program, bound = on_two(models_of(SMALL))
    assert not failed(program, bound)
    assert only_gathers(parse(program.hlo)).value == 0 and pushes(program) == 4 * 2 + 5
    added = re.findall(r'custom-call\(.*op_name="([^"]*)/jit\(add_pieces\)', program.hlo)
    assert len(added) == 2 and all("Drafter.context" in name for name in added)  # none of a layer
    places = re.findall(r"= (?:bf16|s32)\[2,2,\d+\]\S+ (\S+)\(", program.hlo)
    assert places and not any("copy" in opcode for opcode in places)
    assert "f32[16,75968]" not in program.hlo  # a device's logits


def test_two_devices_choose_rows_without_a_logit():
    """By each device's best draft, its logit and its sum, of half of the logits."""
    program, bound = on_two(models_of(SMALL), batch=2, rows=8)
    assert not failed(program, bound) and only_gathers(parse(program.hlo)).value == 0
    assert pushes(program) == 4 * 2 + 5 and "all-gather" not in program.hlo
    assert "75968]" not in program.hlo and "151936]" not in program.hlo


@pytest.mark.long
def test_two_devices_that_push_many_rows_add_and_norm_them_where_they_land():
    """The outputs of attention and of the MLP, which is one kernel, in both layers."""
    program, bound = on_two(models_of(SMALL), batch=32)
    assert not failed(program, bound) and only_gathers(parse(program.hlo)).value == 0
    named = re.findall(r'custom-call\(.*?op_name="[^"]*?/(\w+)/mpmd_map"', program.hlo)
    found = {name: named.count(name) for name in ("push_and_norm", "mlp_pushed")}
    assert found == {"push_and_norm": 4, "mlp_pushed": 2}
    assert "sum_and_norm" not in program.hlo and "add_pieces" not in program.hlo


def test_two_devices_compile_a_program_that_is_given_an_empty_array():
    """As a step with forms is, of models without drafts. XLA alone ends the process."""

    def both(x, empty):
        return lax.all_gather(x, AXIS), empty

    program = spread(device_mesh(H200, 2, AXIS), both, (EVERYWHERE,) * 2, (EVERYWHERE,) * 2, (1,))
    sizes = jax.ShapeDtypeStruct((1, 8), jnp.int32), jax.ShapeDtypeStruct((1, 0), jnp.int32)
    assert "all-gather" in program.lower(*sizes).compile().as_text()


@pytest.mark.long
def test_two_devices_exchange_gathers_of_xla_and_no_sum():
    """As other GPUs have them. The host launches each, so one gate fails.

    With XLA_FLAGS=--xla_gpu_enable_command_buffer=+COLLECTIVES, which no option of one compilation
    can say, the whole step is one command buffer again.
    """
    program, bound = on_two(models_of(SMALL), gather_backend="xla")
    assert only_gathers(parse(program.hlo)).value == 3 * 2 + 4 and not pushes(program)
    offences = failed(program, bound)
    assert offences.keys() == {"one command buffer"}
    assert "the host launches kAllGather kAllGather" in offences["one command buffer"]


@pytest.mark.long
def test_two_devices_with_a_drafter_in_float8_exchange_as_much():
    """Its Triton products take one device's columns. Its `out` is whole."""
    program, bound = on_two(models_of(SMALL).drafting_in("float8"))
    assert only_gathers(parse(program.hlo)).value == 0 and pushes(program) == 4 + 3 + 5
    assert not failed(program, bound)
    assert "float8_gate_up" in program.hlo


@pytest.mark.long
def test_two_devices_read_codes_in_fragments():
    """Each has whole tiles of a target in INT4, and of a drafter in float8 for few rows."""
    models = models_of(SMALL).drafting_in("float8", 1)
    models = replace(models, target=Target(quantised(models.target.config, "int4")))
    program, bound = on_two(models)
    assert not failed(program, bound) and pushes(program) == 3 * 2 + 5
    kept = set(re.findall(r"= u32\[(\d+),(\d+),(\d+),64\]\S+ parameter", program.hlo))
    halves = {("48", "32"), ("192", "32"), ("32", "96")}  # qkv, gate and up, down; out is whole
    assert kept == {(*x, rows) for x in halves | {("64", "32")} for rows in ("18", "33")} | {
        ("32", "32", "33"),
        ("16", "32", "33"),  # the drafter's features and context
    }
    assert re.findall(r"f8e4m3fn\[\d+,\d+\]\S+ parameter", program.hlo)  # its head alone
    assert "float8_gate_up" not in program.hlo


def test_devices_have_a_rounded_weight_as_their_parts_sizes_allow():
    """Of 3840 columns each of four devices has 960, and no pair of tiles divides them."""
    models = models_of(cut(model_shape("gemma-3-12b"), 1, 1)).drafting_in("float8", 1)
    models = on_h200(over(models, device_mesh(H200, 4, AXIS)))
    structs = param_structs(models)
    drafter = structs.drafter
    assert isinstance(drafter["fc"]["kernel"], Rounded)
    assert isinstance(drafter["layers_0"]["mlp"]["gate_up"]["kernel"], Fragments)
    parts = jax.tree.map(lambda x, where: x.size * x.dtype.itemsize // (4 if where else 1),
                         structs, param_specs(models, structs))  # fmt: skip
    held = sum(jax.tree.leaves(parts))
    assert held == memory_budget(models, Shape.of(1, CAPACITY)).weights


@pytest.mark.long
def test_two_devices_with_whole_experts_gather_once_for_them():
    """All columns of half the experts: both products at once, and one gather of their rows.

    With columns of every expert the step has ten gathers.
    """
    shape = cut(model_shape("qwen3-coder-30b"), target_layers=1, drafter_layers=1)
    program, bound = on_two(models_of(shape), "devices")
    assert only_gathers(parse(program.hlo)).value == 0 and pushes(program) == 9
    assert not failed(program, bound)
    kernel = re.compile(r"= bf16\[128,(\d+)\]\S+ custom-call\(.*__gpu\$xla\.gpu\.triton")
    assert sorted(kernel.findall(program.hlo)) == ["2048", "768"]
    assert "bf16[64,2048,1536]" in program.hlo and "bf16[128,2048,1536]" not in program.hlo


@pytest.mark.long
def test_a_sum_over_devices_fails_the_gather_gate():
    """Of a dense layer; `tests/proof/test_check_program.py` plants one of experts."""
    with nn.intercept_methods(added_over_devices):
        program, _ = on_two(models_of(SMALL).plain())
    assert any("all-reduce" in o for o in only_gathers(parse(program.hlo)).offences)


def test_products_by_cublas_pass_too():
    """As a real device has them where they win; their workspace is told apart."""
    step = step_program(
        on_h200(models_of(SMALL).plain(), matmul_backend="xla", norm_backend="xla"), 8, CAPACITY
    )
    program = compiled(step, xla_gpu_enable_triton_gemm=False)
    assert "kCublasLtMatmul" in {t.kind for t in read_thunks(program.thunks)}
    assert cublas_workspace(parse(program.hlo)) == 4 * 2**20
    assert not failed(program, step.temporary_bound)


def test_einsum_attention_copies_caches_and_fails_that_gate():
    """XLA wants the batch of a cache elsewhere: it transposes all of them around the loop."""
    step = step_program(models_of(SMALL).plain().of_dtype(DTYPE), 8, CAPACITY)
    offences = failed(compiled(step), step.temporary_bound)
    assert "one command buffer" not in offences and "no copy of weights" not in offences
    assert any("transpose" in o and "outside the loop" in o for o in offences["no copy of a cache"])


def small_pair() -> StepProgram:
    return step_program(on_h200(models_of(SMALL)), 1, CAPACITY)


def small_plain() -> StepProgram:
    return step_program(on_h200(models_of(SMALL).plain()), 1, CAPACITY)


def test_a_state_that_is_not_donated_and_no_command_buffers_fail_their_gates():
    program = compiled(small_plain(), donate=(), xla_gpu_enable_command_buffer="")
    offences = no_cache_copy(parse(program.hlo)).offences
    assert any("is not donated" in o for o in offences)
    assert any("writes 4,194,304 bytes of state.target_cache[0].k" in o for o in offences)
    offences = one_command_buffer(program.thunks).offences
    assert len(offences) > 10 and all("the host launches k" in o for o in offences)


def test_a_program_without_a_loop_fails_the_command_buffer_gate():
    assert one_command_buffer("001: kCopy [source | sink] kCopy").offences


def test_a_cache_read_after_its_update_and_a_loop_inside_the_step_fail_their_gates():
    """Keys and values that change places: neither can be written where it lies."""
    step = small_plain()

    def body(params, state):
        once = functools.partial(speculative_step, step.models, params)
        state = lax.fori_loop(0, state.sequences.limit[0], lambda _, s: once(s), state)
        swapped = tuple(c._replace(k=c.v, v=c.k) for c in state.target_cache)
        return state._replace(target_cache=swapped)

    program = compiled(step, looped(body))
    assert any("in the loop" in o for o in no_cache_copy(parse(program.hlo)).offences)
    assert any("kWhile" in o for o in one_command_buffer(program.thunks).offences)


@pytest.mark.long
def test_context_weights_taken_apart_in_the_step_fail_the_weight_gate():
    """A drafter without `context_kernel`: its layers' columns are sliced out of fused kernels."""
    step = small_pair()
    params = step.arguments[0]
    drafter = {k: v for k, v in params.drafter.items() if k != "context_kernel"}
    without = step._replace(arguments=(params._replace(drafter=drafter), *step.arguments[1:]))
    module = parse(compiled(without).hlo)
    offences = no_weight_copy(module).offences
    assert any("['qkv']['kernel']" in o for o in offences), offences


def test_a_scan_over_stacked_layers_fails_the_weight_gate():
    def run(params, state):
        def layers(x):
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stacked"])[0]

        return lax.while_loop(lambda x: jnp.sum(x) < 1, layers, state)

    stacked = jax.ShapeDtypeStruct((4, 4096, 4096), DTYPE)
    rows = jax.ShapeDtypeStruct((16, 4096), DTYPE)
    program = inspect(lambda o: compile_for(H200, run, {"stacked": stacked}, rows, options=o))
    module = parse(program.hlo)
    offences = no_weight_copy(module).offences
    assert any("writes 33,554,432 bytes of params['stacked']" in o for o in offences)
    assert one_command_buffer(program.thunks).offences


def test_a_product_taken_apart_fails_the_weight_gate():
    """As XLA may do with a matrix and one row: all products are written before they are read."""

    def run(params, state):
        def layer(x):
            return jnp.sort(params["kernel"] * x[:, None], axis=0)[0]

        return lax.while_loop(lambda x: jnp.sum(x) < 1, layer, state)

    kernel = jax.ShapeDtypeStruct((4096, 4096), DTYPE)
    row = jax.ShapeDtypeStruct((4096,), DTYPE)
    program = inspect(lambda o: compile_for(H200, run, {"kernel": kernel}, row, options=o))
    offences = no_weight_copy(parse(program.hlo)).offences
    assert any("writes 33,554,432 bytes of params['kernel']" in o for o in offences), offences


@pytest.mark.long
def test_several_copies_of_the_logits_fail_the_temporaries_gate():
    """With the head by XLA, which may write the logits once."""
    wide = replace(models_of(SMALL).plain(), block_size=16)
    models = replace(on_h200(wide), kernels=on_h200(wide).kernels._replace(matmul="xla"))
    step = step_program(models, 8, CAPACITY)

    def body(params, state, sorts: bool):
        proposal, state = draft(models, params, state)
        verdict, state = verify(models, params, state, proposal)
        # A sort needs its input and its result at once.
        best = jnp.sort(verdict.logits, axis=-1)[:, 0, -1] if sorts else verdict.choices[:, 0]
        return state.with_sequences(length=state.sequences.length + best.astype(jnp.int32))

    once, twice = (
        compiled(step, looped(functools.partial(body, sorts=sorts))) for sorts in (False, True)
    )
    assert not bounded_temporaries(once.temporary_bytes, step.temporary_bound).offences
    assert bounded_temporaries(twice.temporary_bytes, step.temporary_bound).offences


def shares(x: jax.Array) -> jax.Array:
    """Each row over its sum, by one warpgroup that keeps the whole tile in registers meanwhile."""

    def kernel(x_ref, out_ref):
        tile = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        out_ref[...] = tile / lax.broadcast_in_dim(jnp.sum(tile, axis=1), tile.shape, [0])

    return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_a_tile_that_does_not_fit_registers_fails_the_spill_gate():
    def built(columns: int) -> Program:
        x = jax.ShapeDtypeStruct((64, columns), jnp.float32)
        return inspect(lambda options: compile_for(H200, shares, x, options=options))

    small, large = built(64), built(512)  # 32 and 256 registers a thread for the tile alone
    assert not no_spills(small.hlo, small.assembler).offences
    assert [k.spilled_bytes for k in read_kernels(small.assembler)] == [0]
    assert "spills" in no_spills(large.hlo, large.assembler).offences[0]
    assert [k.spilled_bytes > 0 for k in read_kernels(large.assembler)] == [True]
    # A kernel of which ptxas says nothing must not pass either.
    assert no_spills(small.hlo, "").offences


@pytest.mark.parametrize(
    ("part", "backend"), [(H200, "canonical"), (A100, "triton"), (L4, "triton")]
)
def test_attention_compiles_for_each_part(part: Part, backend: str):
    """The kernel that a device gets by default: on those without wgmma, Triton's."""
    shape = BLOCK_ATTENTION["qwen3-b1-2k"]
    sizes = attention_op.Sizes(shape.T, shape.N // shape.K, shape.H, DTYPE)
    assert best(attention_op, [sizes], device_mesh(part).devices.flat[0]) == backend
    q = jax.ShapeDtypeStruct((shape.B, shape.T, shape.N, shape.H), DTYPE)
    cache = jax.ShapeDtypeStruct((shape.B, shape.S, shape.K, shape.H), DTYPE)
    lengths = jax.ShapeDtypeStruct((shape.B,), jnp.int32)
    attend = functools.partial(block_attention, causal=True, scale=shape.H**-0.5, backend=backend)
    text = compile_for(part, attend, q, cache, cache, lengths, lengths).as_text()
    kernel = "mosaic_gpu" if backend == "canonical" else "xla.gpu.triton"
    assert text is not None and kernel in text


def test_a_jitted_function_keeps_its_own_donations():
    with pytest.raises(ValueError, match="jitted already"):
        compile_for(H200, jax.jit(jnp.sin), jnp.ones(3), donate=(0,))
