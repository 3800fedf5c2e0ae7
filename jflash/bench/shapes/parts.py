"""What the published shapes of all families are made of."""

from typing import Any, NamedTuple

from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import RopeConfig


class ModelShape(NamedTuple):
    """A target and the drafter published for it."""

    target: TargetConfig
    drafter: DrafterConfig


def trunk_sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, **other: Any) -> Any:
    """The sizes that a target shares with its drafter; Qwen3's, but for `other`."""
    sizes = dict(hidden_size=hidden, intermediate_size=intermediate)
    attention = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, qk_norm=True)
    numbers = dict(vocab_size=151936, rms_norm_eps=1e-6, max_position_embeddings=40960)
    return sizes | attention | numbers | {"rope": RopeConfig(theta=1e6, scaling=None)} | other


def drafter_of(
    trunk: Any, layers: int, block: int, mask: int, taps: tuple[int, ...], target_layers: int
) -> DrafterConfig:
    return DrafterConfig.alike(
        **trunk,
        causal=False,
        num_layers=layers,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=target_layers,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )
