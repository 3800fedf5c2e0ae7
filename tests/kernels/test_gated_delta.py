"""The gated delta rule: every backend against the rule token by token, and the law on a CPU.

The law: a row's output, and the state that is kept, hang on the tokens up to it alone. A form whose
chunks begin at the block's anchor must be caught.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.layers.cache import empty_delta
from jflash.records.specs import DeltaSpec
from pallas_kernels import gated_delta as op
from pallas_kernels.gated_delta import CHUNK, Memory, Rows, Span
from pallas_kernels.shapes import GATED_DELTA
from tests.support.attention_checks import FULLY, ON_GPU
from tests.support.described_gpu import H200, compile_for

HK, DK, HV, DV = 2, 16, 4, 32
TOKENS = 75  # four borders, and part of a chunk


class Text(NamedTuple):
    """Queries and rows of whole texts [B, T, …]."""

    q: jax.Array
    rows: Rows

    def at(self, index) -> "Text":
        return jax.tree.map(lambda x: np.asarray(x)[index], self)


def text(seed: int, batch: int = 1, tokens: int = TOKENS) -> Text:
    keys = jax.random.split(jax.random.key(seed), 5)

    def unit(key):
        x = jax.random.normal(key, (batch, tokens, HK, DK))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    values = jax.random.normal(keys[2], (batch, tokens, HV, DV))
    # A state that forgets at once would hide every fault.
    g = -0.4 * jax.random.uniform(keys[3], (batch, tokens, HV))
    beta = jax.random.uniform(keys[4], (batch, tokens, HV))
    return Text(unit(keys[0]) * DK**-0.5, Rows(unit(keys[1]), values, g, beta))


def empty(batch: int) -> Memory:
    sizes = (HK, DK), (HV, DV), (HV,), (HV,)
    rows = Rows(*(jnp.full((batch, 2 * CHUNK, *size), 9.0) for size in sizes))  # never read
    return Memory(jnp.zeros((batch, HV, DK, DV)), jnp.zeros(batch, jnp.int32), rows)


@functools.cache
def call(backend: str):
    """Outputs before their norm, and the memory."""
    options = FULLY if backend == "cpu" else {}  # bits may hang on what is fused with what
    return jax.jit(functools.partial(whole_call, backend), compiler_options=options)


def whole_call(backend: str, q, rows, memory, *places):
    span = Span(*places)
    gate = op.Gate(jnp.ones((*q.shape[:2], HV * DV)), 0, jnp.ones(DV), 1e-6)
    if backend == "triton" and not ON_GPU:
        out, state = op.triton.gated_delta(q, rows, memory, span, interpret=True)
        given = out, *gate, rows, memory._replace(state=state), span
        return out, op.triton.finish(*given, interpret=True)[1]
    out, state = op.gated_delta(q, rows, memory, span, backend=backend)
    given = out, gate, rows, memory._replace(state=state), span
    return out, op.finish(*given, backend=backend)[1]


def state_before(own: Text, position: int) -> np.ndarray:
    """The state [Hv, dk, dv] of one text before a position, by the reference token by token."""
    state = jnp.zeros((1, HV, DK, DV))
    for i in range(position):
        q, rows = own.at((slice(None), i))
        _, state = jax.jit(op.reference.step)(state, q, *rows)
    return np.asarray(state[0])


def as_prompt(backend: str, own: Text, chunk: int, length: int):
    """Outputs and memory of a prompt that comes in chunks, the last one padded with junk."""
    outs, memory = [], empty(1)
    junk = ((0, 0), (0, chunk))
    padded = jax.tree.map(
        lambda x: np.pad(x[:, :length], junk + ((0, 0),) * (x.ndim - 2), constant_values=5), own
    )
    for offset in range(0, length, chunk):
        part = padded.at((slice(None), slice(offset, offset + chunk)))
        real = jnp.full(1, min(chunk, length - offset))
        out, memory = call(backend)(*part, memory, jnp.full(1, offset), real, real)
        outs.append(out)
    return np.concatenate(outs, axis=1)[:, :length], memory


def by_steps(backend: str, own: Text, width: int, seed: int, step=None):
    """Outputs of blocks of which random numbers of rows are taken back, and the memory after.

    `step(memory, block, starts, taken)` gives both for one block.
    """
    batch = len(own.q)
    rng, junk = np.random.default_rng(seed), text(seed + 100, batch, width)
    starts, memory = np.zeros(batch, int), empty(batch)
    out = np.full((batch, TOKENS, HV, DV), np.nan, np.float32)
    while starts.min() < TOKENS:
        taken = np.minimum(rng.integers(0, width + 1, batch), TOKENS - starts)  # 0: it idles
        index = np.minimum(starts[:, None] + np.arange(width), TOKENS - 1)
        right = np.arange(width) < taken[:, None]
        block = jax.tree.map(functools.partial(_mixed, index, right), own, junk)
        found, memory = (step or on_the_grid(backend))(memory, block, starts, taken)
        for b in range(batch):
            out[b, starts[b] : starts[b] + taken[b]] = found[b, : taken[b]]
        starts = starts + taken
    return out, memory


def _mixed(index, right, own, junk):
    """The text's rows where they are right, junk elsewhere."""
    mine = np.asarray(own)[np.arange(len(own))[:, None], index]
    return np.where(right.reshape(*right.shape, *[1] * (mine.ndim - 2)), mine, junk)


