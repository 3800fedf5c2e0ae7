"""What must hold for any weights: the drafter changes the speed, never a token."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.checks import check_keys
from jflash.compiled.programs import compile_programs
from jflash.compiled.shape import Shape, capacity_for, chunk_sizes, make_request, new_state
from jflash.generate import Pair, generate, stream
from jflash.prefill import prefill
from jflash.records.decoding import Decoding, Sampling
from jflash.records.kernels import Kernels
from jflash.serving.batch import Job, layout_for
from jflash.serving.calls.pass_sizes import engine_chunk, pass_sizes
from jflash.speculative import speculative_step
from tests.support.pairs import (
    one_arithmetic,
    prompts,
    random_pair,
    replay_pair,
    replayed_lengths,
    unit_head,
)

NEW = 40


def ids(generations):
    return [g.token_ids for g in generations]


def test_any_drafter_gives_the_oracles_tokens():
    batch = prompts(4, seed=3)
    pairs = [random_pair(drafter_seed=s) for s in (1, 2)]
    oracle = generate(pairs[0], batch, max_new_tokens=NEW, oracle=True)
    assert all(set(g.acceptance_lengths) == {1} for g in oracle)
    for pair in pairs:
        assert ids(generate(pair, batch, max_new_tokens=NEW)) == ids(oracle)


def test_corrupted_replay_gives_the_oracles_tokens_at_every_acceptance_length():
    pair = unit_head(random_pair())
    rng, seen = np.random.default_rng(0), set()
    for prompt in prompts(6, seed=5):
        seen |= set(replayed_lengths(pair, prompt, rng))
    assert seen == set(range(1, pair.models.block_size + 1))


def test_a_drafter_that_knows_the_text_is_accepted_whole():
    pair = unit_head(random_pair())
    prompt, width = prompts(1, seed=8)[0], pair.models.block_size
    text = generate(pair, [prompt], max_new_tokens=1 + 5 * width)[0].token_ids
    knowing = generate(replay_pair(pair, prompt + text), [prompt], max_new_tokens=1 + 5 * width)[0]
    assert knowing.token_ids == text
    assert knowing.acceptance_lengths == [width] * 5


def test_width_one_and_drafterless_width_w_agree_with_the_pair():
    pair, batch = random_pair(), prompts(4, seed=9)  # a batch of the test above: one program
    want = ids(generate(pair, batch, max_new_tokens=NEW))
    for width in (1, pair.models.block_size):
        alone = replace(pair, models=replace(pair.models, drafter=None, block_size=width))
        assert ids(generate(alone, batch, max_new_tokens=NEW)) == want


def test_neighbours_and_slots_change_nothing():
    pair, (own, *others) = random_pair(), prompts(7, seed=11)
    alone = generate(pair, [own, own, own, own], max_new_tokens=NEW)
    for slot in range(4):
        batch = others[slot : slot + 3]
        batch.insert(slot, own)
        mixed = generate(pair, batch, max_new_tokens=NEW)[slot]
        assert mixed.token_ids == alone[0].token_ids
        assert mixed.acceptance_lengths == alone[0].acceptance_lengths


def test_sequences_end_at_different_times():
    """Each of a batch stops where it stops alone, by its own stop token or its limit."""
    pair, batch = random_pair(), prompts(4, seed=12)
    free = generate(pair, batch, max_new_tokens=NEW)
    stops = [free[0].token_ids[5], free[1].token_ids[20]]
    stopped = generate(pair, batch, max_new_tokens=NEW, stop_token_ids=stops)
    for whole, cut in zip(free, stopped, strict=True):
        at = [i for i, token in enumerate(whole.token_ids) if token in stops]
        end = at[0] + 1 if at else NEW
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.finish_reason == ("stop" if at else "length")
        assert len(cut.token_ids) == 1 + sum(cut.acceptance_lengths)
    assert len({len(g.token_ids) for g in stopped}) > 1


def test_sequences_of_a_batch_stop_at_tokens_of_their_own():
    """Stop ids are a sequence's: each ends where it ends alone with them, and at no other's."""
    pair, batch = random_pair(), prompts(4, seed=12)  # that of the test above: one program
    free = ids(generate(pair, batch, max_new_tokens=NEW))
    stops = [(free[0][9],), (free[1][20], free[1][30]), (), ()]
    shape = Shape(4, 256, 128, 16)
    programs = compile_programs(pair.models, pair.params, shape)
    state = new_state(pair.models, shape)
    for b, (prompt, own) in enumerate(zip(batch, stops, strict=True)):
        decoding = Decoding(max_new_tokens=NEW, stop_token_ids=own)
        request = make_request(shape, prompt, decoding, 7, jax.random.key(0))
        state = programs.prefill(pair.params, state, jnp.int32(b), request)
    _, report = programs.run(pair.params, state, jnp.int32(NEW), jnp.zeros(4, bool))
    ends = set()
    for b, (whole, own) in enumerate(zip(free, stops, strict=True)):
        end = min((whole.index(token) + 1 for token in own), default=NEW)
        assert int(report.length[b]) == len(batch[b]) + end
        assert report.tokens[b, len(batch[b]) : report.length[b]].tolist() == whole[:end]
        ends.add(end)
    assert len(ends) == 3


def test_a_text_may_reach_the_edge_of_its_capacity():
    """The rows of the last block fit in the cache, those without room for a token too."""
    pair = unit_head(random_pair())
    width, new = pair.models.block_size, 30
    prompt = prompts(1, seed=15, low=256 - width - new, high=257 - width - new)[0]
    assert capacity_for(len(prompt), new, width, 128) == 256
    assert capacity_for(len(prompt), new + 1, width, 128) == 512
    wide = generate(pair, [prompt], max_new_tokens=new, capacity=768, oracle=True)[0]
    pair = replay_pair(pair, prompt + wide.token_ids)
    edge = generate(pair, [prompt], max_new_tokens=new)[0]
    assert edge.token_ids == wide.token_ids and len(edge.token_ids) == new
    assert max(edge.acceptance_lengths) == width


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stream_equals_generate(temperature):
    pair, prompt = random_pair(), prompts(1, seed=13)[0]
    how = {"max_new_tokens": NEW, "sampling": Sampling(temperature=temperature), "seed": 4}
    whole = generate(pair, [prompt], **how)[0]
    chunks = list(stream(pair, prompt, **how))
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [len(c.token_ids) for c in chunks[1:]] == whole.acceptance_lengths
    assert [c.generation is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].generation.finish_reason == whole.finish_reason


def test_stream_and_generate_cut_alike_at_a_stop_of_the_host():
    pair, prompt = unit_head(random_pair()), prompts(1, seed=13)[0]
    text = generate(pair, [prompt], max_new_tokens=NEW)[0].token_ids
    pair = replay_pair(pair, prompt + text)
    for keep in (1, 2, 9, 10, 11, NEW):
        when = lambda new, keep=keep: keep if len(new) >= keep else None  # noqa: E731
        cut = generate(pair, [prompt], max_new_tokens=NEW, stop_when=when)[0]
        assert cut.token_ids == text[:keep]
        assert 1 + sum(cut.acceptance_lengths) == keep
        assert cut.finish_reason == "stop"
        last = list(stream(pair, prompt, max_new_tokens=NEW, stop_when=when))
        assert [t for c in last for t in c.token_ids] == text[:keep]
        assert last[-1].generation.acceptance_lengths == cut.acceptance_lengths


CHUNKS = ((7,), (16,), (128,), (16, 150))


@pytest.fixture(scope="module")
def chunked():
    """The states after a prompt's prefill in chunks of each size."""
    pair = random_pair()
    # `run` is not compiled in vain.
    programs = [jax.jit(partial(prefill, pair.models, sizes)) for sizes in CHUNKS]

    def call(prompt: list[int]) -> list:
        states = []
        for sizes, program in zip(CHUNKS, programs, strict=True):
            shape = Shape(2, 256, sizes[0], 16)
            request = make_request(shape, prompt, Decoding(max_new_tokens=10), 7, jax.random.key(0))
            state = new_state(pair.models, shape)
            states.append(program(pair.params, state, jnp.int32(1), request))
        return states

    return call


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 56, 59, 112, 127, 128, 129, 240])
def test_prefill_chunks_agree_within_float32(chunked, length):
    """Another chunk size is another order of sums: caches differ by rounding and no more. So at a
    prompt of whole chunks, and of one token more or less."""
    prompt = prompts(1, seed=14, low=length, high=length + 1)[0]
    states = chunked(prompt)
    filled = lambda cache: [np.asarray(x[1, : len(prompt)]) for x in jax.tree.leaves(cache)]  # noqa: E731
    for other in states[1:]:
        assert other.sequences.tokens[1, len(prompt)] == states[0].sequences.tokens[1, len(prompt)]
        for name in ("target_cache", "drafter_cache"):
            want, got = filled(getattr(states[0], name)), filled(getattr(other, name))
            for a, b in zip(want, got, strict=True):
                assert np.abs(a).max() > 0.1
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_several_sizes_of_a_chunk_need_kernels_whose_bits_it_does_not_change():
    models = one_arithmetic(random_pair()).models
    hopper = Kernels("canonical", "canonical", "triton", "canonical", "canonical", "xla")
    hopper = replace(models, kernels=hopper)
    large, small = Shape.of(1, 2048, chunk=1024), Shape.of(1, 2048)
    assert chunk_sizes(hopper, large) == (128, 512, 1024) and chunk_sizes(hopper, small) == (128,)
    assert pass_sizes(hopper, large) == (256, 1024) and pass_sizes(models, small) == (128,)
    assert pass_sizes(hopper, Shape.of(1, 2048, chunk=32)) == (32,)
    other = replace(hopper, kernels=hopper.kernels._replace(matmul="xla"))
    assert chunk_sizes(other, large) == chunk_sizes(models, large) == (1024,)
    assert [engine_chunk(hopper, slots) for slots in (192, 448, 4096)] == [128, 256, 512]
    assert engine_chunk(other, 4096) == engine_chunk(models, 4096) == 128
    jobs = [Job(0, [1] * 400)]
    layouts = [layout_for(each, jobs, 2) for each in (hopper, other)]
    assert [layout.shape.chunk for layout in layouts] == [512, 128]
    assert layout_for(hopper, jobs, 2, prefill_chunk=64).shape.chunk == 64


