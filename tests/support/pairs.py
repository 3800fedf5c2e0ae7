"""Small random pairs in memory, for tests of the step and its drivers."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jflash.generate import Pair, generate
from jflash.layers.passes import Projected
from jflash.layers.rope import rope_angles
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import abstract_params
from jflash.pair import Models, Params
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.kernels import XLA, Kernels
from jflash.records.specs import DeltaSpec, MoeSpec, ProportionalScaling, RopeConfig
from pallas_kernels.heads_to_cache import Heads

TRUNK = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(theta=1e4, scaling=None),
    "max_position_embeddings": 1024,
    "qk_norm": True,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
}
DELTA = DeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12, taps=4)
HYBRID = {
    "deltas": (0,),
    "gated": True,
    "norm_shift": 1.0,
    "rope": RopeConfig(theta=1e4, scaling=None, rotary_dim=8),
}


# What Gemma and Muse-Glimmer have: a layer with a window, a gate and norms without weights, and one
# without, which has other heads; sandwich norms, experts beside the MLP, embeddings scaled and
# normed, a multiplier and a cap.
SANDWICH = {
    "sandwich": True,
    "activation": "gelu_tanh",
    "norm_shift": 1.0,
    "embedding_scale": 5.5,
    "embedding_norm": True,
    "logit_multiplier": 0.7,
    "logit_softcap": 20.0,
    "sights": (
        {"window": 24, "gated": True, "weightless": True},
        {
            "rope": RopeConfig(theta=1e5, scaling=ProportionalScaling(turning=3, factor=2.0)),
            "head_dim": 32,
            "num_kv_heads": 1,
            "shared_kv": True,
        },
    ),
    "value_norm": True,
    "layer": {
        "eps_after": 1e-3,
        "scaled": True,
        "beside": MoeSpec(
            num_experts=6,
            experts_per_token=2,
            intermediate_size=24,
            renormalise=True,
            activation="gelu_tanh",
        ),
    },
}


def target_config(**changes) -> TargetConfig:
    """`moe` stands in `sparse` layers, in all by default; a delta net in the layers `deltas`.

    `sights`: other values of some fields of each layer's mixer, `layer` of every layer.
    """
    sights, layer = changes.pop("sights", None), changes.pop("layer", {})
    moe, sparse = changes.pop("moe", None), changes.pop("sparse", None)
    deltas = changes.pop("deltas", ())
    config = TargetConfig.alike(**(TRUNK | {"tie_embeddings": False} | changes))
    mixed = [replace(x, mixer=DELTA) if i in deltas else x for i, x in enumerate(config.layers)]
    config = replace(config, layers=tuple(replace(x, **layer) for x in mixed))
    config = config.attending(*sights) if sights else config
    return config if moe is None else config.with_experts(moe, sparse or range(config.num_layers))


def drafter_config(**changes) -> DrafterConfig:
    """`sights`: other values of some fields of each layer's mixer; else it has one layer."""
    sights = changes.pop("sights", None)
    own = {
        "num_layers": len(sights) if sights else 1,
        "block_size": 8,
        "mask_token_id": 66,
        "target_layer_ids": (0, 1),
        "num_target_layers": 2,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
    }
    config = DrafterConfig.alike(**(TRUNK | own | {"causal": False} | changes))
    return config.attending(*sights) if sights else config


def _numbers(draw, key, shape: tuple[int, ...]) -> np.ndarray:
    """Those of draw(key, shape): the first of a power of two, so that shapes share programs."""
    size = math.prod(shape)
    return np.asarray(draw(key, (1 << (size - 1).bit_length(),)))[:size].reshape(shape)


