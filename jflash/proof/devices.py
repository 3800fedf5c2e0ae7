"""Whether a pair decodes alike on any number of devices: tokens, and the target's keys and values.

A psum in place of a gather, right up to rounding, must be caught; of a target that is kept as codes
one other code. This file knows no options.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jflash.compiled.programs import compile_prefill, compile_run
from jflash.compiled.shape import Shape, capacity_for, make_request, new_state
from jflash.devices.backends import named, with_backends
from jflash.devices.distribute import placed
from jflash.devices.kept import in_fragments
from jflash.devices.mesh import for_batch, over, tensor_mesh, with_context
from jflash.layers.cache import LayerCache
from jflash.layers.experts import Experts
from jflash.layers.gather import AXIS
from jflash.layers.projections import Output
from jflash.layers.sums import summed
from jflash.models.dflash import context_leaves
from jflash.pair import Models, Params
from jflash.proof.cases import Case
from jflash.proof.kept_forms import in_order, with_another_code
from jflash.records.decoding import Decoding
from pallas_kernels.matmul import Unsummed

NEW_TOKENS = 64
FEW, MANY = 4, 32  # texts at once: their steps go by other kernels


class Decoded(NamedTuple):
    """Texts, their lengths, and the keys and values of the layers that keep all of them."""

    tokens: np.ndarray
    lengths: np.ndarray
    kv: list[np.ndarray]


def added_over_devices(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """The fault, as an interceptor: a layer's last product by rows, summed over the devices."""
    module = context.module
    named = context.method_name == "unsummed"
    if not (named and isinstance(module, Output)):
        return call(*args, **kwargs)
    x, _, residual = args

    def whole(part: jax.Array) -> jax.Array:
        """Gathered once x is there: a gather beside kernels that wait for other devices' may take
        multiprocessors that one of them needs, and wait itself for a device where it has none."""
        if module.whole:
            return part
        part = part + 0 * x.ravel()[0].astype(part.dtype)
        return jax.lax.all_gather(part, AXIS, axis=part.ndim - 1, tiled=True)

    first = jax.lax.axis_index(AXIS) * x.shape[-1]
    own = jax.lax.dynamic_slice_in_dim(whole(module.kernel), first, x.shape[-1])
    out = jax.lax.psum(jnp.matmul(x, own, precision="highest"), AXIS)
    if module.use_bias:
        out = out + whole(module.bias)
    return Unsummed(None, out if residual is None else residual + out)


