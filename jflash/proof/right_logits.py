"""How far the logits of the program that decodes lie from float32's, and how far they may lie.

The same text and weights go through our kernels in bfloat16, through XLA's operations in bfloat16,
and through `float32_pass`. XLA's distance from float32 is what rounding costs: ours may be FACTOR
times that. A fault planted in the weights of our pass alone must be farther away.
Knows nothing of the command line. Nats: KL(float32 || bfloat16) of a row.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.config import TargetConfig
from jflash.kernels import XLA
from jflash.proof.float32_pass import float32_pass
from jflash.proof.forced import PROMPT, Seen, forced
from jflash.speculative import Models

FACTOR = 3.0  # of what XLA's rounding costs; nats grow with the square of a difference
NATS = 0.01  # the mean that rounding itself may cost: more is a fault that XLA shares
ROWS = 64  # after each prompt, or the most that the block divides


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a program's logits lie from float32's, over all rows of a batch."""

    largest_difference: float  # of a logit
    mean_nats: float
    most_nats: float
    same_best: float  # share of rows in which both have the same largest logit
    choice_shortfall: float  # the largest logit minus that of the token which the kernel chose
    other_experts: float  # share of (token, layer) with experts that float32 would not choose
    router_shortfall: float  # at most, in router logits, see float32_pass.Truth


class Rows(NamedTuple):
    """Two programs' logits of one sequence, row by row."""

    difference: Float[Array, " R"]
    nats: Float[Array, " R"]
    same_best: Float[Array, " R"]


@jax.jit
def compared(right: Float[Array, "R V"], other: Float[Array, "R V"]) -> Rows:
    p, q = jax.nn.log_softmax(right), jax.nn.log_softmax(other)
    d = p - q
    # Σ p·(exp(-d) - 1) = Σ q - Σ p = 0: added, it makes each term positive, so that small sums of
    # nats do not drown in what float32 loses of the normalisers.
    nats = jnp.sum(jnp.exp(p) * (d + jnp.expm1(-d)), axis=-1)
    best = jnp.argmax(right, axis=-1) == jnp.argmax(other, axis=-1)
    return Rows(jnp.max(jnp.abs(right - other), axis=-1), nats, best.astype(jnp.float32))


def from_float32(
    config: TargetConfig, params: Any, text: Int[Array, "B T"], seen: Seen
) -> Distance:
    """`seen` against float32 with the right `params`, sequence by sequence."""
    rows, short = [], []
    for b in range(len(text)):
        truth = _float32(config, params, text[b], seen.experts[:, b])
        rows.append(jax.device_get(compared(truth.logits, seen.logits[b])))
        short.append(jax.device_get(truth.shortfall))
    difference, nats, best = (np.concatenate(field) for field in zip(*rows, strict=True))
    chosen = jnp.take_along_axis(seen.logits, seen.choices[:, :, None], axis=2)[:, :, 0]
    return Distance(
        largest_difference=float(difference.max()),
        mean_nats=float(nats.mean()),
        most_nats=float(nats.max()),
        same_best=float(best.mean()),
        choice_shortfall=float(jnp.max(jnp.max(seen.logits, axis=2) - chosen)),
        other_experts=float(np.mean(np.array(short) > 0)) if config.experts else 0.0,
        router_shortfall=float(np.max(short)) if config.experts else 0.0,
    )


@functools.partial(jax.jit, static_argnums=0)
def _float32(config, params, tokens, experts):
    return float32_pass(config, params, tokens, experts, PROMPT)


def between(one: Seen, other: Seen) -> dict[str, float]:
    """Two programs of one text against each other, by their own choices of experts."""
    rows = [jax.device_get(compared(*pair)) for pair in zip(one.logits, other.logits, strict=True)]
    difference, nats, best = (np.concatenate(field) for field in zip(*rows, strict=True))
    same = jnp.all(jnp.sort(one.experts) == jnp.sort(other.experts), axis=-1)
    return {
        "largest_difference": float(difference.max()),
        "mean_nats": float(nats.mean()),
        "most_nats": float(nats.max()),
        "same_best": float(best.mean()),
        "other_experts": float(jnp.mean(~same)) if same.size else 0.0,
    }


