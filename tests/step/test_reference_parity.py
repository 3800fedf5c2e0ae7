"""jflash against dflash 0.1.0, transformers and torch: their random checkpoints, their record.

tests/reference/make_cases.py writes such sets. A small one is committed; .ci/run makes a fresh one
with a new seed in an environment of its own and names it in JFLASH_FRESH_CASES.
"""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash import generate, load_pair, stream
from jflash.compiled.shape import Shape, new_state
from jflash.io.hf_config import TARGETS
from jflash.layers import cache
from jflash.layers.passes import Block, Chunk, Rows
from jflash.records.kernels import XLA
from jflash.speculative import apply
from tests.support.reference import (
    FRESH,
    PYTHON,
    case_folders,
    case_sets,
    close,
    families,
    fresh,
    long_but_for,
    marks,
    pair,
    record,
    run_reference,
)

pytestmark = pytest.mark.usefixtures("compiled_once")
COMMITTED = Path(__file__).parents[1] / "reference" / "cases"
RECORD_PAIR = COMMITTED.with_name("record_pair.py")
WINDOWS = COMMITTED.with_name("window_cases")
SETS = case_sets(COMMITTED, FRESH[0])
WINDOW_FOLDERS = case_folders(pytest.param(WINDOWS, id=WINDOWS.name))
FOLDERS = [*case_folders(*SETS), *WINDOW_FOLDERS]
PLAIN = ("window_cases-pair00",)  # Qwen3
ALONE = [case for case in FOLDERS if case.id in (*PLAIN, "cases-pair00", "cases-pair01")]
# Pairs of each kind, which decode in every run: a fresh one of every family does so in .ci/run,
# here or in test_dflash2_parity.py, where a committed delta net decodes. Qwen3's experts, Gemma 4,
# and a drafter with windows; another one with the smallest rings.
DECODED = (*(f"cases-pair{i}" for i in ("03", "13")), "window_cases-pair00")
# gpt-oss, windows with sinks beside full attention: this one decodes at its other widths.
EVERY_WIDTH = ("cases-pair08",)
NARROWEST_WINDOW = "window_cases-pair01"
# All families but Qwen2 and Llama. Of 04, 06 to 08, 10 to 12 and 15 the features of every layer are
# recorded.
IN_PIECES = tuple(f"cases-pair{i:02}" for i in range(2, 16))
# Of these a layer of every kind, each with its own caches; the others have layers of these kinds.
KINDS = tuple(f"cases-pair{i:02}" for i in (2, 5, 7, 8, 9, 10, 11, 13, 14, 15))
PIECE = 4  # tokens of a chunk or a block: of the recorded 20 a border of the delta rule is inside
CONTEXT = 12  # tokens before the recorded block
CAPACITY = 512  # of all cases: each width of a pair is compiled once


def recorded_forward(both, tokens):
    """Logits and features of the tokens; hidden states and logits of a block after CONTEXT."""
    models, params = both.models, both.params
    drafter = models.drafter
    assert drafter is not None
    c, width = drafter.config, models.block_size
    positions = jnp.arange(tokens.shape[1] + width)[None]
    causal = Rows(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None, None])
    caches = (None,) * models.target.config.num_layers
    hidden, features, _ = apply(
        models.target, params.target, tokens, positions[:, : tokens.shape[1]], caches, causal,
        models.taps,
    )  # fmt: skip
    context = jnp.arange(CONTEXT)[None]
    rows = apply(drafter, params.drafter, features[:, :CONTEXT], context, method="context")
    caches = tuple(
        projected.write(cache, context, "xla")[1]
        for cache, projected in zip(
            drafter.empty_states(1, 64, 16, "float32"),
            rows, strict=True,
        )
    )  # fmt: skip
    block = jnp.full((1, width), c.mask_token_id).at[0, 0].set(tokens[0, CONTEXT])
    attend = Block(jnp.full(1, CONTEXT), jnp.full(1, width), XLA)
    embeddings = apply(models.target, params.target, block, method="embed")
    place = positions[:, CONTEXT : CONTEXT + width]
    states, _ = apply(drafter, params.drafter, embeddings, place, caches, attend)
    logits = apply(models.target, params.target, hidden, method="logits")
    drafts = apply(models.target, params.target, states, method="raw_logits")
    drafts = apply(drafter, params.drafter, drafts, method="adjust_logits")
    return logits, features, states, drafts


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_features_and_drafter_states(folder: Path):
    both, want = pair(folder), load_file(folder / "tensors.safetensors")
    tokens = jnp.asarray(want["prompt_ids"], jnp.int32).reshape(1, -1)
    found = jax.jit(lambda t: recorded_forward(both, t))(tokens)
    names = ("logits", "features", "draft_hidden", "draft_logits")
    for name, got in zip(names, found, strict=True):
        close(got[0], want[name])


