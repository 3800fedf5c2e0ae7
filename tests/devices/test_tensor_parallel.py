"""Devices that share a pair give what one device gives: tokens, logits, keys, values, states."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jflash.bench.shapes import model_shape, quantised
from jflash.devices.mesh import for_batch, local, over, shared_mesh, tensor_mesh
from jflash.layers.gather import AXIS
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models
from jflash.proof.devices import Decoded, differences, failures_over_devices
from jflash.records.parts import part_of, with_split_outputs
from jflash.records.specs import MoeSpec
from tests.support.described_gpu import H200, device_mesh
from tests.support.pairs import drafter_config, target_config
from tests.support.virtual_devices import ROOT, result, start

GOLDEN = ROOT / "tests" / "golden" / "default_prompt.json"
MOE = MoeSpec(num_experts=2, experts_per_token=1, intermediate_size=6, renormalise=True)
PROGRAM = """
import jax, json, jflash
from jflash.records import parts
import numpy as np
from tests.support.shared_steps import (
    codes_shared, from_orbax, largest_differences, output_differences, random_parts, rounding,
    surest, whole_again
)
pair = [f"checkpoints/tiny-math/{x}" for x in ("target", "drafter")]
mesh = jax.sharding.Mesh(np.asarray(jax.devices()[2:]).reshape(2, 1), ("rows", "columns"))
pair = jflash.load_pair(*pair, dtype="float32", mesh=mesh, drafter_dtype="float8")
prompt = json.loads(open("tests/golden/tiny_math_reference.json").read())["cases"][0]
with jflash.Engine(pair, max_batch=1, max_context=256, kinds=("greedy",)) as engine:
    request = jflash.Request(prompt_ids=prompt["prompt_ids"], max_tokens=12)
    events = list(engine.submit(request))
ids = [i for event in events for i in event.token_ids]
rounded = rounding(pair)
parts.READ_RATHER = 2**12  # the delta net's last product is whole, the others are split
print(json.dumps(largest_differences(4) | {
    "served": [ids, prompt["output_ids"][:12], sum(event.accepted for event in events)],
    "rounding": rounded,
    "devices": sorted({d.id for x in jax.tree.leaves(pair.params) for d in x.devices()}),
    "gathered": [output_differences(2), output_differences(4), output_differences(4, whole=True)],
    "with a bias": [output_differences(4, whole=whole, bias=True) for whole in (False, True)],
    "summed": [
        output_differences(4, psum=True, whole=whole, bias=bias)
        for whole in (False, True) for bias in (False, True)
    ],
    "random": random_parts(4),
    "codes": codes_shared(2),
    "whole again": whole_again(2),
    "surest": [surest(n) for n in (2, 4)],
    "orbax": from_orbax(2),
}))
"""
KEPT = """
import json
from tests.support.shared_steps import fragments_from_files, kept_from_files
print(json.dumps([kept_from_files(2), fragments_from_files(2)]))
"""
GENERATE = """
import sys
from jflash.cli.main import run
sys.exit(run("generate", ["--json", "--dtype", "float32", "--tensor-parallel", "4"]))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Of one process, which takes seconds to start."""
    return result(start(PROGRAM))


@pytest.mark.long
def test_generate_over_four_devices_gives_the_tokens_of_one():
    """The embedded pair's two KV heads are each kept on two devices."""
    found, want = result(start(GENERATE)), json.loads(GOLDEN.read_text())
    assert {key: found[key] for key in want} == want


def test_the_engine_over_two_devices_gives_the_tokens_of_one(found):
    """Those that dflash 0.1.0 gave: see record_pair.py. The drafter is in float8, and drafts
    as well as by one device: one step commits all of the text."""
    ids, want, accepted = found["served"]
    assert len(want) == 12 and ids == want and accepted == 10
    assert found["devices"] == [2, 3]  # those of the mesh that it was loaded for


def test_each_device_rounds_its_own_columns_of_a_drafter(found):
    """To within e4m3's steps, 1/28 of a column's largest number; the estimate counts each byte."""
    leaves, worst, estimated, there = found["rounding"]
    assert leaves == 11 and 0.03 < worst < 1 / 28 + 1e-3 and estimated == there