def experts_added_over_devices(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """The fault where experts lie whole: each device adds its own ones' rows, and a psum the sums.

    Of layers without a shared expert, which every device would add.
    """
    module, name = context.module, context.method_name
    named = name in ("unsummed", "mixed") and isinstance(module, Experts)
    if not named or module.config.over != "devices" or module.config.shared_size is not None:
        return call(*args, **kwargs)
    if name == "unsummed":  # by way of `mixed`, whatever a norm would have added
        x, residual, kernels = args
        own = summed(call(x, None, kernels))
        return Unsummed(None, own if residual is None else residual + own)
    x, weights, ids, residual, kernels = args
    here = ids // module.config.held == jax.lax.axis_index(AXIS)
    out = jax.lax.psum(call(x, jnp.where(here, weights, 0), ids, None, kernels), AXIS)
    return out if residual is None else residual + out


FAULTS = {"columns": added_over_devices, "devices": experts_added_over_devices}  # by OVER


def shared_pair(
    models: Models,
    params: Params,
    devices: int,
    experts_over: str = "columns",
    batch: int | None = None,
) -> tuple[Models, Params]:
    """A pair that lies whole on one device, brought to several, which gather by their best way.

    Kept codes come in the order of files: several devices may have others in fragments than one.
    """
    models = over(models, tensor_mesh(devices), experts_over)
    others = {op: name for op, name in named(models.kernels).items() if op != "gather_backend"}
    models = with_backends(models, models.dtype, jax.local_devices()[0], **others)
    models = for_batch(models, batch)
    target = placed(models.mesh, models.target.config, in_order(models, params.target))
    if models.drafter is None:
        return models, Params(target)
    config = models.drafter.config
    own = {k: v for k, v in params.drafter.items() if k not in context_leaves(config)}
    return models, with_context(models, Params(target, placed(models.mesh, config, own)))


def decoded(models: Models, params: Params, prompts: Sequence[list[int]]) -> Decoded:
    """The prompts' greedy texts."""
    need = capacity_for(max(map(len, prompts)), NEW_TOKENS, models.block_size, 128)
    shape = Shape.of(len(prompts), need)
    state = new_state(models, shape)
    admit, step = compile_prefill(models, params, shape)[0], compile_run(models, params, state)[0]
    for slot, prompt in enumerate(prompts):
        decoding = Decoding(max_new_tokens=NEW_TOKENS)
        request = make_request(shape, prompt, decoding, models.max_accept, jax.random.key(0))
        state = admit(params, state, jnp.int32(slot), request)
    state, report = step(params, state, jnp.int32(NEW_TOKENS), jnp.zeros(len(prompts), bool))
    kept = [c for c in state.target_cache if isinstance(c, LayerCache)]
    kv = [np.asarray(x) for cache in kept for x in (cache.k, cache.v)]
    return Decoded(np.asarray(report.tokens), np.asarray(report.length), kv)


def differences(one: Decoded, other: Decoded) -> dict[str, int]:
    """How many tokens, and rows of keys and values, differ from one device's."""
    tokens, rows = 0, 0
    for b, length in enumerate(one.lengths):
        tokens += int((one.tokens[b, :length] != other.tokens[b, :length]).sum())
        for a, c in zip(one.kv, other.kv, strict=True):
            copies = c.shape[2] // a.shape[2]  # devices with the same KV head
            apart = a[b, : length - 1] != c[b, : length - 1, ::copies]
            rows += int(apart.any(axis=(1, 2)).sum())
    return {"tokens": tokens, "kv_rows": rows}


def check_devices(
    case: Case, counts: Sequence[int], seed: int, experts_over: str = "columns", texts: int = FEW
) -> dict[str, Any]:
    """Each number of devices against one, and the fault at the largest, with so many texts at once.

    A target's kept codes are given in the order of files.
    """
    prompts, alone = case.prompts(texts, seed), in_fragments(case.models)
    params = case.params._replace(target=in_order(alone, case.params.target))
    one = decoded(alone, params, prompts)
    del params
    result: dict[str, Any] = {"pair": case.name, "texts": texts, "compared": [], "planted": None}
    how = experts_over, len(prompts)
    for devices in counts:
        if devices > 1:
            models, params = shared_pair(case.models, case.params, devices, *how)
            found = differences(one, decoded(models, params, prompts))
            result["compared"].append({"devices": devices} | found)
    models, params = shared_pair(case.models, case.params, max(counts), *how)
    fault, other = _with_fault(models, params, prompts, experts_over)
    result["planted"] = {"devices": max(counts), "fault": fault} | differences(one, other)
    return result


def _with_fault(
    models: Models, params: Params, prompts: Sequence[list[int]], experts_over: str
) -> tuple[str, Decoded]:
    """A fault's name, and what comes of it: no psum multiplies codes, so one of them is another."""
    if any(layer.kept for layer in models.target.config.layers):
        params = params._replace(target=with_another_code(params.target))
        return "code", decoded(models, params, prompts)
    with nn.intercept_methods(FAULTS[experts_over]):
        return "psum", decoded(models, params, prompts)


def failures_over_devices(result: dict[str, Any]) -> list[str]:
    """Why the check is not passed, a line each."""
    who = f"{result['pair']}, {result['texts']} texts"
    wrong = [
        f"{who}: {each['devices']} devices give {each['tokens']} other tokens and "
        f"{each['kv_rows']} other rows of keys and values than one"
        for each in result["compared"]
        if each["tokens"] or each["kv_rows"]
    ]
    if not (result["planted"]["tokens"] or result["planted"]["kv_rows"]):
        fault = result["planted"]["fault"]
        wrong.append(f"{who}: a planted {fault} over devices was not caught")
    return wrong