@pytest.mark.parametrize(
    "folder", long_but_for([case for case in FOLDERS if case.id in IN_PIECES], *KINDS)
)
def test_hidden_states_of_chunks_and_blocks(folder: Path, monkeypatch):
    """A prompt in two chunks, then the rest in blocks, with rings as short as can be.

    Each block is rolled back once: other tokens stood in its place before.
    """
    monkeypatch.setattr(cache, "RING_BLOCK", 1)
    both, want = pair(folder), load_file(folder / "tensors.safetensors")
    models, params = both.models, both.params
    tokens = jnp.asarray(want["prompt_ids"], jnp.int32)[None]
    caches = models.target.empty_states(1, 64, PIECE, "float32")
    rings = [c for c in caches if isinstance(c, cache.RingCache)]
    assert all(c.k.shape[1] < tokens.shape[1] for c in rings)  # which go round

    @functools.partial(jax.jit, static_argnames="chunk")
    def through(ids, first, caches, *, chunk: bool):
        over = Block(first[None], jnp.full(1, PIECE), XLA)
        if chunk:
            over = Chunk(jnp.int32(0), first, jnp.int32(2 * PIECE), XLA)
        positions = first + jnp.arange(PIECE)[None]
        hidden, features, caches = apply(
            models.target, params.target, ids, positions, caches, over, models.taps
        )
        return apply(models.target, params.target, hidden, method="logits"), features, caches

    found = []
    for first in range(0, tokens.shape[1], PIECE):
        ids, chunk = tokens[:, first : first + PIECE], first < 2 * PIECE
        if not chunk:
            others = (ids + 1) % want["logits"].shape[1]
            caches = through(others, jnp.int32(first), caches, chunk=False)[-1]
        logits, features, caches = through(ids, jnp.int32(first), caches, chunk=chunk)
        found.append((logits[0], features[0]))
    for name, got in zip(("logits", "features"), zip(*found, strict=True), strict=True):
        close(jnp.concatenate(got), want[name])


def check_generations(folder: Path, own_width: bool) -> None:
    """Tokens and acceptance lengths, one by one, of one width or of the others.

    Of the first case's width some are streamed, the rest are in one loop.
    """
    cases = record(folder)["cases"]
    width = cases[0]["block_size"]
    for number, case in enumerate(cases):
        if (case["block_size"] == width) != own_width:
            continue
        both = pair(folder, case["block_size"])
        how = {
            "max_new_tokens": case["max_new_tokens"],
            "stop_token_ids": case["stop_token_ids"] or [],
            "prefill_chunk": 32,
            "capacity": CAPACITY,
        }
        if number % 4 or not own_width:
            got = generate(both, [case["prompt_ids"]], **how)[0]
        else:
            got = list(stream(both, case["prompt_ids"], **how))[-1].generation
        assert got.token_ids == case["output_ids"], case["name"]
        assert got.acceptance_lengths == case["acceptance_lengths"], case["name"]
        assert got.finish_reason == {"stop": "stop", "limit": "length"}[case["ended_by"]]


