"""Targets whose layers differ: windows, sinks, soft caps, scales, and states of other kinds.

The text is checked against one pass over all of it, by the float32 reference, without any ring.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jflash.generate import Pair, generate
from jflash.layers.cache import LayerCache
from jflash.layers.passes import Block, Chunk
from jflash.models.decoder import Target
from jflash.records.config import TargetConfig
from jflash.records.decoding import Decoding
from jflash.records.kernels import Kernels
from jflash.serving.batch import Job, serve
from jflash.speculative import apply
from pallas_kernels.matmul import Unsummed, summed
from tests.support.pairs import prompts, random_pair, random_params, replay_pair, target_config

NEW, LENGTH = 40, 300  # new tokens; those of the longest text, or more
LAYERS: tuple[dict[str, Any], ...] = (
    {"window": 20, "sinks": True},
    {"rope": None, "softcap": 2.0, "scale": 0.4},
    {"window": 9},
)
# One option less each: every one of them must show in the text.
WITHOUT = {
    "the first window": ({"window": None}, {}, {}),
    "a shorter window": ({}, {}, {"window": 8}),
    "sinks": ({"sinks": False}, {}, {}),
    "the soft cap": ({}, {"softcap": None}, {}),
    "the scale": ({}, {"scale": 0.25}, {}),
    "positions": ({}, {"rope": target_config().mixers[1].rope}, {}),
}


def mixed_pair() -> Pair:
    pair, config = random_pair(), target_config(num_layers=3).attending(*LAYERS)
    models = replace(pair.models, target=Target(config))
    return Pair(models, pair.params._replace(target=random_params(config, 0)))


def by_one_pass(config: TargetConfig, params: Any, text: list[int]) -> np.ndarray:
    """The target's choice after every token of a text that is one causal block.

    Texts are padded to one length: each operation is compiled for it once.
    """
    count = LENGTH
    ids = jnp.asarray([text + [0] * (count - len(text))])
    caches = tuple(
        LayerCache(*(jnp.zeros((1, count, m.num_kv_heads, m.head_dim)) for _ in range(2)))
        for m in config.mixers
    )
    over = Block(jnp.zeros(1, int), jnp.full(1, count), Kernels(attention="reference"))
    positions = jnp.arange(count)[None]
    hidden, *_ = apply(Target(config), params, ids, positions, caches, over)
    logits = apply(Target(config), params, hidden, method="logits")
    return np.asarray(logits[0, : len(text)].argmax(axis=-1))


def test_layers_of_a_target_differ():
    """Prompts longer and shorter than the rings, drafts of all kinds; every option is seen."""
    pair = mixed_pair()
    config = pair.models.target.config
    asked = [*prompts(1, seed=1, low=250, high=260), *prompts(2, seed=2)]
    plain = generate(pair, asked, max_new_tokens=NEW)
    oracle = generate(pair, asked, max_new_tokens=NEW, oracle=True)
    chunks = generate(pair, asked, max_new_tokens=NEW, prefill_chunk=48)
    seen = set()
    for i, prompt in enumerate(asked):
        ids = plain[i].token_ids
        assert ids == oracle[i].token_ids == chunks[i].token_ids
        text = [*prompt, *ids]
        choices = by_one_pass(config, pair.params.target, text)
        assert choices[len(prompt) - 1 : -1].tolist() == ids
        for name, changes in WITHOUT.items():
            if name in seen:
                continue
            other = by_one_pass(config.attending(*changes), pair.params.target, text)
            seen |= {name} if other[len(prompt) - 1 : -1].tolist() != ids else set()
    assert seen == set(WITHOUT)


def test_a_targets_ring_holds_a_prompts_chunk():
    pair = mixed_pair()
    states = pair.models.target.empty_states(2, 512, 128, "float32")
    assert [state.k.shape[1] for state in states] == [192, 512, 192]
    assert [state.wraps for state in states] == [True, False, True]


class Decay(NamedTuple):
    """A recurrent state: the sum at the block's start, and the block's rows to be replayed."""

    start: Any  # [B, D]
    rows: Any  # [B, R, D]
    count: Any  # [B], how many of them were kept

    def committed(self, count):
        return self._replace(count=count)

    def cleared(self, slot):
        return self._replace(start=self.start.at[slot].set(0), count=self.count.at[slot].set(0))


class NeverCommitted(Decay):
    def committed(self, count):
        return self


class NeverCleared(Decay):
    def cleared(self, slot):
        return self


def added(start, rows, kept):
    """The sum before and after each row of [B, T, D]; rows that are not `kept` add nothing."""

    def one(total, row):
        x, keep = row
        total = jnp.where(keep[:, None], 0.95 * total + 0.3 * x, total)
        return total, total

    end, sums = jax.lax.scan(one, start, (jnp.moveaxis(rows, 1, 0), kept.T))
    return end, jnp.moveaxis(sums, 0, 1)


class DecayLayer(nn.Module):
    """A layer without keys and values: x + a decaying sum of all rows up to it."""

    width: int
    state: type[Decay]

    @nn.nowrap
    def empty_state(self, batch: int, capacity: int, rows: int, dtype):
        zeros = jnp.zeros((batch, self.width), dtype), jnp.zeros((batch, rows, self.width), dtype)
        return self.state(*zeros, jnp.zeros(batch, jnp.int32))

    def __call__(self, given, positions, state, over):
        x = summed(given)
        row = jnp.arange(x.shape[1])
        if isinstance(over, Chunk):
            kept = (over.offset + row < over.length)[None]
            end, sums = added(state.start[over.slot][None], x, kept)
            state = state._replace(start=state.start.at[over.slot].set(end[0]))
            return x, Unsummed(None, x + sums), state
        before = state.rows[:, : x.shape[1]]
        start, _ = added(state.start, before, row < state.count[:, None])
        _, sums = added(start, x, jnp.ones(x.shape[:2], bool))
        rows = state.rows.at[:, : x.shape[1]].set(x)
        state = state._replace(start=start, rows=rows, count=jnp.zeros_like(state.count))
        return x, Unsummed(None, x + sums), state


class HybridTarget(Target):
    """The middle layer is recurrent."""

    state: type[Decay] = Decay

    @nn.nowrap
    def make_layer(self, i: int) -> nn.Module:
        return DecayLayer(self.config.hidden_size, self.state) if i == 1 else super().make_layer(i)


def hybrid(pair: Pair, state: type[Decay] = Decay) -> Pair:
    target = HybridTarget(pair.models.target.config, state)
    return replace(pair, models=replace(pair.models, target=target))


def test_a_recurrent_layer_keeps_what_was_accepted():
    """Any acceptance, refilled slots: plain decoding's text; without the protocol it is another."""
    pair, asked = random_pair(), prompts(5, seed=3)
    decoding = Decoding(max_new_tokens=NEW)
    plain = [generate(hybrid(pair).plain(), [p], decoding)[0].token_ids for p in asked]

    def replayed(state: type[Decay]) -> list[list[int]]:
        """A drafter that knows the first text, so that blocks of all lengths are accepted."""
        wrong = [t if i % 11 else (t + 1) % 67 for i, t in enumerate([*asked[0], *plain[0]])]
        knowing = hybrid(replay_pair(pair, wrong), state)
        jobs = [Job(i, prompt, decoding) for i, prompt in enumerate(asked)]
        answers = {job.index: g for job, g in serve(knowing, jobs, batch_size=2)}
        if state is Decay:  # blocks are kept whole and in part
            lengths = answers[0].acceptance_lengths[:-1]
            assert max(lengths) == knowing.models.block_size > min(lengths)
        return [answers[i].token_ids for i in range(len(asked))]

    assert replayed(Decay) == plain
    assert replayed(NeverCommitted) != plain
    assert replayed(NeverCleared) != plain


def test_training_refuses_what_its_attention_lacks():
    from tests.support.logits import target_logits

    config = target_config(num_layers=1).attending({"softcap": 3.0})
    with pytest.raises(ValueError, match="no training has a soft cap"):
        target_logits(Target(config), random_params(config, 0), [1, 2, 3])
