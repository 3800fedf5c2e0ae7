"""DFlash 2 against dflash 0.1.0's `DFlash2DraftModel`: random configurations, its own record.

tests/reference/make_dflash2_cases.py writes such sets. A small one is committed; .ci/run makes one
with a new seed, of half of the families by turns, and names it in JFLASH_FRESH_DFLASH2_CASES.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jflash import generate, load_pair
from jflash.io.hf_config import TARGETS
from jflash.layers import cache
from jflash.layers.cache import LayerCache
from jflash.layers.passes import Rows
from jflash.speculative import apply
from jflash.training.attention import blocks_attend
from tests.support.reference import (
    FRESH,
    case_folders,
    case_sets,
    close,
    families,
    fresh,
    long_but_for,
    pair,
    record,
)

pytestmark = pytest.mark.usefixtures("compiled_once")
COMMITTED = Path(__file__).parents[1] / "reference" / "dflash2_cases"
SETS = case_sets(COMMITTED, FRESH[1])
FOLDERS = case_folders(*SETS)
# These decode in every run, and fresh ones of all families in .ci/run: full attention, a window of
# both sides, a delta net with a causal one, and sinks.
DECODED = tuple(f"dflash2_cases-pair{i}" for i in ("00", "02", "05", "08"))
# And these are looked at inside: two more, with heads and norms of their own, and a multiplier.
SEEN = (*DECODED, *(f"dflash2_cases-pair{i}" for i in (13, 14)))
TEMPERATURE, SPLIT = 0.7, 9  # of the recorded probabilities; tokens before the recorded block
CHUNK = 11  # shorter than a prompt; that no other test takes: RING_BLOCK is no part of a shape


def by_id(ids, *values) -> list[np.ndarray]:
    """Rows in the order of their candidates' ids: the reference's own order means nothing."""
    order = np.argsort(np.asarray(ids), axis=-1)
    return [np.take_along_axis(np.asarray(x), order, axis=-1) for x in (ids, *values)]


def recorded_forward(both, tokens, anchor):
    """Hidden states of the masked rows, logits, candidates, scores, and the greedy drafts."""
    models, params = both.models, both.params
    drafter = models.drafter
    assert drafter is not None
    c = drafter.config
    length = tokens.shape[1]
    positions = jnp.arange(length + c.block_size)[None]
    causal = Rows(jnp.tril(jnp.ones((length,) * 2, bool))[None, None])
    _, features, _ = apply(
        models.target, params.target, tokens, positions[:, :length],
        (None,) * models.target.config.num_layers, causal, models.taps,
    )  # fmt: skip
    context = apply(
        drafter, params.drafter, features[:, :SPLIT], positions[:, :SPLIT], method="context"
    )
    caches = tuple(LayerCache(*projected.split()[1:]) for projected in context)
    block = jnp.full((1, c.block_size), c.mask_token_id).at[0, 0].set(anchor[0])
    before, anchors = jnp.ones((1, 1, SPLIT), bool), jnp.full((1, 1), SPLIT)
    attend = blocks_attend(before, anchors, c.block_size, "xla")
    embeddings = apply(models.target, params.target, block, method="embed")
    place = positions[:, SPLIT : SPLIT + c.block_size]
    states, _ = apply(drafter, params.drafter, embeddings, place, caches, attend)
    hidden = states[:, 1:]
    logits = apply(models.target, params.target, hidden, method="raw_logits")
    logits = apply(drafter, params.drafter, logits, method="adjust_logits")
    candidates, scores = apply(drafter, params.drafter, hidden, anchor, logits, method="candidates")
    return hidden, logits, candidates, scores


@pytest.mark.parametrize("folder", long_but_for(FOLDERS, *SEEN, *fresh(FOLDERS)))
def test_states_candidates_and_scores(folder: Path):
    """The scores through the probabilities that the reference drew a path with."""
    both, want = pair(folder), load_file(folder / "tensors.safetensors")
    tokens = jnp.asarray(want["prompt_ids"], jnp.int32)[None]
    forward = jax.jit(lambda t, a: recorded_forward(both, t, a))
    found = forward(tokens, tokens[:, SPLIT])
    hidden, logits, candidates, scores = (np.asarray(x[0]) for x in found)
    close(hidden, want["draft_hidden"], least=1.0)
    close(logits, want["draft_logits"], least=1.0)
    before, best = 0, 0  # indices of the tokens before, on the drawn and on the greedy path
    for i, drawn in enumerate(want["drawn"]):
        q = np.asarray(jax.nn.softmax(scores[i, before] / TEMPERATURE))
        ids, mine = by_id(candidates[i], q)
        theirs = by_id(want["candidates"][i], want["q"][i])
        np.testing.assert_array_equal(ids, theirs[0])
        close(mine, theirs[1], least=1.0)
        before = int(np.flatnonzero(candidates[i] == drawn)[0])
        best = int(np.argmax(scores[i, best]))
        assert candidates[i, best] == want["best"][i]


@pytest.mark.parametrize("folder", long_but_for(FOLDERS, *DECODED, *fresh(FOLDERS)))
def test_whole_generations(folder: Path, monkeypatch):
    """Tokens and acceptance lengths, step for step; rings as small as can be, so that they wrap."""
    monkeypatch.setattr(cache, "RING_BLOCK", 1)
    for case in record(folder)["cases"]:
        both = pair(folder, case["block_size"])
        got = generate(
            both, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"],
            stop_token_ids=case["stop_token_ids"] or [], prefill_chunk=CHUNK,
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"]
        assert got.acceptance_lengths == case["acceptance_lengths"]


def test_plain_decoding_gives_the_same_tokens():
    """The target alone at width 1: what its drafter's steps committed, whatever they accepted."""
    folder = COMMITTED / "pair00"
    alone = load_pair(folder / "target", None, dtype="float32", block_size=1)
    for case in record(folder)["cases"]:
        got = generate(
            alone, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"],
            stop_token_ids=case["stop_token_ids"] or [], prefill_chunk=CHUNK,
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"]
        assert set(got.acceptance_lengths) <= {1}


@pytest.mark.parametrize("cases", SETS)
def test_the_set_is_worth_its_name(cases: Path):
    """Equality means something: drafts are accepted, the selector changes them, windows cut."""
    folders = sorted(cases.glob("pair*"))
    assert families(cases) == set(TARGETS.values())
    configs = [json.loads((f / "drafter" / "config.json").read_text()) for f in folders]
    windows = [c["sliding_window"] for c in configs if c["use_sliding_window"]]
    assert min(windows) < 20 and any(c.get("is_causal") is False for c in configs)
    assert 2 * len(windows) >= len(configs) > len(windows)
    targets = [json.loads((f / "target" / "config.json").read_text()) for f in folders]
    if len(folders) > len(TARGETS):
        renormalised = {c["norm_topk_prob"] for c in targets if c["model_type"] == "qwen3_moe"}
        assert renormalised == {True, False}
    lengths = [n for f in folders for c in record(f)["cases"] for n in c["acceptance_lengths"]]
    assert len(folders) >= (15 if cases == COMMITTED else 7)
    assert np.mean(lengths) > 1.3 and max(lengths) >= 5
    wanted = [load_file(folder / "tensors.safetensors") for folder in folders]
    unary = [want["draft_logits"].argmax(-1) for want in wanted]
    changed = [np.any(a != want["best"]) for a, want in zip(unary, wanted, strict=True)]
    assert np.mean(changed) >= 0.3