@pytest.mark.parametrize("folder", long_but_for(FOLDERS, *DECODED, *fresh(FOLDERS)))
def test_whole_generations(folder: Path):
    check_generations(folder, own_width=True)


def widths(folder: Path) -> set[int]:
    return {case["block_size"] for case in record(folder)["cases"]}


SEVERAL = [case for case in FOLDERS if len(widths(case.values[0])) > 1]


@pytest.mark.parametrize("folder", long_but_for(SEVERAL, *EVERY_WIDTH))
def test_whole_generations_at_other_widths(folder: Path):
    """Programs of one to three more widths a pair, which take as long as its own."""
    check_generations(folder, own_width=False)


@pytest.mark.parametrize("folder", long_but_for(ALONE, *PLAIN))
def test_plain_decoding_gives_the_same_tokens(folder: Path):
    """The target alone at width 1: what its drafter's steps committed, whatever they accepted."""
    alone = load_pair(folder / "target", None, dtype="float32", block_size=1)
    for case in record(folder)["cases"]:
        got = generate(
            alone, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"],
            stop_token_ids=case["stop_token_ids"] or [], prefill_chunk=32, capacity=CAPACITY,
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"], case["name"]
        assert set(got.acceptance_lengths) <= {1}


def repeating(folder: Path, out: Path) -> Path:
    """The pair's drafter with its first tap three times, of whose columns each copy has a share."""
    drafter = Path(shutil.copytree(folder / "drafter", out))
    config, weights = drafter / "config.json", drafter / "model.safetensors"
    said = json.loads(config.read_text())
    first, *others = said["target_layer_ids"]
    config.write_text(json.dumps(said | {"target_layer_ids": [first, *others, first, first]}))
    tensors = load_file(weights)
    columns, rest = np.split(tensors["fc.weight"], [said["hidden_size"]], axis=1)
    draw = np.random.default_rng(0)
    second, third = (draw.normal(size=columns.shape).astype(np.float32) for _ in range(2))
    shares = [columns - second - third, rest, second, third]
    tensors["fc.weight"] = np.ascontiguousarray(np.concatenate(shares, axis=1))
    save_file(tensors, weights, {"format": "pt"})
    return drafter


@pytest.mark.parametrize("judge", ["recorded", pytest.param("asked", marks=marks(PYTHON))])
def test_a_layer_may_be_tapped_again(tmp_path, judge):
    """dflash 0.1.0 takes such drafters as they are; so the pair's own record holds for this one."""
    folder = COMMITTED / "pair00"
    drafter = repeating(folder, tmp_path / "drafter")
    cases = record(folder)["cases"]
    cases = [case for case in cases if not case["stop_token_ids"] and case["block_size"] == 11][:3]
    assert len(cases) == 3
    stops = []
    if judge == "asked":  # whose script needs an end
        stops = [63]
        target = Path(shutil.copytree(folder / "target", tmp_path / "target"))
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"eos_token_id": stops[0]}))
        prompts, found = tmp_path / "prompts.json", tmp_path / "found.json"
        prompts.write_text(json.dumps([{"prompt_ids": case["prompt_ids"]} for case in cases]))
        run_reference(
            RECORD_PAIR, "--target", target, "--drafter", drafter, "--prompts", prompts,
            "--out", found, "--max-new-tokens", 96,
        )  # fmt: skip
        cases = [case | {"max_new_tokens": 96} for case in json.loads(found.read_text())["cases"]]
    both = load_pair(folder / "target", drafter, dtype="float32")
    assert len(both.models.taps) == 4
    for case in cases:
        [got] = generate(
            both, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"],
            stop_token_ids=stops, prefill_chunk=32, capacity=CAPACITY,
        )  # fmt: skip
        assert got.token_ids == case["output_ids"]
        assert got.acceptance_lengths == case["acceptance_lengths"]


def drafter_json(folder: Path) -> dict:
    return json.loads((folder / "drafter" / "config.json").read_text())