def one_hot_pair(**changes) -> Pair:
    """Whose drafts draw nothing."""
    pair = random_pair(**changes)
    return replace(pair, models=replace(pair.models, draft_rule="greedy"))


def test_sampling_depends_on_seed_and_request_not_on_drafter_or_neighbours():
    batch = prompts(3, seed=15)
    how = {"max_new_tokens": NEW, "sampling": Sampling(temperature=1.0)}
    first, second = (generate(one_hot_pair(drafter_seed=s), batch, seed=7, **how) for s in (1, 2))
    assert ids(first) == ids(second)
    assert ids(first) == ids(generate(one_hot_pair(), batch, seed=7, oracle=True, **how))
    assert ids(first) != ids(generate(one_hot_pair(), batch, seed=8, **how))
    swapped = generate(one_hot_pair(), [batch[0], batch[2], batch[1]], seed=7, **how)
    assert swapped[0].token_ids == first[0].token_ids
    drawn = generate(random_pair(), batch, seed=7, **how)  # the default
    assert ids(drawn) != ids(first)
    swapped = generate(random_pair(), [batch[0], batch[2], batch[1]], seed=7, **how)
    assert swapped[0].token_ids == drawn[0].token_ids


def test_float32_matmuls_ask_for_full_precision():
    """On a GPU float32 must mean float32: no dot of the step may be left at the default."""
    pair = random_pair()
    state = new_state(pair.models, Shape(1, 256, 64, 16))
    step = lambda p, s: speculative_step(pair.models, p, s)  # noqa: E731
    jaxpr = str(jax.make_jaxpr(step)(pair.params, state))
    dots = jaxpr.count("dot_general[")
    assert dots > 10
    assert jaxpr.count("HIGHEST, Precision.HIGHEST") + jaxpr.count("precision=HIGHEST") >= dots


