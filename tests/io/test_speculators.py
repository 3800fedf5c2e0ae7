"""Drafters in the speculators library's format: the same drafts as in dflash's own.

The drafters are those that the reference recorded, said in the other words: a nested config, ids
counted from the embedding, an embedding and a head of their own, and a vocabulary of fewer tokens.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash import generate, load_pair
from jflash.generate import Pair
from jflash.io import configure_pair
from jflash.io.hf_config import drafter_config
from jflash.pair import Params
from jflash.records.config import Drafter2Config
from jflash.records.decoding import Sampling
from jflash.speculative import apply
from jflash.tokens.drafts import Rule, choose_places
from jflash.tokens.sampling import filters_of
from tests.step.test_reference_parity import CONTEXT, recorded_forward
from tests.support.reference import close, record
from tests.support.small_checkpoints import edit_tensors

REFERENCE = Path(__file__).parents[1] / "reference"
DENSE, WINDOW = REFERENCE / "cases" / "pair02", REFERENCE / "window_cases" / "pair00"
GEMMA = REFERENCE / "cases" / "pair13"  # its target multiplies its rows by 5.657


def rewritten(folder: Path, into: Path, ids: np.ndarray | None = None, **changes) -> Path:
    """The recorded drafter in the other format; `ids`: the target's tokens that it can draft."""
    raw = json.loads((folder / "drafter" / "config.json").read_text())
    inner = raw.pop("dflash_config", {})
    value = raw | inner
    tensors = load_file(folder / "drafter" / "model.safetensors")
    target = load_file(folder / "target" / "model.safetensors")
    table = target["model.embed_tokens.weight"]
    head = target.get("lm_head.weight", table)
    layer = {k: v for k, v in raw.items() if k not in ("block_size", "architectures")}
    layer.pop("num_target_layers", None)
    layer.pop("use_sliding_window", None)  # its layers' types say it
    own = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"verifier": {"name_or_path": "somewhere"}},
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [i + 1 for i in value["target_layer_ids"]],
        "block_size": value["block_size"],
        "mask_token_id": value["mask_token_id"],
        "draft_vocab_size": len(table) if ids is None else len(ids),
    }
    if ids is not None:
        seen = np.zeros(len(table), bool)
        seen[ids] = True
        tensors |= {"t2d": seen, "d2t": ids - np.arange(len(ids))}
        tensors |= {"lm_head.weight": np.ascontiguousarray(head[ids])}
    tensors |= {"embed_tokens.weight": table, "verifier_norm.weight": np.ones(4, np.float32)}
    into.mkdir()
    (into / "config.json").write_text(json.dumps(own | changes))
    save_file(tensors, into / "model.safetensors")
    return into


def others(folder: Path) -> np.ndarray:
    """The target's tokens in another order, without one that no text has."""
    raw = json.loads((folder / "target" / "config.json").read_text())
    said = {t for case in record(folder)["cases"] for t in case["output_ids"]}
    unsaid = min(set(range(raw["vocab_size"])) - said)
    order = np.random.default_rng(0).permutation(raw["vocab_size"])
    return order[order != unsaid]


@pytest.mark.parametrize("folder", [DENSE, WINDOW], ids=["full", "windows"])
def test_the_recorded_generations(folder, tmp_path):
    """Every token and every length is the recorded one: no draft is lost or moved."""
    own = rewritten(folder, tmp_path / "own", others(folder))
    pair = load_pair(folder / "target", own, dtype="float32")
    plain = load_pair(folder / "target", folder / "drafter", dtype="float32")
    c, want = pair.models.drafter.config, plain.models.drafter.config
    assert c.own_embedding and c.draft_vocab_size == c.vocab_size - 1
    assert c.layers == want.layers and c.target_layer_ids == want.target_layer_ids
    # Neither may be the target's: its own are what is used.
    target = dict(pair.params.target)
    assert pair.params.drafter["d2t"].dtype == np.int32
    cases = [x for x in record(folder)["cases"] if x["block_size"] == c.block_size]
    for case in cases[:4]:
        got = generate(
            Pair(pair.models, Params(target, pair.params.drafter)), [case["prompt_ids"]],
            max_new_tokens=case["max_new_tokens"], capacity=512, prefill_chunk=32,
            stop_token_ids=case["stop_token_ids"] or [],
        )[0]  # fmt: skip
        assert got.token_ids == case["output_ids"]
        assert got.acceptance_lengths == case["acceptance_lengths"]


