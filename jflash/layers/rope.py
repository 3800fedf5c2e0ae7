"""Rotary embedding: frequencies, scaled for long contexts as transformers does, and angles.

This file knows no checkpoint: `jflash.io` reads the numbers. Axes: B batch, T tokens, H head dim.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.records.specs import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies [H/2] in float32, scaled as the config says; 0 where nothing turns."""
    if rope.rotary_dim is not None and rope.rotary_dim < head_dim:
        turning = rope_frequencies(replace(rope, rotary_dim=None), rope.rotary_dim)
        return np.pad(turning, (0, (head_dim - rope.rotary_dim) // 2))
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    inverse = inverse.astype(np.float32)
    match rope.scaling:
        case None:
            return inverse
        case ProportionalScaling():
            turning = np.arange(len(inverse)) < rope.scaling.turning
            return np.where(turning, inverse / np.float32(rope.scaling.factor), np.float32(0))
        case LinearScaling():
            kept = 0.0
        case Llama3Scaling():
            kept = _short_waves(rope.scaling, inverse)
        case YarnScaling():
            kept = _fast_turns(rope.scaling, rope.theta, head_dim)
    slowed = (1 - kept) * inverse / rope.scaling.factor
    return (slowed + kept * inverse).astype(np.float32)


def _short_waves(s: Llama3Scaling, inverse: np.ndarray) -> np.ndarray:
    """The share of each frequency that stays: 0 for long waves, 1 for short ones, in proportion in
    between."""
    wavelength = 2 * np.pi / inverse
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    return np.clip(smooth, 0, 1)


def _fast_turns(s: YarnScaling, theta: float, head_dim: int) -> np.ndarray:
    """The share of each frequency that stays: 1 for those that turn `beta_fast` times within the
    original context, 0 for those that turn `beta_slow` times, in proportion in between."""

    def dimension(turns: float) -> float:
        waves = s.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    return 1 - np.clip(ramp, 0, 1)


def rope_angles(
    positions: Int[Array, "B T"], rope: RopeConfig | None, head_dim: int
) -> tuple[Float[Array, "B T _"], Float[Array, "B T _"]]:
    """Cosines and sines [B, T, H/2] in float32 (Llama's layout: i is paired with i + H/2).

    YaRN's attention factor is in both. Without a `rope` nothing turns.
    """
    if rope is None:
        still = jnp.zeros((*positions.shape, head_dim // 2))
        return still + 1, still
    angle = positions[:, :, None] * rope_frequencies(rope, head_dim)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.attention_factor != 1:
        turning = np.arange(head_dim // 2) < (rope.rotary_dim or head_dim) // 2
        factor = np.where(turning, np.float32(rope.scaling.attention_factor), np.float32(1))
        return cos * factor, sin * factor
    return cos, sin