def test_the_report_counts_live_steps_only():
    """The tokens of every step, in their order; a sequence that is done takes no more of them."""
    pair, batch = unit_head(random_pair()), prompts(2, seed=17)
    text = generate(pair, [batch[0]], max_new_tokens=NEW)[0].token_ids
    pair = replay_pair(pair, batch[0] + text)
    shape = Shape(2, 256, 64, 16)
    programs = compile_programs(pair.models, pair.params, shape)
    state = new_state(pair.models, shape)
    for b, (prompt, new) in enumerate(zip(batch, (NEW, 5), strict=True)):
        request = make_request(shape, prompt, Decoding(max_new_tokens=new), 7, jax.random.key(0))
        state = programs.prefill(pair.params, state, jnp.int32(b), request)
    _, report = programs.run(pair.params, state, jnp.int32(1000), jnp.zeros(2, bool))
    lengths = [np.asarray(report.acceptance_lengths[b, : report.steps[b]]) for b in range(2)]
    assert lengths[0].tolist() == [8, 8, 8, 8, 7]  # 39 tokens by a drafter that knows them
    assert lengths[1].sum() == 4 and lengths[1].all()
    assert not np.asarray(report.acceptance_lengths[1, report.steps[1] :]).any()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"seed": 2**32}, "seed 4294967296 must be a whole number within 0 … 4294967295"),
        ({"seed": -1}, "seed -1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"stop_when": lambda new: 0}, "stop_when returned 0: None, or a number within 1 … 1"),
        ({"stop_when": lambda new: -3}, "stop_when returned -3"),
        ({"stop_when": lambda new: len(new) + 1}, "stop_when returned"),
    ],
)
def test_what_no_driver_can_do_is_refused(how, named):
    pair = random_pair()
    with pytest.raises(ValueError, match=named):
        list(stream(pair, [1, 2], **how))
    with pytest.raises(ValueError, match=named.replace("1 … 1", "1 … ")):
        generate(pair, [[1, 2]], **how)


