"""The distance of the decoding program's logits from float32's, and its bound.

The same text and weights go through our kernels in bfloat16, through XLA's operations in bfloat16,
and through `float32_pass`. XLA's distance from float32 is the cost of rounding, and ours may be
FACTOR times that. A fault planted in the weights of our pass must be farther away.
This file does not know the command line. Nats: KL(float32 || bfloat16) of a row.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.pair import Models
from jflash.proof.float32_pass import float32_pass, written
from jflash.proof.forced import PROMPT, Seen, forced
from jflash.records.config import TargetConfig
from jflash.records.kernels import XLA

FACTOR = 3.0  # of what XLA's rounding costs; nats grow with the square of a difference
PASS, MODULES = "float32_pass", "our modules"
NATS = 0.01  # the mean that rounding may cost: more is a fault that XLA shares
ROWS = 64  # after each prompt, or the most that the block divides
SURE = (
    0.5  # the mean of the right pass's largest probabilities: above it no pass shows a difference
)
SHARES = (64, 16)  # one in so many columns has a planted fault: the first that is caught counts


class Rows(NamedTuple):
    """Two programs' logits of one sequence, row by row."""

    difference: Float[Array, " R"]
    nats: Float[Array, " R"]
    same_best: Float[Array, " R"]
    spread: Float[Array, " R"]  # the standard deviation of the right logits
    sure: Float[Array, " R"]  # their largest probability


@jax.jit
def compared(right: Float[Array, "R V"], other: Float[Array, "R V"]) -> Rows:
    p, q = jax.nn.log_softmax(right), jax.nn.log_softmax(other)
    d = p - q
    # Σ p·(exp(-d) - 1) = Σ q - Σ p = 0: added, it makes each term positive, so that small sums of
    # nats do not drown in what float32 loses of the normalisers.
    nats = jnp.sum(jnp.exp(p) * (d + jnp.expm1(-d)), axis=-1)
    best = jnp.argmax(right, axis=-1) == jnp.argmax(other, axis=-1)
    largest, sure = jnp.max(jnp.abs(right - other), axis=-1), jnp.exp(jnp.max(p, axis=-1))
    return Rows(largest, nats, best.astype(jnp.float32), jnp.std(right, axis=-1), sure)


def distance(sequences: Iterable[Rows]) -> dict[str, float]:
    """Over all rows: a logit's largest difference, the mean and most nats, the share of rows with
    the same largest logit, and of the right logits the spread and the largest probability."""
    rows = [jax.device_get(each) for each in sequences]
    fields = (np.concatenate(field) for field in zip(*rows, strict=True))
    difference, nats, best, spread, sure = fields
    return {
        "largest_difference": float(difference.max()),
        "mean_nats": float(nats.mean()),
        "most_nats": float(nats.max()),
        "same_best": float(best.mean()),
        "spread": float(spread.mean()),
        "sure": float(sure.mean()),
    }


def from_float32(
    config: TargetConfig, params: Any, text: Int[Array, "B T"], seen: Seen,
    judged: Float[Array, "B R V"] | None = None,
) -> dict[str, float]:  # fmt: skip
    """The `distance` of `seen` from float32 with the right `params`, and of its choices.

    `judged`: the right logits where float32_pass has not all that the target has; see `by_modules`.

    `choice_shortfall`: the largest logit minus that of the token which the kernel chose.
    `other_experts`: the share of (token, layer) with experts that float32 would not choose.
    `router_shortfall`: the largest of float32_pass.Truth.
    """
    rows, short = [], []
    for b in range(len(text)):
        if judged is not None:
            rows.append(compared(judged[b], seen.logits[b]))
            continue
        truth = _float32(config, params, text[b], seen.experts[:, b])
        rows.append(compared(truth.logits, seen.logits[b]))
        short.append(jax.device_get(truth.shortfall))
    chosen = jnp.take_along_axis(seen.logits, seen.choices[:, :, None], axis=2)[:, :, 0]
    return distance(rows) | {
        "choice_shortfall": float(jnp.max(jnp.max(seen.logits, axis=2) - chosen)),
        "other_experts": float(np.mean(np.array(short) > 0)) if config.experts else 0.0,
        "router_shortfall": float(np.max(short)) if config.experts else 0.0,
    }


@functools.partial(jax.jit, static_argnums=0)
def _float32(config, params, tokens, experts):
    return float32_pass(config, params, tokens, experts, PROMPT)


def judge_of(config: TargetConfig) -> str:
    """What gives the right logits of a target: PASS, or MODULES where that has not all of it.

    ValueError for experts that PASS has not: MODULES would choose others than the kernels did.
    """
    if written(config):
        return PASS
    if config.experts:
        raise ValueError("these experts have no float32 pass: transformers judges them, on a CPU")
    return MODULES


