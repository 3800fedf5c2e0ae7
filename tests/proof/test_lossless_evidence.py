"""What the lossless check records and compares: every bit counts, and a fault that is one."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.generate import generate
from jflash.pair import Models, Params
from jflash.proof import width_1 as lossless_width_1
from jflash.proof.cases import case_shape
from jflash.proof.differences import (
    compare,
    compared_things,
    difference_text,
    differences,
    first_difference,
)
from jflash.proof.faults import attend_in_parts, by_length
from jflash.proof.lossless import (
    CORRUPTION,
    Mode,
    Task,
    checksums,
    compile_executable,
    corrupted,
    decode,
    prefilled,
)
from jflash.records.decoding import Decoding
from pallas_kernels.block_attention import block_attention
from tests.support.lossless_case import small_case
from tests.support.pairs import random_pair

BATCH = 2


@pytest.fixture(scope="module")
def case():
    return small_case()


@pytest.fixture(scope="module")
def decoded(case):
    """An executable, a task and its oracle's run."""
    executable = compile_executable(case.models, case.params, case_shape(case, BATCH))
    task = Task(case.prompts(BATCH, 0), Decoding(max_new_tokens=40))
    oracle = Mode("oracle", case.params, accept=False)
    return SimpleNamespace(
        executable=executable, task=task, oracle=oracle, run=decode(executable, oracle, task)
    )


def test_every_bit_of_a_row_reaches_its_checksums():
    logits = np.random.default_rng(0).standard_normal((1, 2, 300)).astype(np.float32)
    before = np.asarray(checksums(jnp.asarray(logits)))
    assert (before[0, 0] != before[0, 1]).all()
    for place in (0, 1, 150, 299):
        for bit in (0, 12, 31):
            changed = logits.copy()
            changed.view(np.uint32)[0, 1, place] ^= np.uint32(1 << bit)
            after = np.asarray(checksums(jnp.asarray(changed)))
            assert (after[0, 1] != before[0, 1]).all()
            assert (after[0, 0] == before[0, 0]).all()
    swapped = logits.copy()
    swapped[0, 1, [3, 4]] = logits[0, 1, [4, 3]]
    assert (np.asarray(checksums(jnp.asarray(swapped)))[0, 1] != before[0, 1]).all()


def test_evidence_is_the_logits_of_committed_rows(case, decoded):
    """Every index after the prefill's token has its row, and the tokens are generate's."""
    run, task = decoded.run, decoded.task
    wants = generate(
        random_pair(), task.prompts, max_new_tokens=40, oracle=True,
        capacity=decoded.executable.shape.capacity,
    )  # fmt: skip
    for b, (prompt, want) in enumerate(zip(task.prompts, wants, strict=True)):
        end = int(run.sequences.length[b])
        assert np.asarray(run.sequences.tokens[b, len(prompt) : end]).tolist() == want.token_ids
        recorded = np.flatnonzero(np.isfinite(run.evidence.top[b]))
        assert recorded.tolist() == list(range(len(prompt) + 1, end))
    assert int(run.evidence.not_top.sum()) == 0
    probe = np.asarray([len(task.prompts[0]) + 7, -1])
    probed = decode(decoded.executable, decoded.oracle, task, probe)
    row = probed.evidence.probed[0]
    assert int(jnp.argmax(row)) == int(run.sequences.tokens[0, probe[0]])
    assert float(jnp.max(row)) == float(run.evidence.top[0, probe[0]])
    assert np.isneginf(probed.evidence.probed[1]).all()


def test_one_bit_of_any_compared_thing_is_found(case, decoded):
    """A flipped bit in tokens, checksums or a cache is one difference, named and placed."""
    run, task = decoded.run, decoded.task
    lengths = jnp.asarray(task.prompt_lengths)
    things = compared_things(case.models, own_drafter=True)
    layers = case.models.target.config.num_layers
    assert len(things) == 2 + layers + case.models.drafter.config.num_layers
    end = int(run.sequences.length[1])

    def flipped(cache, layer, index):
        """The lowest bit of one value of sequence 1."""
        v = np.array(cache[layer].v)
        v.view(np.uint32)[1, index, 0, 3] ^= 1
        changed = list(cache)
        changed[layer] = cache[layer]._replace(v=jnp.asarray(v))
        return tuple(changed)

    def found(state=None, evidence=None, own_drafter=True):
        other = run._replace(state=state or run.state, evidence=evidence or run.evidence)
        result = compare(run, other, lengths, own_drafter, 8)
        count, first = np.asarray(result.count), np.asarray(result.first)
        return [(things[i], int(n), int(first[i, 1])) for i, n in enumerate(count) if n]

    state, evidence = run.state, run.evidence
    assert found() == []
    tokens = state.sequences.tokens.at[1, end - 2].add(1)
    assert found(state.with_sequences(tokens=tokens)) == [("tokens", 1, end - 2)]
    sums = evidence.checksums.at[1, end - 1, 1].add(1)
    assert found(evidence=evidence._replace(checksums=sums)) == [("logits", 1, end - 1)]
    longer = state.with_sequences(length=state.sequences.length + jnp.asarray([0, 1]))
    assert found(longer) == [("tokens", 1, end)]
    assert int(compare(run, run._replace(state=longer), lengths, True, 8).unrecorded) == 1
    target = state._replace(target_cache=flipped(state.target_cache, 1, end - 2))
    assert found(target) == [("target K/V of layer 1", 1, end - 2)]
    drafter = state._replace(drafter_cache=flipped(state.drafter_cache, 1, 0))
    assert found(drafter) == [("context K/V of layer 1", 1, 0)]
    assert found(drafter, own_drafter=False) == []
    # The newest token has no K/V yet: what lies there is garbage.
    assert found(state._replace(target_cache=flipped(state.target_cache, 1, end - 1))) == []