def test_a_step_over_four_devices_is_that_of_one(found):
    """A gathered product has one device's bits; a psum in place of the gather is caught.

    In a whole step XLA's CPU compiler sums float32 products of few columns in another order, and
    skips roundings to bfloat16 inside a fusion, which a gather ends: no step has equal bits there.
    """
    assert found["gathered"] == [0, 0, 0] and min(found["summed"]) > 0
    assert found["with a bias"] == [0, 0]
    assert found["tokens"] == 0 and found["logits"] < 1e-5 and found["states"] < 1e-5
    # Weights drawn for these devices are the whole ones, and none has more than its part of them.
    assert found["random"]["differ"] == 0 and found["random"]["most"] < 0.3
    assert found["codes"] == [3, 2, True]  # a gate and up of 192 columns is in fragments on one
    assert found["whole again"] and found["orbax"] == [0, 0.5]


def test_devices_are_as_sure_of_a_draft_as_one(found):
    """The best ids are one device's, also where columns of several devices are equally good; and a
    device that forgets the others' columns is surer."""
    for same, worst, alone in found["surest"]:
        assert same and worst < 1e-6 and alone > 1e-3


@pytest.mark.long
def test_parts_of_kept_codes_come_from_files():
    """A device's, as they lie in files and in fragments."""
    kept, (leaves, whole, differ) = result(start(KEPT))
    assert kept == 0 and leaves == 12 and whole == 6 and differ == 0


@pytest.mark.parametrize("devices", [2, 4])
def test_a_last_product_is_whole_where_its_other_columns_are_read_sooner_than_gathered(devices):
    shape = model_shape("qwen3-8b")
    for config in shape.target, shape.drafter:
        for layer in part_of(config, devices).layers:
            assert layer.mixer.whole_out and not layer.mlp.whole_out
    coder = part_of(model_shape("qwen3-coder-30b").target, devices)
    assert all(layer.mixer.whole_out for layer in coder.layers)


def test_a_step_of_few_or_many_rows_that_pushes_gathers_more_last_products():
    """But not those that are small, or of few bytes; nor where nothing is pushed."""
    eight, coder = model_shape("qwen3-8b"), model_shape("qwen3-coder-30b")
    split = part_of(with_split_outputs(eight.target, 2, normed=False), 2)
    assert not any(layer.mixer.whole_out or layer.mlp.whole_out for layer in split.layers)
    assert all(
        layer.mixer.whole_out
        for layer in part_of(with_split_outputs(coder.target, 4, normed=False), 4).layers
    )
    kept = quantised(eight.target, "int4")
    assert with_split_outputs(kept, 2, normed=False) == kept
    models = Models(Target(eight.target), Drafter(eight.drafter), 16)
    rounded = models.drafting_in("float8", 1).drafter.config
    assert with_split_outputs(rounded, 2, normed=False) == rounded
    gemma = model_shape("gemma-3-12b").target  # its norms are not of sums
    assert with_split_outputs(gemma, 2, normed=True) == gemma
    assert with_split_outputs(gemma, 2, normed=False) != gemma

    shared = replace(models, mesh=device_mesh(H200, 2, AXIS))
    pushing = replace(shared, kernels=shared.kernels._replace(gather="push"))
    for batch in (5, 8, 65, 128):  # the norm's kernel takes 1,024 rows
        assert for_batch(pushing, batch) == pushing
    assert for_batch(pushing, None) is pushing
    assert for_batch(shared, 4) is shared and for_batch(models, 4) is models
    few = for_batch(pushing, 4)
    assert for_batch(pushing, 32) == for_batch(pushing, 64) == few
    four, eight_of = (replace(pushing, mesh=device_mesh(H200, n, AXIS)) for n in (4, 8))
    assert for_batch(four, 32) == for_batch(four, 4) != four
    assert for_batch(eight_of, 32) == eight_of  # no norm's kernel takes them
    assert few.target.config == with_split_outputs(eight.target, 2, normed=False)
    assert few.drafter.config == with_split_outputs(eight.drafter, 2, normed=False)
    assert local(few).target.config == split