def experts_reached(experts: Int[Array, "X B T k"]) -> float:
    """Distinct experts of a layer, the mean over the layers with experts; 0 without any."""
    return sum(len(jnp.unique(ids)) for ids in experts) / max(1, len(experts))


def with_fault(config: TargetConfig, params: Any, experts: Int[Array, "X B T k"]) -> Any:
    """The weights with gate and up exchanged, in one layer and there in a small part.

    With experts: of that one of the middle sparse layer which most tokens reach. Without: in one
    of 64 columns of the middle layer.
    """
    if config.experts:
        middle = len(experts) // 2
        layer = config.sparse_layers[middle]
        expert = int(jnp.argmax(jnp.bincount(experts[middle].reshape(-1))))
        exchange = functools.partial(_exchanged_of, expert)
    else:
        layer, exchange = config.num_layers // 2, _exchanged
    name = f"layers_{layer}"
    mlp = params[name]["mlp"]
    mlp = mlp | {"gate_up": {"kernel": exchange(mlp["gate_up"]["kernel"])}}
    return params | {name: params[name] | {"mlp": mlp}}


def _exchanged_of(expert: int, kernel: Float[Array, "E D FF"]) -> Float[Array, "E D FF"]:
    return kernel.at[expert].set(jnp.roll(kernel[expert], kernel.shape[2] // 2, axis=1))


def _exchanged(kernel: Float[Array, "D FF"]) -> Float[Array, "D FF"]:
    half = kernel.shape[1] // 2
    count = half // 64
    gate, up = kernel[:, :count], kernel[:, half : half + count]
    return kernel.at[:, :count].set(up).at[:, half : half + count].set(gate)


def check_batch(
    models: list[Models], params: Any, batch: int, seed: int
) -> Iterator[dict[str, Any]]:
    """One result a width, for targets alone that differ in nothing but width and kernels."""
    config, widest = models[0].target.config, max(m.block_size for m in models)
    length = PROMPT + ROWS - ROWS % widest
    key = jax.random.fold_in(jax.random.key(seed), batch)
    text = jax.random.randint(key, (batch, length), 0, config.vocab_size, jnp.int32)
    first: dict[str, Seen] = {}
    for one in models:
        seen = {"ours": forced(one, params, text),
                "xla": forced(replace(one, kernels=XLA), params, text)}  # fmt: skip
        broken = with_fault(config, params, seen["ours"].experts)
        fault = forced(one, broken, text)
        del broken
        result: dict[str, Any] = {"batch": batch, "width": one.block_size}
        result["experts_reached"] = experts_reached(seen["ours"].experts)
        for name, program in (*seen.items(), ("fault", fault)):
            result[name] = vars(from_float32(config, params, text, program))
        first = first or seen
        if one is not models[0]:
            result["against_width"] = models[0].block_size
            result["against"] = {name: between(first[name], seen[name]) for name in seen}
        yield result | {"rows": batch * (length - PROMPT)}


def failures(results: list[dict[str, Any]]) -> list[str]:
    """Why the check is not passed, a line each."""
    wrong = []
    # Few tokens may have no two experts of nearly one probability: all programs tell what is near.
    near = max(result["xla"]["router_shortfall"] for result in results)
    for result in results:
        where = f"batch {result['batch']}, width {result['width']}"
        if not result["xla"]["mean_nats"] <= NATS:
            wrong.append(
                f"{where}: even XLA's pass is {result['xla']['mean_nats']:.2g} nats from float32, "
                f"more than {NATS}"
            )
        wrong += [f"{where}: {line}" for line in too_far(result["ours"], result["xla"], near)]
        if not too_far(result["fault"], result["xla"], near):
            wrong.append(f"{where}: the planted fault was not caught")
    return wrong


def too_far(ours: dict[str, float], xla: dict[str, float], near: float) -> list[str]:
    """What of a program's distance is more than rounding explains."""
    allowed = {name: xla[name] for name in ("largest_difference", "mean_nats", "most_nats")}
    allowed |= {"choice_shortfall": xla["largest_difference"], "router_shortfall": near}
    return [
        f"{name} {ours[name]:.2g}, more than {FACTOR:g} times {bound:.2g}"
        for name, bound in allowed.items()
        if not ours[name] <= FACTOR * bound  # a NaN is no distance
    ]