def test_a_batch_ends_within_the_indices():
    check_keys(2**32 - 1, (2**32 - 2, 2**32 - 1), 1)
    for first, named in ((2**32 - 1, 2**32), (-1, -1)):
        with pytest.raises(ValueError, match=f"index {named} must be"):
            generate(random_pair(), [[1], [2]], first_index=first)


def test_numbers_that_are_not_whole_and_what_is_no_pair_are_refused():
    """In a process of its own: here the tests' type checks would speak first."""
    code = """
from jflash.checks import check_keys, check_request
from jflash.records.decoding import Decoding
from jflash.models.decoder import Target
from jflash.pair import Models
from jflash.devices.mesh import tensor_mesh
from jflash import generate, stream
from tests.support.pairs import target_config
models = Models(Target(target_config()), None, 1)
half = Decoding(max_new_tokens=2.5)
for call in (
    lambda: check_keys(0.5, (), 1),
    lambda: check_request(models, [1], half),
    lambda: check_request(models, [1, 1.5], Decoding()),
    lambda: check_request(models, "hi", Decoding()),
    lambda: check_request(models, 7, Decoding()),
    lambda: check_request(models, [1], Decoding(stop_token_ids=[-1])),
    lambda: Decoding(stop_token_ids=2),
    lambda: check_keys(1, (), "32"),
    lambda: check_keys(1, (), 1.5),
    lambda: Models(Target(target_config()), None, "1"),
    lambda: tensor_mesh("2"),
    lambda: generate("Qwen/Qwen3-8B", [[1]]),
    lambda: next(stream(None, [1])),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ids = "token ids must be whole numbers"
    assert done.stdout.splitlines() == [
        "seed 0.5 must be a whole number within 0 … 4294967295",
        "max_new_tokens must be a whole number, got 2.5",
        f"{ids}: 'float' object cannot be interpreted as an integer",
        f"{ids}: 'str' object cannot be interpreted as an integer",
        "the prompt 7 is no list of token ids",
        "stop token id -1 is outside the vocabulary of 67 tokens",
        "stop_token_ids 2 must be a list of token ids",
        "prefill_chunk '32' must be a whole number",
        "prefill_chunk 1.5 must be a whole number",
        "block size '1' must be a whole number",
        "tensor parallel '2' must be a whole number",
        "pair 'Qwen/Qwen3-8B' must be a Pair: jflash.load_pair(target, drafter)",
        "pair None must be a Pair: jflash.load_pair(target, drafter)",
    ]
