"""Experts that lie whole over devices against one device's: a layer of each kind, pairs, files."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jflash import load_pair
from jflash.devices.distribute import placed
from jflash.devices.mesh import EVERYWHERE, local, over, param_specs, spread, tensor_mesh
from jflash.layers.experts import Experts
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, with_context_kernel
from jflash.models.params import random_weights
from jflash.pair import Models, Params
from jflash.proof.cases import Case
from jflash.proof.devices import check_devices, experts_added_over_devices
from jflash.records.kernels import XLA, Kernels
from jflash.records.specs import MoeSpec
from tests.support.pairs import drafter_config, random_params, target_config
from tests.support.quantised_files import CASES, quantise
from tests.support.shared_steps import FP8, MOE_TARGET, TRUNK

CPU = Kernels(*["cpu"] * len(XLA))
PLAIN = MoeSpec(num_experts=8, experts_per_token=3, intermediate_size=32, renormalise=True)
KERNELS = ("gate_up", "down")
LAYERS = {
    "plain": PLAIN,
    "shared expert": replace(PLAIN, shared_size=128),
    "clamped, with biases": replace(PLAIN, clamped=True, bias=True, scores="softmax of the chosen"),
    "kept codes": PLAIN,
    "sigmoids in groups": replace(PLAIN, scores="sigmoid", groups=4, kept_groups=2, scale=1.5),
}


def layer_differences(devices: int, kind: str, fault: bool = False) -> int:
    """How many numbers of a layer in bfloat16 differ from one device's."""
    trunk = TRUNK | {"num_layers": 1, "dtype": "bfloat16"}
    config = target_config(**trunk, moe=LAYERS[kind], sparse=(0,))
    if kind == "kept codes":
        config = config.keeping({f"layers_0/mlp/{name}/kernel": FP8 for name in KERNELS})
    models = Models(Target(config))
    several = over(models, tensor_mesh(devices), "devices")
    config = several.target.config
    params = random_weights([config])[0]  # larger, but for codes and scales
    params = jax.tree.map(lambda x: 10 * x if x.dtype == jnp.bfloat16 else x, params)
    keys = jax.random.split(jax.random.key(1))
    x, residual = (jax.random.normal(key, (1, 24, config.hidden_size), "bfloat16") for key in keys)

    def layer(models: Models) -> Callable:
        experts = Experts(config.hidden_size, models.target.config.experts[0])
        return lambda params, *rows: experts.apply({"params": params}, *rows, CPU)

    def shared(*given: Any) -> Any:
        with nn.intercept_methods(experts_added_over_devices) if fault else nullcontext():
            return layer(local(several))(*given)

    where = param_specs(several, Params(params)).target["layers_0"]["mlp"]
    run = spread(several.mesh, shared, (where, EVERYWHERE, EVERYWHERE), EVERYWHERE)
    there = placed(several.mesh, config, params)["layers_0"]["mlp"]
    found = np.asarray(run(there, x, residual), np.float32)
    one = jax.jit(layer(models))(params["layers_0"]["mlp"], x, residual)
    apart = np.abs(found - np.asarray(one, np.float32))
    assert apart.max() < 0.02 * np.abs(found).max()  # a sum over devices is right up to rounding
    return int((apart > 0).sum())


def text_differences(devices: int) -> dict[str, Any]:
    """Texts of a random Qwen3-MoE and a drafter against one device's, also with the fault."""
    trunk = TRUNK | {"num_layers": 2, "qkv_bias": False}
    config = target_config(**trunk, moe=PLAIN, sparse=(0, 1))
    drafter = drafter_config(
        **trunk | {"num_layers": 1}, mask_token_id=100, target_layer_ids=(0, 1), num_target_layers=2
    )
    models = Models(Target(config), Drafter(drafter), 8, CPU)
    params = Params(
        random_params(config, 3), with_context_kernel(Drafter(drafter), random_params(drafter, 4))
    )
    case = Case(
        "qwen3-moe", ("random", "random"), models, params, other_drafter=params,
        prompts=lambda count, seed: [[7, 8, 9], [50, 3, 100, 12, 90]],
        stops=[], max_new_tokens=64,
    )  # fmt: skip
    return check_devices(case, (devices,), 0, "devices")


def from_files(devices: int) -> dict[str, Any]:
    """Experts read for several devices, arrays and kept codes: how many are not the whole ones
    placed, and the shares of an array that devices have."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        shutil.copytree(MOE_TARGET, kept)
        quantise(kept, CASES["ct-int4-zeros"])
        found = [_from_files(MOE_TARGET, devices), _from_files(kept, devices, quantised="kept")]
    return {"differ": sum(n for n, _ in found), "shares": [shares for _, shares in found]}


def _from_files(target: Path, devices: int, **how: Any) -> tuple[int, list[float]]:
    whole = load_pair(target, dtype="float32", **how).params.target
    how |= {"tensor_parallel": devices, "experts_over": "devices"}
    parts = load_pair(target, dtype="float32", **how)
    again = placed(parts.models.mesh, parts.models.target.config, whole)
    pairs = zip(jax.tree.leaves(parts.params.target), jax.tree.leaves(again), strict=True)
    differ = sum(a.sharding != b.sharding or bool((a != b).any()) for a, b in pairs)
    arrays = jax.tree.leaves(parts.params.target["layers_0"]["mlp"]["down"])
    shares = {s.data.size / x.size for x in arrays for s in x.addressable_shards}
    return differ, [len(arrays), *sorted(shares)]