def random_params(config, seed: int, scale: float = 0.2) -> dict:
    """Large enough weights that greedy text is varied; norms around 1.

    A delta net's state lasts for some tokens: one that forgets at once hides every fault.
    """
    leaves, tree = jax.tree.flatten(abstract_params(config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    random = [
        jnp.asarray(
            2.5 * _numbers(jax.random.uniform, key, leaf.stored) - 2.0
            if leaf.axes == ("value_heads",)
            else 0.5 + _numbers(jax.random.uniform, key, leaf.stored)
            if len(leaf.stored) == 1
            else np.float32(scale) * _numbers(jax.random.normal, key, leaf.stored)
        )
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, random)


def random_pair(seed: int = 0, drafter_seed: int = 1, **drafter_changes) -> Pair:
    """A target of `seed` with a drafter of `drafter_seed`, which agrees with it on little."""
    target, drafter = target_config(), drafter_config(**drafter_changes)
    models = Models(Target(target), Drafter(drafter), drafter.block_size)
    return Pair(models, Params(random_params(target, seed), random_params(drafter, drafter_seed)))


ROWS = 512  # tokens that a replayed text may have


class ReplayDrafter(Drafter):
    """Proposes the rows of a given text: hidden state i is the head's row of the token at i.

    With head rows of length 1 a row's largest logit is its own (Cauchy-Schwarz).
    """

    def setup(self):
        self.rows = self.param("rows", nn.initializers.zeros, (ROWS, TRUNK["hidden_size"]))

    def __call__(self, embeddings, positions, caches, over):
        return self.rows[positions], caches

    def context(self, features, positions, kernels=XLA):
        c = self.config
        mixer = c.mixers[0]
        heads = Heads(
            0, mixer.num_kv_heads, mixer.head_dim, c.rms_norm_eps, (0, 0, mixer.kv_width // 2)
        )
        rows = jnp.zeros((*positions.shape, mixer.kv_width))
        angles = rope_angles(positions, mixer.rope, mixer.head_dim)
        return (Projected(rows[None], None, None, *angles, heads),) * c.num_layers

    def adjust_logits(self, logits):
        return logits


def replay_pair(pair: Pair, text: list[int]) -> Pair:
    """The same target with a drafter that proposes `text` (prompt included) whatever happens."""
    head = pair.params.target["head"]
    ids = jnp.asarray(text + [0] * (ROWS - len(text)))
    models = replace(pair.models, drafter=ReplayDrafter(pair.models.drafter.config))
    return Pair(models, Params(pair.params.target, {"rows": head[ids]}))


def replayed_lengths(pair: Pair, prompt: list[int], rng: np.random.Generator) -> list[int]:
    """The acceptance lengths of a text of 120 tokens whose drafts are right but for some 15 %.

    The text must be the oracle's.
    """
    oracle = generate(pair, [prompt], max_new_tokens=120, oracle=True)[0].token_ids
    wrong = rng.random(len(oracle)) < 0.15
    drafts = np.where(wrong, rng.integers(0, 67, len(oracle)), oracle).tolist()
    replayed = generate(replay_pair(pair, prompt + drafts), [prompt], max_new_tokens=120)[0]
    assert replayed.token_ids == oracle
    return replayed.acceptance_lengths


def one_arithmetic(pair: Pair) -> Pair:
    """The pair by the operations that a CPU's users get, whose bits no shape changes."""
    return Pair(replace(pair.models, kernels=Kernels(*["cpu"] * len(XLA))), pair.params)


def unit_head(pair: Pair) -> Pair:
    """The pair with head rows of length 1, sharpened by the final norm's scale instead."""
    target = dict(pair.params.target)
    target["head"] /= jnp.linalg.norm(target["head"], axis=1, keepdims=True)
    return Pair(pair.models, Params(target, pair.params.drafter))


def hybrid_pair(dtype: str = "float32", **drafter_changes) -> Pair:
    """A random pair whose target has a layer with a delta net and one with attention."""
    pair, config = random_pair(**drafter_changes), target_config(**HYBRID)
    models = replace(pair.models, target=Target(config))
    params = pair.params._replace(target=random_params(config, 0))
    params, models = unit_head(Pair(models, params)).params, models.of_dtype(dtype)
    own = Params(*map(abstract_params, models.configs))
    cast = jax.tree.map(lambda leaf, x: x.astype(leaf.dtype), own, params)
    return one_arithmetic(Pair(models, cast))


def knowing(pair: Pair, prompt: list[int], text: list[int]) -> Pair:
    """With a drafter that knows the text but for every seventh token."""
    wrong = [t if i % 7 else (t + 1) % 67 for i, t in enumerate([*prompt, *text])]
    return one_arithmetic(replay_pair(pair, wrong))


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[list[int]]:
    """Random prompts of low to high - 1 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 67, rng.integers(low, high)).tolist() for _ in range(count)]