def test_kv_alone_is_told_with_the_logits_computed_from_it(case, decoded):
    run, task = decoded.run, decoded.task
    index = int(task.prompt_lengths[0]) + 3
    cache = list(run.state.target_cache)
    cache[1] = cache[1]._replace(k=cache[1].k.at[0, index].add(1))
    other = run._replace(state=run.state._replace(target_cache=tuple(cache)))
    found = differences(decoded.executable, run, decoded.oracle, other, task)
    first = first_difference(decoded.executable, decoded.oracle, decoded.oracle, task, found)
    assert (first["sequence"], first["index"], first["logits_index"]) == (0, index, index + 1)
    assert first["differs"] == ["target K/V of layer 1"]
    assert first["oracle"] == first["other"]
    assert "these rows are equal" in difference_text(first)


def test_wrong_drafts_are_different_tokens_and_as_many_as_said():
    text = jax.random.randint(jax.random.key(0), (50, 400), 0, 67)
    wrong = np.asarray(corrupted(text, jax.random.key(1), 67)) != np.asarray(text)
    assert abs(wrong.mean() - CORRUPTION) < 4 * (CORRUPTION * (1 - CORRUPTION) / wrong.size) ** 0.5
    again = np.asarray(corrupted(text, jax.random.key(2), 67)) != np.asarray(text)
    assert (wrong != again).mean() > CORRUPTION


def test_the_fault_is_right_up_to_rounding():
    """Else any test would see it, and it would not stand for kernels that split by length."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, [(3, 5, 4, 16), (3, 64, 2, 16), (3, 64, 2, 16)], strict=True)
    )
    lengths, widths = jnp.asarray([0, 20, 59]), jnp.asarray([5, 3, 5])
    want = block_attention(
        q, k, v, lengths, widths, causal=True, scale=16**-0.5, backend="reference"
    )
    got = attend_in_parts(q, k, v, lengths, widths, by_length(lengths, widths, 64))
    for b, width in enumerate(widths.tolist()):
        np.testing.assert_allclose(got[b, :width], want[b, :width], atol=2e-6)


def test_width_1_partings_are_where_generate_parts(case, decoded):
    """With another target at width 1 in place of rounding: places, and nats by both logits."""
    narrow = lossless_width_1.compile_narrow(decoded.executable, case.params)
    task = decoded.task._replace(start=prefilled(decoded.executable, decoded.oracle, decoded.task))
    same = lossless_width_1.partings(narrow, decoded.oracle, decoded.run, task)
    assert [(p.tokens, p.differing, p.same) for p in same] == [(39, 0, None)] * BATCH
    assert lossless_width_1.summary(same)["nats_at_width_w"] is None

    norm = case.params.target["norm"]["scale"]
    target = case.params.target | {"norm": {"scale": norm * (1 + jnp.arange(32) / 32)}}
    other = narrow._replace(params=Params(target, None))
    parted = lossless_width_1.partings(other, decoded.oracle, decoded.run, task)
    pair = random_pair()
    alone = replace(pair, models=Models(pair.models.target, None, 1), params=Params(target, None))
    for b, (prompt, part) in enumerate(zip(task.prompts, parted, strict=True)):
        start, end = len(prompt), int(decoded.run.sequences.length[b])
        tokens = np.asarray(decoded.run.sequences.tokens[b, start:end]).tolist()
        # The prefill's token is the right target's: the wrong one goes on from there.
        rest = generate(alone, [[*prompt, tokens[0]]], max_new_tokens=39)[0].token_ids
        assert part.same is not None
        assert rest[: part.same] == tokens[1 : 1 + part.same]
        assert rest[part.same] != tokens[1 + part.same]
        assert part.wide_nats > 0
        assert part.narrow_nats > 0
    told = lossless_width_1.summary(parted)
    assert told["sequences_that_differ"] == BATCH
    assert told["nats_at_width_1"]["most"] == max(p.narrow_nats for p in parted)