def test_drafts_and_their_probabilities_are_of_the_targets_tokens(tmp_path):
    """Of the recorded hidden states: the best of the head's tokens, and q of these alone."""
    ids = np.random.default_rng(1).permutation(60)[:40]
    own = rewritten(DENSE, tmp_path / "own", ids)
    pair = load_pair(DENSE / "target", own, dtype="float32")
    recorded = load_file(DENSE / "tensors.safetensors")
    logits = recorded["draft_logits"][1:]
    hidden = jnp.asarray(recorded["draft_hidden"])[None, 1:]

    drafter, filters = pair.models.drafter, filters_of(Sampling(temperature=1.0))
    own = apply(drafter, pair.params.drafter, hidden, method="raw_logits")
    anchor = jnp.zeros(1, jnp.int32)
    scored = apply(drafter, pair.params.drafter, hidden, anchor, own, method="candidates")
    rule = Rule(
        False, False, jax.tree.map(lambda x: x[None], filters),
        jnp.arange(hidden.shape[1])[None], jax.random.split(jax.random.key(0), 1),
    )  # fmt: skip
    found = choose_places(rule, scored, logits.shape[1])
    drawn = choose_places(rule._replace(draws=True), scored, logits.shape[1])
    np.testing.assert_array_equal(found.tokens[0], ids[logits[:, ids].argmax(-1)])
    assert found.q is None and drawn.q is not None
    np.testing.assert_allclose(
        drawn.q[0][:, ids], jax.nn.softmax(logits[:, ids]), rtol=1e-4, atol=1e-6
    )
    rest = np.setdiff1d(np.arange(logits.shape[1]), ids)
    assert not np.asarray(drawn.q[0][:, rest]).any()
    assert np.isin(drawn.tokens, ids).all()


def test_ends_that_the_file_leaves_out_are_the_targets(tmp_path):
    """A full head, and the embedding; and the keys of DFlash 2."""
    folder = rewritten(DENSE, tmp_path / "own")
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "embed" not in k}, folder / "model.safetensors")
    pair = load_pair(DENSE / "target", folder, dtype="float32")
    c = pair.models.drafter.config
    assert not c.own_embedding and c.draft_vocab_size is None and c.num_target_layers == 4
    raw = json.loads((folder / "config.json").read_text())
    second = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=8)
    got = drafter_config(raw | {"speculators_model_type": "dflash2"} | second)
    assert isinstance(got, Drafter2Config) and got.selector_rank == 4
    layer = raw["transformer_layer_config"] | {"sliding_window": 9}
    layer |= {"layer_types": ["sliding_attention", "full_attention"]}
    for denied in (False, True):
        windowed = raw | {"transformer_layer_config": layer, "sliding_window_non_causal": denied}
        for kind in ({}, second | {"speculators_model_type": "dflash2"}):
            seen = [(m.window, m.causal) for m in drafter_config(windowed | kind).mixers]
            assert seen == [(9, not denied), (None, False)]


def test_what_a_config_leaves_out_is_what_the_library_takes(tmp_path):
    """Windows of its dflash2 look both ways, those of its dflash do not."""
    raw = json.loads((rewritten(DENSE, tmp_path / "own") / "config.json").read_text())
    layer = raw["transformer_layer_config"] | {"sliding_window": 9, "hidden_size": 64}
    layer |= {"layer_types": ["sliding_attention", "full_attention"]}
    first = drafter_config(raw | {"transformer_layer_config": layer})
    second = drafter_config(
        raw | {"transformer_layer_config": layer, "speculators_model_type": "dflash2"}
    )
    assert [m.causal for m in first.mixers] == [True, False]
    assert [(m.window, m.causal) for m in second.mixers] == [(9, False), (None, False)]
    assert isinstance(second, Drafter2Config)
    assert (second.conv_kernel_size, second.conv_group_size) == (2, 16)
    assert (second.selector_rank, second.selector_top_k) == (256, 16)


@pytest.mark.parametrize("embedded", [True, False])
def test_rows_of_a_target_that_scales_its_own_are_raw(embedded, tmp_path):
    """Whether the file repeats them or not; a scale that the config states holds."""
    folder = rewritten(GEMMA, tmp_path / "own")
    if not embedded:
        edit_tensors(folder, drop=("embed_tokens.weight",))
    files = configure_pair(GEMMA / "target", folder, dtype="float32")
    assert files.models.target.config.embedding_scale > 5
    c = files.models.drafter.config
    assert (c.own_embedding, c.input_embedding_scale, files.targets_scale) == (embedded, 1.0, None)
    stated = rewritten(GEMMA, tmp_path / "stated", input_embedding_scale=5.5)
    files = configure_pair(GEMMA / "target", stated, dtype="float32")
    assert files.models.drafter.config.input_embedding_scale == 5.5


HEADS, HEAD = 2, 20  # of DENSE's drafter as a Llama's, whose heads share its 40 columns


def as_llama(into: Path, normed: bool) -> Path:
    """DENSE's drafter with layers of Llama's config, which leaves out the width of a head."""
    layer = json.loads((DENSE / "drafter" / "config.json").read_text())
    for key in ("head_dim", "dflash_config", "num_target_layers", "block_size", "architectures"):
        del layer[key]
    folder = rewritten(DENSE, into, transformer_layer_config=layer | {"model_type": "llama"})
    rng, layers = np.random.default_rng(3), ("layers.0.self_attn.", "layers.1.self_attn.")
    shapes = {"q_proj": (40, 40), "k_proj": (20, 40), "v_proj": (20, 40), "o_proj": (40, 40)}
    made = {
        f"{layer}{name}.weight": rng.standard_normal(shape, np.float32) * 0.3
        for layer in layers
        for name, shape in shapes.items()
    }
    norms = [f"{layer}{x}_norm.weight" for layer in layers for x in "qk"]
    weights = {name: 1 + 0.3 * rng.standard_normal(HEAD, np.float32) for name in norms}
    edit_tensors(folder, drop=() if normed else tuple(norms), **made, **weights if normed else {})
    return folder