def on_the_grid(backend: str):
    def step(memory, block, starts, taken):
        zeros = jnp.zeros(len(starts), jnp.int32)
        return call(backend)(*block, memory, jnp.asarray(starts), zeros + block.q.shape[1], zeros)

    return step


def at_the_anchor(memory, block, starts, taken):
    """The fault: a chunk begins at the block's first row, and the state lies there too."""

    def chunk(kept):
        def one(x):
            rest = [(0, 0)] * (x.ndim - 2)
            return np.pad(x[:, :kept], [(0, 0), (0, CHUNK - kept), *rest])[:, None]

        return jax.tree.map(one, block)

    scan = _cpu_scan()
    out, _ = scan(memory.state, *chunk(block.q.shape[1]), jnp.ones(1, jnp.int32))
    _, state = scan(memory.state, *chunk(int(taken[0])), jnp.ones(1, jnp.int32))
    return out[:, 0], memory._replace(state=state)


def token_by_token(own: Text) -> np.ndarray:
    return jax.jit(op.recurrent)(*own, np.arange(TOKENS)[None].repeat(len(own.q), 0) == 0)


@pytest.mark.parametrize(("backend", "width"), [("xla", 8), ("triton", 15)])
def test_chunks_are_the_rule_token_by_token(backend, width):
    """Outputs and states of blocks taken back in part; by a CPU's form: below."""
    own = text(0, batch=3)
    want = token_by_token(own)
    assert np.abs(want).max() > 0.4
    out, memory = by_steps(backend, own, width, seed=1)
    np.testing.assert_allclose(out, want, atol=1e-5)
    want = state_before(own.at((slice(2, 3),)), int(memory.base[2]))
    np.testing.assert_allclose(memory.state[2], want, atol=1e-5)


@pytest.mark.parametrize("tokens", [pytest.param(5, marks=pytest.mark.long), 19])
def test_the_kernels_of_inputs_and_norm_are_the_reference(tokens):
    """A call that fits beside a ring's earlier rows, and one that does not and ends in padding."""
    keys = jax.random.split(jax.random.key(5), 5)
    D, first = 2 * HK * DK + HV * DV, 8
    firsts = first, first + D, first + D + HV
    shapes = (2, tokens, firsts[2] + HV), (2, CHUNK + 3, D), (D, 4), (HV,), (HV,)
    dtypes = [jnp.bfloat16] * 3 + [jnp.float32] * 2
    drawn = zip(keys, shapes, dtypes, strict=True)
    given = [jax.random.normal(key, shape).astype(dtype) for key, shape, dtype in drawn]
    start, real = jnp.array([1, 37]), jnp.array([tokens, tokens - 2])
    kept = real * (tokens > CHUNK)
    span = Span(start, real, kept)
    given, how = [*given, span], {"heads": op.Heads(HK, DK), "firsts": firsts}
    want = op.next_inputs(*given, **how, backend="reference")
    got = op.triton.next_inputs(*given, **how, interpret=not ON_GPU)
    np.testing.assert_array_equal(got[2], want[2])
    for one, other in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        for sequence, count in enumerate(real):
            x, y = one[sequence, :count], other[sequence, :count]
            # An entry may lie on either side of a rounding to bfloat16.
            assert np.mean(np.abs(x - y) > 1e-5) < 1e-3
            np.testing.assert_allclose(x, y, atol=0.02)
    out, scale = want[1].v, jnp.linspace(0.5, 2, DV).astype(jnp.bfloat16)
    gate = op.Gate(given[0], first, scale, 1e-6)
    given = out, *gate, want[1], empty(2), span
    one, memory = op.triton.finish(*given, interpret=not ON_GPU)
    other = op.gated_norm(out, gate, backend="reference")
    assert one.dtype == other.dtype  # a CPU's compiler may leave a rounding out
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (one, other)), rtol=0.02)
    np.testing.assert_array_equal(memory.base, start + kept)
    for ring, rows in zip(memory.rows, want[1], strict=True):
        for b in range(2):
            places = (int(start[b]) + np.arange(int(kept[b]), int(real[b]))) % (2 * CHUNK)
            np.testing.assert_array_equal(ring[b, places], rows[b, int(kept[b]) : int(real[b])])
            others = np.delete(np.asarray(ring[b]), places, axis=0)
            assert np.all(others == 9)


