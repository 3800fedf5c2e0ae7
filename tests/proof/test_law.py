"""The law's check: what it compares, what it says of a device that breaks it, and what fails."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.cli import check_lossless, main
from jflash.layers.passes import Block
from jflash.models.decoder import Target
from jflash.models.params import abstract_params
from jflash.pair import Models
from jflash.proof import faults
from jflash.proof import law as law_check
from jflash.proof.digest import Digest, apart
from jflash.proof.faults import planted
from jflash.proof.law import bench as law_bench
from jflash.proof.law import forms as law_forms
from jflash.proof.law import prompts as law_prompts
from jflash.proof.law.forms import OWN, PLAIN, REPLAY, Form, Way
from jflash.proof.law.text import law_failures, shortfalls
from jflash.proof.lossless import Executable, compile_executable
from jflash.records.kernels import XLA, Kernels
from jflash.records.specs import MoeSpec
from tests.support.attention_checks import ON_GPU
from tests.support.lossless_case import small_case
from tests.support.pairs import HYBRID, SANDWICH, target_config

pytestmark = pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
BIASED = MoeSpec(
    num_experts=6,
    experts_per_token=2,
    intermediate_size=24,
    renormalise=True,
    scores="softmax of the chosen",
    clamped=True,
    bias=True,
)
SMALL = Form(
    tokens=40,
    anchored=40,
    new_tokens=20,
    ways=(Way(1, 2, PLAIN, True, 64), Way(8, 2, OWN + REPLAY)),
)


SOUND: dict[object, Executable] = {}


def shared(asked) -> list[Executable]:
    """The programs of sound targets are compiled once for all tests here."""

    def made(models, params, shape) -> Executable:
        if type(models.target) is not Target:
            return compile_executable(models, params, shape)
        leaves, tree = jax.tree.flatten(jax.tree.map(jax.typeof, params))
        key = models, shape, tuple(leaves), tree
        if key not in SOUND:
            SOUND[key] = compile_executable(models, params, shape)
        return SOUND[key]

    return [made(*one) for one in asked]


def digest(tokens, prompt=2, logits=0, kv=0) -> Digest:
    n = len(tokens)
    rows = np.full((n, 2), 7, np.uint32), np.full((n - 1, 3, 2), 9, np.uint32)
    found = Digest(prompt, np.array(tokens), *rows)
    if logits:
        found.logits[logits, 1] += 1
    if kv:
        found.keys_values[kv, 2, 0] += 1
    return found


def test_what_two_digests_differ_in():
    one = digest(range(10))
    assert apart(one, digest(range(10)))[:3] == (0, 0, 0)
    assert apart(one, digest(range(10)))[3:] == (10, 7, 9)
    assert apart(one, digest(range(10), logits=4))[:3] == (0, 1, 0)
    assert apart(one, digest(range(10), logits=2))[:3] == (0, 0, 0)  # the prefill's, not recorded
    assert apart(one, digest(range(10), kv=8))[:3] == (0, 0, 1)
    assert apart(one, digest(range(10), kv=1))[:3] == (0, 0, 1)  # the prompt's
    # Behind another token, whose own row is compared, two texts go on.
    other = digest([*range(5), 99, 98, *range(7, 10)], logits=5)
    assert apart(one, other)[:3] == (2, 1, 0)
    assert apart(one, digest([*range(5), *range(6, 11)], logits=7, kv=8))[:3] == (5, 0, 0)
    assert apart(one, digest(range(7)))[:3] == (3, 0, 0)
    longer = digest(range(10), prompt=6, logits=4)
    assert apart(one, longer)[:3] == (0, 0, 0) and apart(one, longer).compared_logits_rows == 3


def run(capsys, monkeypatch, case, form, faults) -> tuple[int, str, dict]:
    monkeypatch.setattr(check_lossless, "CPU", form)
    monkeypatch.setattr(law_forms, "FAULTS", faults)
    monkeypatch.setattr(law_bench, "compile_executables", shared)
    monkeypatch.setattr(check_lossless, "load_case", lambda *_: case)
    code = main.run("check-lossless", ["--pairs", "tiny-math", "--dtype", "float32"])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


def lawful(*kernels: str, **changes):
    case = small_case(**changes)
    return case._replace(models=replace(case.models, kernels=Kernels(*kernels)))


@pytest.mark.long
def test_operations_without_the_law_are_told_where_they_break_it(capsys, monkeypatch):
    """XLA's products in place of a CPU's: exit code 1, and every comparison that differs."""
    # Whether faults are caught is the next test.
    case = lawful("cpu", "xla", "cpu", "xla", "cpu")
    code, out, found = run(capsys, monkeypatch, case, SMALL, ())
    assert code == 1
    (law,) = found["law"]
    assert not law["promised"] and "do not promise" in out
    differing = [each["way"] for each in law["compared"] if each["first"]]
    assert "width 8, batch 2: own drafter" in differing
    for way in differing:
        assert f"FAILED: small is not plain decoding's at {way}: " in out
    assert "LOSSLESS" not in out


def test_a_lawful_pair_passes_and_every_planted_fault_is_caught(capsys, monkeypatch):
    """In blocks of more rows than the faults spare; a long test has the embedded pair."""
    form = replace(SMALL, tokens=240, ways=(Way(8, 12, OWN + REPLAY),))
    case = lawful(*["cpu"] * 5)
    code, out, found = run(capsys, monkeypatch, case, form, law_forms.FAULTS)
    assert code == 0 and found["failures"] == [] and "LOSSLESS: " in out
    (law,) = found["law"]
    assert law["promised"] and law["differences"] == 0 and law["tokens"] >= 240
    assert min(each["compared_kv_rows"] for each in law["compared"]) > 200
    assert [fault["caught"] for fault in law["faults"]] == [True] * 4


@pytest.mark.long
def test_faults_are_planted_in_a_hybrid(capsys, monkeypatch):
    """Its delta nets read the pass that a fault of attention changes; one fault is theirs."""
    batch = tuple(fault for fault in law_forms.FAULTS if "batch" in fault.name)
    form = replace(SMALL, ways=(Way(8, 2, OWN + REPLAY),))
    code, _, found = run(capsys, monkeypatch, lawful(*["cpu"] * 6, **HYBRID), form, batch)
    assert code == 0
    caught = {fault["fault"]: fault["caught"] for fault in found["law"][0]["faults"]}
    assert caught == {batch[0].name: True, "chunks begin at the anchor": True}


def test_the_embedded_pair_is_plain_decodings_in_small(capsys, monkeypatch):
    """Of trained weights: blocks of 16 by its drafter and of mistakes, and texts as prompts, in
    another batch, capacity and chunk. A long test has more ways, and the faults."""
    form = replace(SMALL, ways=(Way(16, 2, OWN + REPLAY, True, 64),))
    monkeypatch.setattr(check_lossless, "CPU", form)
    monkeypatch.setattr(law_forms, "FAULTS", ())
    assert main.run("check-lossless", ["--layers", "4"]) == 2
    assert "--layers is for random weights, and tiny-math" in capsys.readouterr().err
    code = main.run("check-lossless", ["--dtype", "float32"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and found["failures"] == [] and found["layers"] is None
    (law,) = found["law"]
    assert (law["pair"], law["promised"], law["differences"]) == ("tiny-math", True, 0)
    assert law["anchored_tokens"] >= 40 and len(law["compared"]) == 3
    assert all(each["compared_kv_rows"] > 100 for each in law["compared"])
    assert all(each["compared_logits_rows"] >= 18 for each in law["compared"])


@pytest.mark.long
def test_faults_of_products_are_planted_where_each_has_a_bias(capsys, monkeypatch):
    """gpt-oss: no projection without one, and experts in place of the MLP."""
    biased = {"qkv_bias": True, "out_bias": True, "qk_norm": False, "moe": BIASED}
    products = tuple(f for f in law_forms.FAULTS if "split" in f.name or "XLA" in f.name)
    form = replace(SMALL, tokens=240, ways=(Way(8, 12, OWN + REPLAY),))
    code, _, found = run(capsys, monkeypatch, lawful(*["cpu"] * 6, **biased), form, products)
    assert code == 0
    assert [fault["caught"] for fault in found["law"][0]["faults"]] == [True, True]


@pytest.mark.long
def test_a_fault_of_attention_leaves_rings_alone(capsys, monkeypatch):
    """Their slots are not positions: a target of nothing else must equal the sound one."""
    batch = tuple(fault for fault in law_forms.FAULTS if "batch" in fault.name)
    form = replace(SMALL, ways=(Way(8, 2, OWN + REPLAY),))
    case = lawful(*["cpu"] * 5, sights=[{"window": 9}, {"window": 9}])
    code, _, found = run(capsys, monkeypatch, case, form, batch)
    assert code == 1
    (fault,) = found["law"][0]["faults"]
    assert not any(fault[what] for what in ("caught", "tokens", "logits_rows", "kv_rows"))
    assert fault["compared_logits_rows"] > 0


@pytest.mark.long
def test_long_prompts_are_compared_in_large_chunks(capsys, monkeypatch):
    """The same texts by steps and as prompts, but for their ends; a capacity's worth of each."""
    case = lawful(*["cpu"] * 5)
    form = replace(SMALL, ways=SMALL.ways[-1:], long_chunks=(16, 32))
    code, _, found = run(capsys, monkeypatch, case, form, ())
    assert code == 0
    for chunk, i in (16, -4), (32, -2):
        begun, prompted = found["law"][0]["compared"][i:][:2]
        assert begun["way"] == f"width 1, batch 1, twice the capacity, chunks of {chunk}: plain"
        assert prompted["way"] == f"{begun['way']}, all but the end of a text as a prompt"
        assert begun["compared_tokens"] < prompted["compared_tokens"]
        ends = 2 * (law_prompts.AFTER + 1)
        assert prompted["compared_kv_rows"] > ends > prompted["compared_logits_rows"] > 100


