"""Targets with gated delta nets: a state that is rolled back exactly, on a CPU bit for bit.

Widths, batches, capacities and chunks are in test_one_arithmetic; here are the state itself, slots
that are refilled, short prompts, and what is refused.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.budget import row_choice
from jflash.checks import check_request
from jflash.compiled.programs import compile_programs
from jflash.compiled.shape import Shape, make_request, new_state
from jflash.generate import Pair, generate
from jflash.layers.cache import DeltaCache
from jflash.layers.passes import Block
from jflash.models.decoder import Target
from jflash.pair import Models
from jflash.proof.faults import HYBRIDS, planted
from jflash.records.decoding import Decoding
from jflash.records.kernels import AUTO
from jflash.serving.engine import Engine
from jflash.serving.request import Request
from pallas_kernels import gated_delta
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import (
    HYBRID,
    drafter_config,
    hybrid_pair,
    knowing,
    prompts,
    random_pair,
    target_config,
)

pytestmark = pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
NEW = 40


def final_states(pair: Pair, prompt: list[int], new: int):
    """The text, and the states of the delta nets before the border at or before its last token."""
    shape = Shape(2, 256, 64, 16)
    programs = compile_programs(pair.models, pair.params, shape)
    state = new_state(pair.models, shape)
    decoding = Decoding(max_new_tokens=new)
    request = make_request(shape, prompt, decoding, pair.models.max_accept, jax.random.key(0))
    state = programs.prefill(pair.params, state, jnp.int32(1), request)
    state, report = programs.run(pair.params, state, jnp.int32(1000), jnp.asarray([True, False]))
    length = int(report.length[1])
    caches = [cache for cache in state.target_cache if isinstance(cache, DeltaCache)]
    return report.tokens[1, :length].tolist(), [_settled(c, length - 1) for c in caches]


def _settled(cache: DeltaCache, start: int) -> np.ndarray:
    """Sequence 1's state before the border at or before `start`, by a call that adds nothing."""
    memory = jax.tree.map(lambda x: x[1:], cache.memory)
    none = jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape[2:])), memory.rows)
    zero = jnp.zeros(1, jnp.int32)
    span = gated_delta.Span(zero + start, zero, zero)
    out, state = jax.jit(gated_delta.gated_delta, static_argnames="backend")(
        none.k, none, memory, span, backend="cpu"
    )
    gate = gated_delta.Gate(out.reshape(1, 1, -1), 0, out[0, 0, 0], 1e-6)
    memory = memory._replace(state=state)
    _, memory = gated_delta.finish(out, gate, none, memory, span, backend="cpu")
    assert int(memory.base[0]) == start // gated_delta.CHUNK * gated_delta.CHUNK
    return np.asarray(memory.state[0])


