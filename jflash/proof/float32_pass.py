"""A target's forward pass written a second time, in float32: short, and right by inspection.

It takes whole texts in plain jnp at the highest precision, without our modules, caches and kernels.
Weights of any dtype become float32 where they are used. The experts of each token are given: two
experts of nearly one probability change places with the last bit, and a pass that chose them would
compute something else from there on. The result says how good the given choice is.
Axes: T tokens, D width, N query heads, K KV heads, G = N/K, H head dim, E experts, k of them a
token, X layers with experts, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jflash.layers.rope import rope_angles
from jflash.records.config import TargetConfig
from jflash.records.leaves import SideBySide
from jflash.records.specs import AttentionSpec, DenseSpec, MoeSpec

_dot = functools.partial(jnp.matmul, precision="highest")
_einsum = functools.partial(jnp.einsum, precision="highest")


class Truth(NamedTuple):
    logits: Float[Array, "R V"]  # of the tokens from `first` on
    shortfall: Float[Array, "X T"]  # router logits: the k-th best minus the least of those given


def written(config: TargetConfig) -> bool:
    """Whether this pass has all that the target has."""
    mixers = {layer.mixer for layer in config.layers}
    return all(map(_attends_plainly, mixers)) and not (
        config.embedding_norm
        or config.embedding_scale != 1
        or config.logit_multiplier != 1
        or config.logit_softcap is not None
        or any(layer.sandwich or layer.beside or layer.scaled for layer in config.layers)
        or any(not _plain_mlp(layer.mlp) for layer in config.layers)
    )


def _attends_plainly(mixer: Any) -> bool:
    """Plain heads that see a whole text."""
    if not isinstance(mixer, AttentionSpec) or mixer.rope is None or mixer.softcap is not None:
        return False
    more = mixer.window, mixer.sinks, mixer.gated, mixer.norm_all_heads, mixer.weightless
    return mixer.causal and not any((*more, mixer.value_norm, mixer.shared_kv))


def _plain_mlp(mlp: DenseSpec | MoeSpec) -> bool:
    """SwiGLU, of all columns or of experts by the usual router."""
    if isinstance(mlp, DenseSpec):
        return mlp.activation == "silu"
    usual = MoeSpec(
        num_experts=mlp.num_experts, experts_per_token=mlp.experts_per_token,
        intermediate_size=mlp.intermediate_size, renormalise=mlp.renormalise,
        over=mlp.over,  # where experts lie changes no number
    )  # fmt: skip
    return mlp == usual


def float32_pass(
    config: TargetConfig, params: Any, tokens: Int[Array, " T"], experts: Int[Array, "X T k"],
    first: int,
) -> Truth:  # fmt: skip
    """The logits of tokens `first` … of a text whose tokens go to `experts`; see `written`."""
    assert written(config)
    x, given, short = _wide(params["embedding"][tokens]), iter(experts), []
    for i in range(config.num_layers):
        layer, spec, moe = params[f"layers_{i}"], config.layers[i].mixer, config.layers[i].mlp
        assert isinstance(spec, AttentionSpec)
        normed = _norm(x, layer["input_norm"], config.rms_norm_eps)
        x += _attention(spec, layer["attention"], normed, config.rms_norm_eps)
        normed = _norm(x, layer["post_norm"], config.rms_norm_eps)
        if not isinstance(moe, MoeSpec):
            x += _project(_swiglu(_project(normed, layer["mlp"]["gate_up"])), layer["mlp"]["down"])
        else:
            out, shortfall = _mixture(moe, layer["mlp"], normed, next(given))
            x += out
            short.append(shortfall)
    x = _norm(x[first:], params["norm"], config.rms_norm_eps)
    head = params["embedding"] if config.tie_embeddings else params["head"]
    return Truth(_dot(x, _wide(head).T), jnp.array(short).reshape(len(short), len(tokens)))


def _attention(spec: AttentionSpec, params: Any, x: Array, eps: float) -> Array:
    """Causal attention of a text to itself, without windows, sinks, soft caps and gates."""
    T, N, K, H = len(x), spec.num_heads, spec.num_kv_heads, spec.head_dim
    cos, sin = (angle[0] for angle in rope_angles(jnp.arange(T)[None], spec.rope, H))
    fused = SideBySide((N * H, K * H, K * H)).split(_project(x, params["qkv"]))
    q, k, v = (part.reshape(T, -1, H) for part in fused)
    if spec.qk_norm:
        q, k = _norm(q, params["q_norm"], eps), _norm(k, params["k_norm"], eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    scores = _einsum("TKGH,SKH->KGTS", q.reshape(T, K, N // K, H), k) * spec.scale
    weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf), axis=-1)
    return _project(_einsum("KGTS,SKH->TKGH", weights, v).reshape(T, N * H), params["out"])


def _mixture(moe: MoeSpec, params: Any, x: Array, ids: Array) -> tuple[Array, Array]:
    """Every expert's output for every token, weighted by zero where it was not chosen."""
    logits = _dot(x, _wide(params["router"]["kernel"]))
    best = lax.top_k(logits, moe.experts_per_token)[0]
    shortfall = best[:, -1] - jnp.min(jnp.take_along_axis(logits, ids, axis=1), axis=1)
    chosen = jnp.any(ids[:, :, None] == jnp.arange(moe.num_experts), axis=1)  # [T, E]
    weights = jnp.where(chosen, jax.nn.softmax(logits, axis=-1), 0)
    if moe.renormalise:
        weights /= jnp.sum(weights, axis=1, keepdims=True)

    def add(total, expert):
        gate_up, down, weight = expert
        return total + weight[:, None] * _dot(_swiglu(_dot(x, _wide(gate_up))), _wide(down)), None

    leaves = params["gate_up"]["kernel"], params["down"]["kernel"], weights.T
    return lax.scan(add, jnp.zeros_like(x), leaves)[0], shortfall


def _project(x: Array, params: Any) -> Array:
    out = _dot(x, _wide(params["kernel"]))
    return out + _wide(params["bias"]) if "bias" in params else out


def _swiglu(x: Array) -> Array:
    gate, up = SideBySide((x.shape[-1] // 2,) * 2).split(x)
    return gate * jax.nn.sigmoid(gate) * up


def _norm(x: Array, params: Any, eps: float) -> Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * _wide(params["scale"])


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Halves of each head [T, heads, H] by angles [T, H/2]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)