@pytest.mark.parametrize("changes", [HYBRID, SANDWICH, {}], ids=["hybrid", "sandwich", "dense"])
@pytest.mark.parametrize("fault", [*faults.FAULTS, *faults.HYBRIDS], ids=lambda fault: fault.name)
def test_a_faulty_target_rounds_where_the_sound_one_does(fault, changes):
    """In bfloat16, also where scales of norms are float32: the canonical products take no other."""
    config = target_config(**changes, norm_dtype="float32")
    target = Target(replace(config, dtype="bfloat16"))
    rows = jnp.zeros((3, 8), jnp.int32)

    def dtypes(target: Target) -> list:
        caches = target.empty_states(3, 64, 8, "bfloat16")
        params = jax.tree.map(lambda leaf: leaf.struct, abstract_params(target.config))
        over = Block(jnp.zeros(3, jnp.int32), jnp.full(3, 8), XLA)

        def rows_of(params):
            return target.apply({"params": params}, rows, rows, caches, over, (0, 1))

        return [x.dtype for x in jax.tree.leaves(jax.eval_shape(rows_of, params))]

    assert dtypes(planted(Models(target), fault).target) == dtypes(target)


@pytest.mark.long
def test_a_fault_of_few_rows_is_caught_in_a_narrower_block(capsys, monkeypatch):
    """Norms that add otherwise for 8 rows alone, where the widest block has 16."""
    monkeypatch.setattr(faults, "_rows", lambda x: 99 if x.shape[0] * x.shape[1] == 8 else 1)
    norm = tuple(fault for fault in law_forms.FAULTS if "norm" in fault.name)
    form = replace(SMALL, ways=(Way(8, 1, OWN), *SMALL.ways[1:]))
    code, _, found = run(capsys, monkeypatch, lawful(*["cpu"] * 5), form, norm)
    assert len(norm) == 1 and code == 0
    assert [fault["caught"] for fault in found["law"][0]["faults"]] == [True]