def shared_by(devices: int, **changes) -> None:
    mesh = Mesh(np.asarray(jax.devices() * devices), (AXIS,))
    over(Models(Target(target_config(**{"vocab_size": 64} | changes))), mesh)


@pytest.mark.parametrize(
    "changes,why",
    [
        ({"num_heads": 6}, r"target's attention heads \(6, 2 for keys and values\)"),
        ({"num_heads": 12, "num_kv_heads": 6}, r"attention heads \(12, 6 for keys and values\)"),
        ({"vocab_size": 67}, r"target's vocabulary \(67\)"),
        ({"intermediate_size": 42}, r"columns of an MLP \(42\)"),
        ({"deltas": (0,)}, r"key heads of a gated delta net \(2\)"),
        ({"sights": ({"norm_all_heads": True}, {})}, r"norm over all keys of heads \(2\)"),
        ({"layer": {"sandwich": True, "beside": MOE}}, r"expert beside the MLP \(6\)"),
        ({"moe": MOE}, r"columns of an expert \(6\)"),
    ],
)  # fmt: skip
def test_what_four_devices_cannot_share_is_named(changes, why):
    with pytest.raises(ValueError, match=f"4 devices cannot share .*{why}"):
        shared_by(4, **changes)


def test_each_model_is_named_with_what_it_cannot_share():
    """The target's sizes and its drafter's may differ: all that is wrong with both is said."""
    mesh = Mesh(np.asarray(jax.devices() * 4), (AXIS,))
    drafter = drafter_config(vocab_size=64, mask_token_id=63, num_heads=6, intermediate_size=42)
    with pytest.raises(ValueError) as error:
        over(Models(Target(target_config(vocab_size=64)), Drafter(drafter), 4), mesh)
    heads, columns = (
        "the drafter's attention heads (6, 2 for",
        "the drafter's columns of an MLP (42)",
    )
    assert heads in str(error.value) and columns in str(error.value)
    assert "the target's" not in str(error.value)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="over 64 devices: this host has"):
        tensor_mesh(64)


def test_one_device_needs_no_mesh():
    models = Models(Target(target_config()))
    assert tensor_mesh(1) is None and over(models, None) == replace(models, mesh=None)
    assert shared_mesh(None, 1) is None


def test_a_mesh_of_ones_own_names_the_devices():
    own = Mesh(np.asarray(jax.devices() * 4).reshape(2, 2), ("data", "model"))
    assert shared_mesh(own, 1).axis_names == (AXIS,) and shared_mesh(own, 1).shape[AXIS] == 4
    with pytest.raises(ValueError, match="tensor_parallel 2 beside a mesh: give one of them"):
        shared_mesh(own, 2)
    with pytest.raises(ValueError, match="a mesh of this host's devices shares a pair, not "):
        shared_mesh(device_mesh(H200, 2, AXIS), 1)


def test_the_devices_check_fails_by_a_difference_and_by_a_fault_that_it_misses():
    same, other = {"tokens": 0, "kv_rows": 0}, {"tokens": 0, "kv_rows": 3}
    fault = {"devices": 2, "fault": "psum"}
    report = {"pair": "p", "texts": 4, "compared": [{"devices": 2} | same]}
    report |= {"planted": fault | other}
    assert failures_over_devices(report) == []
    [wrong] = failures_over_devices(report | {"compared": [{"devices": 2} | other]})
    assert "p, 4 texts: 2 devices give 0 other tokens and 3 other rows" in wrong
    [wrong] = failures_over_devices(report | {"planted": fault | same})
    assert "planted psum over devices was not caught" in wrong


def test_differences_are_counted_inside_the_texts_and_over_copies_of_heads():
    kv = np.arange(1 * 6 * 2 * 2.0).reshape(1, 6, 2, 2)
    one = Decoded(np.arange(6)[None], np.array([4]), [kv])
    copied = one._replace(kv=[np.repeat(kv, 2, axis=2)])
    assert differences(one, copied) == {"tokens": 0, "kv_rows": 0}
    changed = copied.kv[0].copy()
    changed[0, [2, 4]] += 1  # the last is past the text
    tokens = one.tokens + (np.arange(6) > 2)
    assert differences(one, Decoded(tokens, one.lengths, [changed])) == {"tokens": 1, "kv_rows": 1}