def written_out(folder: Path, features: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Hidden states of a block after `features`, in float64: Llama's layers that see all rows."""
    w = {name: x.astype(float) for name, x in load_file(folder / "model.safetensors").items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = w.get(name)
        return x if scale is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turned(x: np.ndarray, first: int) -> np.ndarray:
        angles = np.arange(first, first + len(x))[:, None] / 5e5 ** (np.arange(0, HEAD, 2) / HEAD)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["embed_tokens.weight"][block]
    context = norm(features @ w["fc.weight"].T, "hidden_norm.weight")
    for at in ("layers.0.", "layers.1."):
        normed = norm(x, f"{at}input_layernorm.weight")
        q, k, v, o = (w[f"{at}self_attn.{y}_proj.weight"].T for y in "qkvo")
        rows = np.concatenate([context, normed])
        queries = norm((normed @ q).reshape(-1, HEADS, HEAD), f"{at}self_attn.q_norm.weight")
        keys = norm((rows @ k).reshape(-1, 1, HEAD), f"{at}self_attn.k_norm.weight")
        queries, keys = turned(queries, len(context)), turned(keys, 0)[:, 0]
        scores = np.einsum("tnh,sh->tns", queries, keys) * HEAD**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("tns,sh->tnh", weights, rows @ v).reshape(len(x), -1) @ o
        normed = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up, down = (w[f"{at}mlp.{y}_proj.weight"].T for y in ("gate", "up", "down"))
        x = x + (normed @ gate / (1 + np.exp(-(normed @ gate))) * (normed @ up)) @ down
    return norm(x, "norm.weight")


@pytest.mark.parametrize("normed", [False, True])
def test_layers_of_llamas_class(normed, tmp_path):
    """With norms of queries and keys where the file has them, and without where it has none."""
    folder = as_llama(tmp_path / "own", normed)
    pair = load_pair(DENSE / "target", folder, dtype="float32")
    c = pair.models.drafter.config
    assert {(m.qk_norm, m.head_dim, m.num_heads) for m in c.mixers} == {(normed, HEAD, HEADS)}
    tokens = load_file(DENSE / "tensors.safetensors")["prompt_ids"].reshape(1, -1)
    _, features, hidden, _ = recorded_forward(pair, jnp.asarray(tokens, jnp.int32))
    block = np.full(c.block_size, c.mask_token_id)
    block[0] = tokens[0, CONTEXT]
    want = written_out(folder, np.asarray(features[0, :CONTEXT], float), block)
    close(hidden[0], want)


def test_norms_of_some_layers_and_of_no_qwen3_are_missing(tmp_path):
    """A file without any is a Llama's; with some, the others were lost."""
    folder = as_llama(tmp_path / "own", True)
    edit_tensors(folder, drop=("layers.1.self_attn.q_norm.weight",))
    with pytest.raises(ValueError, match=r"missing: layers\.1\.self_attn\.q_norm\.weight"):
        load_pair(DENSE / "target", folder, dtype="float32")
    folder = rewritten(DENSE, tmp_path / "qwen3")
    names = [f"layers.{i}.self_attn.{x}_norm.weight" for i in range(2) for x in "qk"]
    edit_tensors(folder, drop=tuple(names))
    with pytest.raises(ValueError, match=r"missing: layers\.0\.self_attn\.q_norm\.weight"):
        load_pair(DENSE / "target", folder, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "dspark"}, "'dspark' is not supported, only dflash, dflash2"),
        ({"projector_type": "domino"}, "only plain DFlash drafts"),
        ({"sample_from_anchor": True}, "sample_from_anchor True"),
        ({"transformer_layer_config": None}, "needs transformer_layer_config"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"target_hidden_size": 8}, "target_hidden_size 8"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "must be within"),
        ({"aux_hidden_state_layer_ids": [2, 9]}, "taps layer 8 .counted from 0. of a target of 4"),
        ({"speculators_model_type": None}, "speculators_model_type None is not supported"),
        ({"transformer_layer_config": {"layer_types": 5}}, "layer_types must be a list of names"),
        ({"transformer_layer_config": {"hidden_size": float("nan")}}, "hidden_size must be"),
        ({"draft_vocab_size": 7}, "wrong shape: lm_head.weight"),
        ({"draft_vocab_size": 10**6}, "more than the vocabulary"),
    ],
)
def test_what_is_not_read_is_refused(changes, named, tmp_path):
    folder = rewritten(DENSE, tmp_path / "own", others(DENSE), **changes)
    with pytest.raises(ValueError, match=named):
        load_pair(DENSE / "target", folder, dtype="float32")


def test_ids_twice_are_refused(tmp_path):
    ids = others(DENSE)
    ids[0] = ids[1]
    folder = rewritten(DENSE, tmp_path / "own", ids)
    with pytest.raises(ValueError, match="d2t gives ids twice"):
        load_pair(DENSE / "target", folder, dtype="float32")