def test_a_generated_texts_state_is_that_of_the_same_text_as_a_prompt():
    """By plain steps, by blocks of which parts are taken back, and by the chunks of a prompt."""
    pair, [prompt] = hybrid_pair(), prompts(1, seed=4, low=21, high=22)
    text, want = final_states(pair.plain(), prompt, NEW)
    assert len(set(text[len(prompt) :])) > 5 and all(np.abs(x).max() > 0.1 for x in want)
    replayed = knowing(pair, prompt, text[len(prompt) :])
    same, blocks = final_states(replayed, prompt, NEW)
    longer, as_prompt = final_states(pair.plain(), text, 1)
    assert same == text == longer[:-1]
    for other in (blocks, as_prompt):
        for mine, theirs in zip(other, want, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_refilled_slots_and_short_prompts_give_plain_decodings_text():
    """Prompts of 1 to 3 tokens are shorter than the convolution; slots are used again. Chunks of
    the long prompt take turns with the steps of other slots, which must not touch its state."""
    pair = hybrid_pair()
    asked = [p for low in (1, 2, 3, 170) for p in prompts(1, seed=low, low=low, high=low + 1)]
    decoding = Decoding(max_new_tokens=NEW)
    plain = [generate(pair.plain(), [p], decoding, prefill_chunk=32)[0].token_ids for p in asked]
    replayed = knowing(pair, asked[0], plain[0])
    requests = [Request(prompt_ids=prompt, max_tokens=NEW) for prompt in asked]
    with Engine(
        replayed, max_batch=2, max_context=256, prefill_chunk=32, prefill_between=32,
        kinds=("greedy",),
    ) as engine:  # fmt: skip
        found = engine.generate(requests)
    assert [result.token_ids for result in found] == plain
    lengths = found[0].acceptance_lengths[:-1]
    assert max(lengths) > min(lengths)


def test_as_many_rows_of_each_block_give_plain_decodings_text(monkeypatch):
    """The drafts are right to some place of a block; a step accepts those that it verifies. Chosen
    rows too, by an engine and by `generate`."""
    pair, asked = hybrid_pair(), prompts(2, seed=6, low=20, high=40)
    decoding = Decoding(max_new_tokens=NEW)
    plain = [found.token_ids for found in generate(pair.plain(), asked, decoding)]
    replayed = knowing(pair, asked[0], plain[0])
    width = pair.models.block_size
    for rows, most in ((2, 1), (7, 3), (2 * width, 7)):  # every seventh draft is wrong
        fewer = replace(replayed, models=replace(replayed.models, rows=rows))
        found = generate(fewer, asked, decoding)
        assert [each.token_ids for each in found] == plain
        assert max(found[0].acceptance_lengths) == most, rows
        assert len(found[0].acceptance_lengths) >= -(-(NEW - 1) // most)
    monkeypatch.setattr(row_choice, "WIDTHS", (1, 2))
    monkeypatch.setattr(row_choice, "STEPS", 3)
    chosen = replace(replayed, models=replace(replayed.models, rows=AUTO))
    found = generate(chosen, asked, decoding)
    assert [each.token_ids for each in found] == plain
    requests = [Request(prompt_ids=prompt, max_tokens=NEW) for prompt in asked]
    with Engine(chosen, max_batch=2, max_context=256, kinds=("greedy",)) as engine:
        found, steps = engine.generate(requests), engine.stats().steps_by_rows
    assert [each.token_ids for each in found] == plain
    assert set(steps) == {2, 4, 2 * width} and sum(steps.values()) > 0


def test_a_fault_that_is_planted_is_right_up_to_rounding():
    """Chunks that begin at the anchor: the law's check has to catch other bits, not other text."""
    pair = hybrid_pair()
    tokens = jnp.asarray(prompts(1, seed=5, low=20, high=21)[0])[None]

    def block(models, caches, start, end):
        over = Block(jnp.full(1, start), jnp.full(1, end - start), models.kernels)
        rows = tokens[:, start:end], jnp.arange(start, end)[None]
        run = jax.jit(lambda params, caches: models.target.apply(params, *rows, caches, over))
        return run({"params": pair.params.target}, caches)

    empty = pair.models.target.empty_states(1, 256, 8, "float32")
    caches = block(pair.models, empty, 0, 12)[-1]
    sound, faulty = (
        block(models, caches, 12, 20)[0]
        for models in (pair.models, planted(pair.models, HYBRIDS[0]))
    )
    np.testing.assert_allclose(sound, faulty, atol=1e-4)
    assert np.any(sound != faulty)


def test_what_a_hybrid_cannot_do_is_refused():
    config = target_config(**HYBRID, unread_ids=(65,))
    with pytest.raises(ValueError, match="block size 17 is above 16"):
        Models(Target(config), None, 17)
    pair = random_pair()
    with pytest.raises(ValueError, match="token id 65 stands for an image"):
        check_request(Models(Target(config)), [1, 65], Decoding())
    wide = drafter_config(block_size=20)
    assert Models(Target(config), type(pair.models.drafter)(wide), 16).block_size == 16