@pytest.mark.parametrize("folder", long_but_for(WINDOW_FOLDERS, NARROWEST_WINDOW))
def test_rings_as_small_as_can_be_give_the_same(folder: Path, monkeypatch):
    """window + W - 1 slots and no more, and prompts in chunks longer than that."""
    monkeypatch.setattr(cache, "RING_BLOCK", 1)
    both, window = pair(folder), drafter_json(folder)["sliding_window"]
    width, wrapped = both.models.block_size, 0
    # A chunk that no other test takes: what is compiled does not know of the patched constant.
    chunk = 48 + width
    shape = Shape(1, CAPACITY, chunk, 16)
    sizes = {c.k.shape[1] for c in new_state(both.models, shape).drafter_cache if c.wraps}
    assert sizes == {window + width - 1} and window + width - 1 < chunk
    for case in record(folder)["cases"]:
        if case["block_size"] != width:
            continue
        got = generate(
            both, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"],
            stop_token_ids=case["stop_token_ids"] or [], prefill_chunk=chunk, capacity=CAPACITY,
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"], case["name"]
        assert got.acceptance_lengths == case["acceptance_lengths"], case["name"]
        wrapped += len(case["prompt_ids"]) > 2 * (window + width)
    assert wrapped >= 1


def test_the_window_cases_are_worth_their_name():
    """Both kinds of windows, full layers beside them, causality said and unsaid, RoPE scaled."""
    folders = sorted(WINDOWS.glob("pair*"))
    configs = [drafter_json(folder) for folder in folders]
    runs = [case for folder in folders for case in record(folder)["cases"]]
    assert {c.get("is_causal") for c in configs} == {None, True, False}
    assert any(len(set(c["layer_types"])) == 2 for c in configs)
    assert any(c["sliding_window"] < 8 for c in configs)  # narrower than a block
    scaling = [c.get("rope_parameters") or c["rope_scaling"] for c in configs]
    assert {s["rope_type"] for s in scaling} == {"yarn", "linear"}
    assert any("mscale_all_dim" in s for s in scaling)
    assert any("final_logit_softcapping" in c.get("dflash_config", {}) for c in configs)
    assert len(runs) >= 25 and max(len(case["prompt_ids"]) for case in runs) > 120
    assert np.mean([n for case in runs for n in case["acceptance_lengths"]]) > 1.5


@pytest.mark.parametrize("cases", SETS)
def test_the_set_is_worth_its_name(cases: Path):
    """Enough generations, of enough kinds, that equality means something."""
    records = [record(folder) for folder in sorted(cases.glob("pair*"))]
    runs = [case for r in records for case in r["cases"]]
    lengths = [n for case in runs for n in case["acceptance_lengths"]]
    inside = [case["ended_by"] for case in runs if case["end_inside_block"]]
    assert families(cases) == set(TARGETS.values())
    assert len(runs) >= 40
    assert np.mean(lengths) > 2
    assert set(lengths) == set(range(1, 17))
    assert inside.count("stop") >= 10
    assert inside.count("limit") >= 10
    assert any(case["block_size"] & (case["block_size"] - 1) for case in runs)
    assert {1, 31, 32, 33} <= {len(case["prompt_ids"]) for case in runs}
    targets = {
        folder / "target": json.loads((folder / "target" / "config.json").read_text())
        for folder in cases.glob("pair*")
    }
    assert {"float32"} == {config.get("dtype", "float32") for config in targets.values()}
    experts = {f: c for f, c in targets.items() if c["model_type"] == "qwen3_moe"}
    kinds = {(c["norm_topk_prob"], expert_tensors(f)) for f, c in experts.items()}
    wanted = {(True, "each"), *([] if cases == COMMITTED else [(False, "stacked")])}
    assert kinds == wanted or (cases != COMMITTED and not experts)  # of half of the families


def expert_tensors(folder: Path) -> str:
    """Whether a target's file has a tensor for each expert, or one for all of a layer."""
    names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    return "stacked" if any(name.endswith(".experts.down_proj") for name in names) else "each"