@pytest.mark.parametrize("backend", ["cpu", "xla", "triton"])
def test_some_slots_of_a_memory(backend):
    """Texts that lie at any slots have the bits of those at the first, and the others stay."""
    if backend == "cpu" and ON_GPU:
        pytest.skip("this is a CPU's operation")
    own, slots = text(9, batch=2), jnp.array([3, 1])
    whole = jax.tree.map(lambda x: x.astype(x.dtype), empty(5))._replace(base=jnp.full(5, 7))

    def somewhere(memory, block, starts, taken):
        zeros = jnp.zeros(2, jnp.int32)
        into = lambda all, x: all.at[slots].set(x)  # noqa: E731
        given = jax.tree.map(into, whole, memory), jnp.asarray(starts)
        out, after = call(backend)(*block, *given, zeros + block.q.shape[1], zeros, slots)
        for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(x[np.array([0, 2, 4])], y[np.array([0, 2, 4])])
        return out, jax.tree.map(lambda x: x[slots], after)

    want = by_steps(backend, own, 5, seed=2)
    got = by_steps(backend, own, 5, 2, somewhere)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("tokens", [5, 19])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_some_slots_of_a_ring(backend, tokens):
    """A call of so many rows writes them in the kernel, or after it."""
    D, firsts = 2 * HK * DK + HV * DV, (8, 8 + 2 * HK * DK + HV * DV, 12 + 2 * HK * DK + HV * DV)
    shapes = (2, tokens, firsts[2] + HV), (5, CHUNK + 3, D), (D, 4), (HV,), (HV,)
    keys = jax.random.split(jax.random.key(6), 5)
    fused, ring, *leaves = map(jax.random.normal, keys, shapes)
    start, slots = jnp.array([1, 37]), jnp.array([4, 0])
    real, how = jnp.array([tokens, tokens - 2]), {"heads": op.Heads(HK, DK), "firsts": firsts}
    made = functools.partial(op.next_inputs, backend=backend)
    if backend == "triton" and not ON_GPU:
        made = functools.partial(op.triton.next_inputs, interpret=True)
    want = made(fused, ring[slots], *leaves, Span(start, real, real), **how)
    got = made(fused, ring, *leaves, Span(start, real, real, slots), **how)
    for x, y in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(got[2], ring.at[slots].set(want[2]))


@functools.cache
def _cpu_scan():
    return jax.jit(op.cpu.scan, compiler_options=FULLY)


@pytest.mark.skipif(ON_GPU, reason="this is a CPU's operation")
def test_bits_depend_on_the_tokens_alone():
    """Widths, batches, prompts and chunks of them: the same outputs, and states at borders."""
    own = text(3, batch=3)
    runs = [by_steps("cpu", own, width, seed) for width, seed in ((1, 4), (16, 6))]
    np.testing.assert_allclose(runs[0][0], token_by_token(own), atol=1e-5)
    for b, chunk in enumerate((128, 7, 7)):
        prompt, whole = as_prompt("cpu", own.at((slice(b, b + 1),)), chunk, TOKENS)
        for out, memory in runs:
            np.testing.assert_array_equal(out[b], prompt[0])
            _, same = as_prompt("cpu", own.at((slice(b, b + 1),)), 128, int(memory.base[b]))
            np.testing.assert_array_equal(memory.state[b], same.state[0])
        assert int(whole.base[0]) == TOKENS // CHUNK * CHUNK


@pytest.mark.skipif(ON_GPU, reason="this is a CPU's operation")
def test_chunks_that_begin_at_the_anchor_are_caught():
    own = text(3)
    prompt, _ = as_prompt("cpu", own, 128, TOKENS)
    out, _ = by_steps("cpu", own, 8, 5, at_the_anchor)
    np.testing.assert_allclose(out, prompt, atol=1e-5)  # right, and of other bits
    assert np.any(out != prompt)