def test_a_fault_that_nobody_sees_fails(capsys, monkeypatch):
    """The sound target in a fault's place: the check refuses to vouch for itself."""
    sound = (law_forms.FAULTS[0]._replace(target=Target),)
    form = replace(SMALL, ways=SMALL.ways[-1:])
    code, out, found = run(capsys, monkeypatch, lawful(*["cpu"] * 5), form, sound)
    assert code == 1
    (law,) = found["law"]
    assert law["promised"] and law["differences"] == 0
    assert [each["caught"] for each in law["faults"]] == [False]
    assert out.count("FAILED: a planted fault was not caught (") == 1


def test_forms_decode_what_they_say():
    """The whole form: widths, batches, capacities and chunks that the law names."""
    form = law_forms.WHOLE
    assert form.batch * form.new_tokens >= form.tokens >= 10_000
    assert {way.width for way in form.ways} == {1, 4, 8, 16}
    assert {way.batch for way in form.ways} == {1, 8, 32, 64}
    assert {way.roomy for way in form.ways} == {True, False}
    assert {way.chunk for way in form.ways} == {64, 128}
    assert {mode for way in form.ways for mode in way.modes} == set(law_forms.MODES)
    usual = law_forms.GPU
    assert usual.batch * usual.new_tokens >= usual.tokens >= 10_000
    for each in (form, law_forms.CPU, usual):
        assert each.ways[-1].batch == each.batch and "own drafter" in each.ways[-1].modes
        assert all(way.modes[0] != "replay" for way in each.ways)
    assert all(any(way.rows for way in each.ways) for each in (form, law_forms.CPU, usual))
    assert form.long_chunks == usual.long_chunks == (256, 512)
    assert max(usual.long_chunks) < law_prompts.MOST - law_prompts.AFTER
    assert {way.width for way in form.fitting(small_case().models).ways} == {1, 4, 8}


def test_texts_that_end_early_are_more(capsys, monkeypatch):
    """Until they have the tokens that the form wants; and a step of one row a sequence."""
    case = lawful(*["cpu"] * 5)._replace(stops=[0, 1, 2])
    form = replace(SMALL, tokens=20, anchored=8, ways=(*SMALL.ways, Way(8, 2, OWN, rows=2)))
    code, out, found = run(capsys, monkeypatch, case, form, ())
    assert code == 0, out
    (law,) = found["law"]
    assert law["tokens"] >= 20 and law["anchored_tokens"] >= 8
    assert form.batch < law["texts"] <= form.batch * law_check.BATCHES
    assert [each["texts"] for each in law["compared"][1:4]] == [law["texts"]] * 3
    assert law["compared"][3]["way"] == "width 8, batch 2, 2 rows verified: own drafter"

    law["tokens"] = 19
    assert list(shortfalls(law)) == ["small: only 19 tokens were decoded, not 20"]


def test_a_comparison_of_nothing_fails():
    nothing = {"tokens": 0, "logits_rows": 0, "kv_rows": 0, "first": None}
    law = {
        "pair": "small",
        "compared": [{"way": "width 4", "compared_logits_rows": 0, **nothing}],
        "faults": [],
    }
    assert list(law_failures(law)) == ["small, width 4: no logits were compared"]