def by_modules(models: Models, params: Any, text: Int[Array, "B T"]) -> Float[Array, "B R V"]:
    """The logits of our own modules in float32 by XLA's operations.

    That shows what kernels and bfloat16 change. That the modules are right, tests show on a CPU,
    beside transformers.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return forced(replace(models.of_dtype("float32"), kernels=XLA, mesh=None), wide, text).logits


def between(one: Seen, other: Seen) -> dict[str, float]:
    """The `distance` of two programs of one text, each with the experts of its choice."""
    same = jnp.all(jnp.sort(one.experts) == jnp.sort(other.experts), axis=-1)
    share = float(jnp.mean(~same)) if same.size else 0.0
    rows = map(compared, one.logits, other.logits)
    return distance(rows) | {"other_experts": share}


def experts_reached(experts: Int[Array, "X B T k"]) -> float:
    """Distinct experts of a layer, the mean over the layers with experts; 0 without any."""
    return sum(len(jnp.unique(ids)) for ids in experts) / max(1, len(experts))


def with_fault(
    config: TargetConfig, params: Any, experts: Int[Array, "X B T k"], share: int = SHARES[0]
) -> Any:
    """The weights with gate and up exchanged in a small part of one layer.

    The part is the expert of the middle sparse layer that most tokens reach or, without experts,
    one of `share` columns of the middle layer.
    """
    if config.experts:
        middle = len(experts) // 2
        layer = config.sparse_layers[middle]
        expert = int(jnp.argmax(jnp.bincount(experts[middle].reshape(-1))))
        exchange = functools.partial(_exchanged_in, expert)
    else:
        layer, exchange = config.num_layers // 2, functools.partial(_exchanged, share)
    name = f"layers_{layer}"
    mlp = params[name]["mlp"]
    mlp = mlp | {"gate_up": {"kernel": exchange(mlp["gate_up"]["kernel"])}}
    return params | {name: params[name] | {"mlp": mlp}}


def _exchanged_in(expert: int, kernel: Float[Array, "E D FF"]) -> Float[Array, "E D FF"]:
    return kernel.at[expert].set(jnp.roll(kernel[expert], kernel.shape[2] // 2, axis=1))


def _exchanged(share: int, kernel: Float[Array, "D FF"]) -> Float[Array, "D FF"]:
    half = kernel.shape[1] // 2
    count = half // share
    gate, up = kernel[:, :count], kernel[:, half : half + count]
    return kernel.at[:, :count].set(up).at[:, half : half + count].set(gate)


def check_batch(
    models: list[Models], params: Any, batch: int, seed: int
) -> Iterator[dict[str, Any]]:
    """One result a width, for targets without drafters that differ only in width and kernels.

    Devices may share our pass; what it is compared with is of one, which has the whole `params`.
    """
    config, widest = models[0].target.config, max(m.block_size for m in models)
    length = PROMPT + ROWS - ROWS % widest
    key = jax.random.fold_in(jax.random.key(seed), batch)
    text = jax.random.randint(key, (batch, length), 0, config.vocab_size, jnp.int32)
    first: dict[str, Seen] = {}
    judged = None
    if judge_of(config) == MODULES:
        judged = by_modules(max(models, key=lambda m: m.block_size), params, text)
    for one in models:
        seen = {"ours": forced(one, params, text),
                "xla": forced(replace(one, kernels=XLA, mesh=None), params, text)}  # fmt: skip
        result: dict[str, Any] = {"batch": batch, "width": one.block_size}
        result["experts_reached"] = experts_reached(seen["ours"].experts)
        for name, program in seen.items():
            result[name] = from_float32(config, params, text, program, judged)
        # Where a norm follows each part of a layer, a layer is less of the result.
        for share in SHARES[:1] if config.experts else SHARES:
            broken = with_fault(config, params, seen["ours"].experts, share)
            fault = from_float32(config, params, text, forced(one, broken, text), judged)
            del broken
            result["fault"] = fault | ({} if config.experts else {"one_in": share})
            if too_far(fault, result["xla"], result["xla"]["router_shortfall"]):
                break
        first = first or seen
        if one is not models[0]:
            result["against_width"] = models[0].block_size
            result["against"] = {name: between(first[name], seen[name]) for name in seen}
        yield result | {"rows": batch * (length - PROMPT)}


def failures(results: list[dict[str, Any]]) -> list[str]:
    """Why the check is not passed, a line each."""
    wrong = []
    # A few tokens may have no experts of nearly one probability: all results bound what is near.
    near = max(result["xla"]["router_shortfall"] for result in results)
    for result in results:
        where = f"batch {result['batch']}, width {result['width']}"
        if not result["xla"]["mean_nats"] <= NATS:
            wrong.append(
                f"{where}: even XLA's pass is {result['xla']['mean_nats']:.2g} nats from float32, "
                f"more than {NATS}"
            )
        if not result["xla"]["sure"] <= SURE:
            wrong.append(f"{where}: the right pass is sure of its tokens, so nothing would show")
        wrong += [f"{where}: {line}" for line in too_far(result["ours"], result["xla"], near)]
        if not too_far(result["fault"], result["xla"], near):
            wrong.append(f"{where}: the planted fault was not caught")
    return wrong


def too_far(ours: dict[str, float], xla: dict[str, float], near: float) -> list[str]:
    """The parts of a program's distance that are more than rounding explains."""
    allowed = {name: xla[name] for name in ("largest_difference", "mean_nats", "most_nats")}
    allowed |= {"choice_shortfall": xla["largest_difference"], "router_shortfall": near}
    return [
        f"{name} {ours[name]:.2g}, more than {FACTOR:g} times {bound:.2g}"
        for name, bound in allowed.items()
        if not ours[name] <= FACTOR * bound  # a NaN is no distance
    ]