@pytest.mark.parametrize(
    ("length", "backend"),
    [*((n, "xla") for n in (1, 3, 15, 16, 17)), (1, "triton"), (17, "triton")],
)
def test_short_prompts(length, backend):
    """Shorter than the convolution's taps and than a chunk, a border more or less."""
    own = text(7)
    want, _ = as_prompt("reference", own, 32, length)
    got, memory = as_prompt(backend, own, 32, length)
    np.testing.assert_allclose(got, want, atol=1e-5)
    border = length if backend == "triton" else length // CHUNK * CHUNK
    assert int(memory.base[0]) == border
    np.testing.assert_allclose(memory.state[0], state_before(own, border), atol=1e-5)


WALKED = {  # sequences, rows, tokens among them, those that stay, and rows of the memory
    "a prompt": (1, 512, 512, 512, 0), "a prompt's end": (2, 130, 77, 77, 0),
    "after a step": (1, 64, 64, 64, 9), "a block": (3, 16, 16, 0, 21),
    "some rows of a block": (1, 16, 11, 5, 2), "nothing": (2, 40, 0, 0, 3),
}  # fmt: skip


@pytest.mark.skipif(not ON_GPU, reason="it is a kernel of Hopper's, and has no interpreter")
@pytest.mark.parametrize("case", WALKED)
def test_the_walk_through_shared_memory_has_tritons_bits(case):
    B, T, real, kept, ahead = WALKED[case]
    shape = GATED_DELTA["qwen3.5-27b-b8"]
    size = functools.partial(jnp.full, B)
    keys = iter(jax.random.split(jax.random.key(4), 12))
    normal = lambda *shape: 0.1 * jax.random.normal(next(keys), shape)  # noqa: E731

    def rows(count, T):
        k, v = normal(count, T, shape.Hk, shape.dk), normal(count, T, shape.Hv, shape.dv)
        g, beta = normal(count, T, shape.Hv), normal(count, T, shape.Hv)
        return Rows(k, v, -jnp.abs(g), jax.nn.sigmoid(beta))

    base = jnp.full(B + 2, 37)
    state = normal(B + 2, shape.Hv, shape.dk, shape.dv)
    memory = Memory(state, base, rows(B + 2, 2 * CHUNK))
    q, given = normal(B, T, shape.Hk, shape.dk), rows(B, T)
    span = Span(size(37 + ahead), size(real), size(kept), 1 + jnp.arange(B))
    both = [
        op.gated_delta(q, given, memory, span, backend=backend)
        for backend in ("triton", "mosaic_gpu")
    ]
    for want, got in zip(*both, strict=True):
        assert np.abs(want).max() > 0 or (got is both[1][0] and not real)
        np.testing.assert_array_equal(np.asarray(got).view("i4"), np.asarray(want).view("i4"))


@pytest.mark.skipif(ON_GPU, reason="there the kernels are compiled for the GPU that it has")
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize(
    "shape",
    [pytest.param(x, marks=pytest.mark.long) for x in ("qwen3.5-27b-b8", "qwen3.5-27b-b1-plain")],
)
def test_a_layers_three_kernels_keep_their_values_in_registers(shape, backend):
    """Operands that spill made the rule ten times slower, and nothing told. The gates look at the
    first in a whole step (tests/proof/test_gates.py)."""
    B, T, Hk, Hv, dk, dv, _ = GATED_DELTA[shape]
    D, Z = 2 * Hk * dk + Hv * dv, Hv * dv
    firsts, wide = (0, D + Z, D + Z + Hv), D + Z + 2 * Hv

    def layer(fused, weights, a_log, dt_bias, scale, ring, memory, start):
        real, heads = jnp.full_like(start, T), op.Heads(Hk, dk)
        span = Span(start, real, 0 * real, jnp.flip(jnp.arange(B)))
        how = {"heads": heads, "firsts": firsts, "backend": backend}
        q, rows, ring = op.next_inputs(fused, ring, weights, a_log, dt_bias, span, **how)
        out, state = op.gated_delta(q, rows, memory, span, backend=backend)
        gate, memory = op.Gate(fused, D, scale, 1e-6), memory._replace(state=state)
        return *op.finish(out, gate, rows, memory, span, backend=backend), ring

    spec = DeltaSpec(num_key_heads=Hk, num_value_heads=Hv, key_dim=dk, value_dim=dv, taps=4)
    cache = jax.eval_shape(lambda: empty_delta(spec, B, jnp.bfloat16))
    fused, *given = (
        jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((B, T, wide), (D, 4), (Hv,), (Hv,), (dv,))
    )
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    caches = cache.raw, cache.memory, cache.memory.base
    compiled = compile_for(H200, layer, fused, *given, *caches, donate=(5, 6), options=options)
    text = compiled.as_text() or ""
    assert text.count(" custom-call(") == 3
    assert " copy(" not in text  # states and rings lie where they lay
