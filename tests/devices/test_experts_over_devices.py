"""Experts that lie whole over devices: one device's text and bits, memory, floors, refusals."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jflash.bench.floors import verify_work
from jflash.bench.shapes import model_shape
from jflash.compiled.shape import Shape
from jflash.devices.mesh import over
from jflash.layers.gather import AXIS
from jflash.memory import memory_budget
from jflash.models.decoder import Target
from jflash.pair import Models
from jflash.records.kernels import XLA, Kernels
from jflash.records.parts import OVER, part_of, with_experts_over
from jflash.records.specs import MoeSpec
from tests.support.pairs import target_config
from tests.support.virtual_devices import result, start

MOE = MoeSpec(num_experts=6, experts_per_token=2, intermediate_size=8, renormalise=True)
PROGRAM = """
import json
from tests.support.whole_experts import LAYERS, from_files, layer_differences, text_differences
print(json.dumps({
    "layers": {kind: layer_differences(4, kind) for kind in LAYERS},
    "summed": layer_differences(4, "plain", fault=True),
    "text": text_differences(4),
    "files": from_files(2),
}))
"""
STEP = """
import json
from tests.support.shared_steps import largest_differences
print(json.dumps(largest_differences(2, "devices")))
"""


def test_whole_experts_give_what_one_device_gives():
    """Layers have its bits in bfloat16, and a sum over the devices is caught.

    A Qwen3-MoE has its tokens, and with a planted sum other keys and values. Files give each device
    its experts alone.
    """
    found = result(start(PROGRAM))
    assert set(found["layers"].values()) == {0} and found["summed"] > 0
    [text], fault = found["text"]["compared"], found["text"]["planted"]
    assert text["tokens"] == 0 and fault["kv_rows"] > text["kv_rows"]
    assert found["files"] == {"differ": 0, "shares": [[1, 0.5], [3, 0.5]]}


@pytest.mark.long
def test_a_step_of_layers_of_each_kind_gives_what_one_device_gives():
    """Tokens and, up to rounding, logits and states; by columns it is in test_tensor_parallel."""
    found = result(start(STEP))
    assert found["tokens"] == 0 and found["logits"] < 1e-5 and found["states"] < 1e-5


@pytest.mark.parametrize("devices", [2, 4])
def test_a_device_holds_and_reads_as_much_either_way(devices):
    """The floor's experts are the expected ones: a token's may all lie on one device."""
    whole = model_shape("qwen3-coder-30b").target
    parts = [part_of(with_experts_over(whole, how), devices) for how in OVER]
    columns, experts = (verify_work(part, 2, 16, 100.0) for part in parts)
    assert columns == experts
    mesh = Mesh(np.asarray(jax.devices() * devices), (AXIS,))
    shape = Shape.of(1, 256, chunk=128)
    models = Models(Target(whole), kernels=Kernels(*["cpu"] * len(XLA)))
    columns, experts = (memory_budget(over(models, mesh, how), shape) for how in OVER)
    assert (columns.weights, columns.caches) == (experts.weights, experts.caches)
    # A prompt's chunk is the largest: rows of all devices come to each.
    gathered = (devices - 1) * 128 * 8 * whole.hidden_size * 4
    assert experts.temporaries >= columns.temporaries + gathered


def shared_by(devices: int, experts_over: str, **changes) -> None:
    mesh = Mesh(np.asarray(jax.devices() * devices), (AXIS,)) if devices > 1 else None
    models = Models(Target(target_config(**{"vocab_size": 64} | changes)))
    over(models, mesh, experts_over)


@pytest.mark.parametrize(
    ("devices", "changes", "why"),
    [
        (4, {"moe": MOE}, r"4 devices cannot share the target's experts \(6\)$"),
        (4, {"moe": replace(MOE, num_experts=8, shared_size=6)}, r"shared expert \(6\)$"),
        (4, {"layer": {"sandwich": True, "beside": MOE}}, r"experts beside the MLP \(6\)$"),
        (4, {}, "'devices': no model of the pair has experts"),
        (1, {"moe": MOE}, "'devices' is for several devices"),
    ],
)
def test_what_devices_cannot_share_is_named(devices, changes, why):
    with pytest.raises(ValueError, match=why):
        shared_by(devices, "devices", **changes)


def test_experts_are_shared_in_one_of_two_ways():
    with pytest.raises(ValueError, match="experts_over 'rows' is not one of columns, devices"):
        shared_by(2, "rows", moe=MOE)
    shared_by(2, "devices", moe=MOE)
