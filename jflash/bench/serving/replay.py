"""A random pair whose acceptances and confidences are those of a recorded pair, step by step.

The work of a step stays: both models run, and their products are read; only what they choose, and
how sure the drafter is, are replaced. No option of a decoding command leads here.

A token names the recorded step that follows it: its id modulo the number of steps. So the anchor of
a block tells both models which step is replayed, and the bonus token names the next one.

Axes: B batch, W block width, D = W - 1 drafts, R packed rows, N recorded steps, V vocabulary.
"""

from dataclasses import replace

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Int

from jflash.bench.serving.recording import Recording
from jflash.layers.passes import Block
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models
from jflash.rows import PackedBlock

DIGITS = 3  # of a token's id, at base 256: whole numbers that bfloat16 holds
SPREAD = 2_654_435_761  # Knuth's multiplier: neighbouring positions give distant numbers


class ReplayTarget(Target):
    """Its choices confirm as many drafts as the recorded step accepted, of those it verifies."""

    recording: Recording

    def __call__(self, tokens, positions, caches, over, *rest):
        hidden, features, caches = super().__call__(tokens, positions, caches, over, *rest)
        if not isinstance(over, Block | PackedBlock):
            return hidden, features, caches
        choices = self._choices(tokens, positions, over)
        digits = [choices >> 8 * i & 255 for i in range(DIGITS)]
        # The choice travels beside the hidden state that it stands for.
        beside = jnp.stack(digits, axis=-1).astype(hidden.dtype)
        return jnp.concatenate([hidden, beside], axis=-1), features, caches

    def best(self, hidden, backend="xla"):
        width = self.config.hidden_size
        real = super().best(hidden[..., :width], backend)
        if hidden.shape[-1] == width:
            return real
        digits = hidden[..., width:].astype(jnp.int32)
        forced = sum(digits[..., i] << 8 * i for i in range(DIGITS))
        return jnp.where(real >= 0, forced, real)  # always forced, but the product is computed

    def raw_logits(self, hidden, backend="xla"):
        return super().raw_logits(hidden[..., : self.config.hidden_size], backend)

    @nn.nowrap
    def _choices(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], over: Block | PackedBlock
    ) -> Int[Array, "B T"]:
        """Each row's token: the next row's draft where it is accepted, else a new one."""
        if isinstance(over, PackedBlock):
            rows = jnp.arange(len(tokens))
            place = over.rows.place[:, None]
            anchor = tokens[jnp.maximum(rows - over.rows.place, 0)]
            draft = jnp.roll(tokens, -1, axis=0)
            sequence = over.rows.sequence[:, None]
            last = sequence != jnp.roll(sequence, -1, axis=0)  # the next row is another block's
        else:
            place = jnp.arange(tokens.shape[1])[None]
            anchor, draft = tokens[:, :1], jnp.roll(tokens, -1, axis=1)
            sequence = jnp.arange(len(tokens))[:, None]
            last = place == tokens.shape[1] - 1
        step = _step_of(self.recording, anchor)
        accepted = jnp.asarray(self.recording.accepted, jnp.int32)[step]
        after = (step + 1) % len(self.recording.accepted)
        noise = _noise(positions * 4096 + sequence)
        bonus = _token(self.recording, self.config.vocab_size, after, noise)
        other = _token(self.recording, self.config.vocab_size, after, noise + 1)
        bonus = jnp.where(bonus == draft, other, bonus)
        return jnp.where((place < accepted) & ~last, draft, bonus)


class ReplayDrafter(Drafter):
    """It is as sure of a draft as the recorded one was at its place."""

    recording: Recording

    @nn.nowrap
    def surest(self, anchor, best, sure):
        vocab, places = self.config.vocab_size, jnp.arange(best.shape[1])
        table = jnp.asarray(self.recording.confidences, jnp.float32)
        recorded = table[_step_of(self.recording, anchor), : best.shape[1]]
        drafted = _noise(anchor[:, None] * 16 + places) % vocab
        made = (best >= 0) & (sure > 0)  # always, but the head's product is computed
        return jnp.where(made, drafted, best), jnp.where(made, recorded, sure)


def replaying(models: Models, recording: Recording) -> Models:
    """The models with a recording's acceptances; ValueError unless their blocks are as wide."""
    if models.drafter is None or models.block_size != recording.width:
        raise ValueError(
            f"the recording is of blocks of {recording.width}, the drafter of {models.block_size}"
        )
    vocab = models.target.config.vocab_size
    if 2 * len(recording.accepted) > vocab:
        raise ValueError(f"{len(recording.accepted)} recorded steps for {vocab} tokens: too many")
    target = ReplayTarget(models.target.config, recording)
    return replace(models, target=target, drafter=ReplayDrafter(models.drafter.config, recording))


def _step_of(recording: Recording, token: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
    return token % len(recording.accepted)


def _noise(x: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
    """A number of 24 bits for each."""
    mixed = x.astype(jnp.uint32) * jnp.uint32(SPREAD)
    return ((mixed ^ mixed >> 15) >> 8).astype(jnp.int32)


def _token(recording: Recording, vocab: int, step: Array, noise: Array) -> Array:
    """A token that names `step`."""
    count = len(recording.accepted)
    return step + noise % (vocab // count) * count
