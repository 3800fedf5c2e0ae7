"""Muse-Glimmer's published sizes, and the DFlash 2 drafter for it."""

from dataclasses import replace

from jflash.bench.shapes.parts import ModelShape, drafter_of, trunk_sizes
from jflash.records.config import TargetConfig, second_version
from jflash.records.specs import RopeConfig


def muse_glimmer_30b() -> ModelShape:
    """Muse-Glimmer-30B: every fourth layer, the last one too, has no window and no positions.

    The drafter's window and its selector are those of other published drafters.
    """
    rope, multiplier = RopeConfig(theta=5e5, scaling=None), 0.19611613513818404
    shared = dict(vocab_size=202048, max_position_embeddings=131072, rms_norm_eps=1e-5, rope=rope)
    target = TargetConfig.alike(
        **trunk_sizes(6656, 19968, 32, 2, **shared),
        num_layers=52, scale=3.87 * 128**-0.5, window=2048, weightless=True, gated=True,
        sandwich=True, norm_shift=1.0, tie_embeddings=False, embedding_norm=True,
        logit_multiplier=multiplier, logit_softcap=20.0, unread_ids=(200092, 200091),
    )  # fmt: skip
    whole = {"window": None, "rope": None}
    target = target.attending(*[whole if i % 4 == 3 else {} for i in range(52)])
    target = replace(target, layers=tuple(replace(x, eps_after=1e-8) for x in target.layers))
    trunk = trunk_sizes(6656, 19968, 32, 8, **shared)
    drafter = drafter_of(trunk, 5, 16, 201818, (1, 13, 25, 37, 49), 52)
    drafter = replace(drafter, output_multiplier=multiplier, final_logit_softcapping=20.0)
    near = {"window": 2048, "causal": False}
    return ModelShape(target, second_version(drafter.attending(*[near] * 5)))
