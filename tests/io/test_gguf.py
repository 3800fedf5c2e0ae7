"""GGUF targets: every type's numbers by a formula of its own, names and rows, configs, bad files.

That the logits are transformers' is shown in tests/io/test_gguf_reference.py.
"""

import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES

from jflash import generate, load_pair
from jflash.cli.main import run
from jflash.io import (
    configure_pair,
    load_target,
    load_tokenizer,
    load_weights,
    open_checkpoint,
    read_ahead,
    stop_token_ids,
)
from jflash.io.hf_config import target_config
from jflash.layers.rope import rope_frequencies
from jflash.records.specs import Llama3Scaling, RopeConfig
from tests.support.gguf_files import (
    ASSISTANT,
    EOS,
    HEADS,
    K_QUANTS,
    KINDS,
    LAYERS,
    PADDING,
    PLAIN,
    TOKENS,
    USER,
    VOCABULARY,
    WIDTH,
    Kind,
    tensors,
    write_gguf,
)  # fmt: skip


def half(raw: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block."""
    return raw[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def simple_numbers(kind: Kind, raw: np.ndarray) -> np.ndarray:
    """Blocks [n, bytes] of the older types as numbers [n, 32], as llama.cpp defines them."""
    d = half(raw, 0)
    if kind == Kind.Q8_0:
        return d * raw[:, 2:].view(np.int8)
    offset = kind in (Kind.Q4_1, Kind.Q5_1)
    at = 4 if offset else 2
    q = np.concatenate([raw[:, -16:] & 15, raw[:, -16:] >> 4], axis=1).astype(np.int32)
    if kind in (Kind.Q5_0, Kind.Q5_1):
        q += 16 * np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little")
    if offset:
        return d * q + half(raw, 2)
    return d * (q - (16 if kind == Kind.Q5_0 else 8))


def k_numbers(kind: Kind, raw: np.ndarray) -> np.ndarray:
    """Blocks [n, bytes] of K-quants as numbers [n, 256], a column at a time."""
    out, wide = np.zeros((len(raw), 256), np.float32), raw.astype(np.int32)
    for i in range(256):
        if kind == Kind.Q6_K:
            part, row, at = i // 128, i % 128 // 32, i % 32
            low = wide[:, 64 * part + 32 * (row % 2) + at] >> 4 * (row // 2) & 15
            high = wide[:, 128 + 32 * part + at] >> 2 * row & 3
            out[:, i] = raw[:, 192 + i // 16].view(np.int8) * (low + 16 * high - 32)
            continue
        j, scales, bytes_of = i // 32, wide[:, 4:16], wide[:, -128:]
        if j < 4:
            scale, least = scales[:, j] & 63, scales[:, j + 4] & 63
        else:
            scale = scales[:, j + 4] & 15 | scales[:, j - 4] >> 6 << 4
            least = scales[:, j + 4] >> 4 | scales[:, j] >> 6 << 4
        q = bytes_of[:, 32 * (j // 2) + i % 32] >> 4 * (j % 2) & 15
        if kind == Kind.Q5_K:
            q = q + 16 * (wide[:, 16 + i % 32] >> j & 1)
        out[:, i] = half(raw, 0)[:, 0] * scale * q - half(raw, 2)[:, 0] * least
    return out * half(raw, 208) if kind == Kind.Q6_K else out


def numbers(stored: np.ndarray, kind: Kind) -> np.ndarray:
    """What a stored tensor means."""
    if kind in (Kind.F32, Kind.F16):
        return stored.astype(np.float32)
    if kind == Kind.BF16:
        return stored.view(jnp.bfloat16).astype(np.float32)
    raw = stored.reshape(-1, GGML_QUANT_SIZES[kind][1])
    found = k_numbers(kind, raw) if kind in K_QUANTS else simple_numbers(kind, raw)
    return found.reshape(stored.shape[0], -1)


def straight(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a llama's q or k in Hugging Face's order: first halves of pairs, then seconds."""
    order = [
        head + 2 * (i % (head_dim // 2)) + i // (head_dim // 2)
        for head in range(0, len(rows), head_dim)
        for i in range(head_dim)
    ]
    return rows[order]


def expected(arch: str, kind: Kind, tied: bool) -> dict[str, np.ndarray]:
    """Every leaf by its path."""
    made = {name: numbers(*t) for name, t in tensors(arch, kind, 0, tied).items()}
    leaves = {"embedding": made["token_embd.weight"], "norm/scale": made["output_norm.weight"]}
    if not tied:
        leaves["head"] = made["output.weight"]
    for layer in range(LAYERS):
        own = {name: made.get(f"blk.{layer}.{name}") for name in (
            "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_q_norm.weight", "attn_k_norm.weight",
        )}  # fmt: skip
        w = {n.split(".")[2]: a for n, a in made.items() if n.startswith(f"blk.{layer}.")
             and n.endswith(".weight")}  # fmt: skip
        if arch == "llama":
            w |= {n: straight(w[n], HEADS[arch][2]) for n in ("attn_q", "attn_k")}
        at = f"layers_{layer}/"
        leaves |= {
            at + "attention/qkv/kernel": np.concatenate([w[f"attn_{x}"] for x in "qkv"]).T,
            at + "attention/out/kernel": w["attn_output"].T,
            at + "mlp/gate_up/kernel": np.concatenate([w["ffn_gate"], w["ffn_up"]]).T,
            at + "mlp/down/kernel": w["ffn_down"].T,
            at + "input_norm/scale": w["attn_norm"],
            at + ("mlp_input_norm" if arch == "gemma3" else "post_norm") + "/scale": w["ffn_norm"],
        }
        if arch == "gemma3":
            leaves[at + "attention_norm/scale"] = w["post_attention_norm"]
            leaves[at + "mlp_norm/scale"] = w["post_ffw_norm"]
        if arch == "qwen2":
            leaves[at + "attention/qkv/bias"] = np.concatenate(
                [own[f"attn_{x}.bias"] for x in "qkv"]
            )
        if arch in ("qwen3", "gemma3"):
            leaves |= {at + f"attention/{x}_norm/scale": own[f"attn_{x}_norm.weight"] for x in "qk"}
    return leaves


def flat(params: dict) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(entry.key for entry in path): np.asarray(leaf) for path, leaf in paths}


EVERY = [(arch, kind) for arch in HEADS for kind in KINDS if arch != "gemma3" or kind == Kind.Q8_0]


@pytest.mark.parametrize(("arch", "kind"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_every_leaf_of_every_type(arch, kind, tmp_path):
    tied = arch in ("qwen2", "gemma3")
    file = write_gguf(tmp_path / "m.gguf", arch, kind, tied=tied)
    model, params = load_target(file, "float32")
    got, want = flat(params), expected(arch, kind, tied)
    assert got.keys() == want.keys()
    for leaf, value in want.items():
        np.testing.assert_allclose(got[leaf], value, rtol=1e-6, atol=1e-7, err_msg=leaf)
        assert got[leaf].std() > 0.01  # no zeros, nothing vanishing
    c = model.config
    assert (c.mixers[0].num_heads, c.mixers[0].num_kv_heads, c.mixers[0].head_dim) == HEADS[arch]
    windowed = arch == "gemma3"  # all but every sixth layer
    assert c.windows == ((8, 8) if windowed else (None, None))
    theta = 1e4 if windowed else 50000
    assert (c.mixers[0].rope.theta, c.rms_norm_eps) == (theta, pytest.approx(1e-5))
    assert (c.tie_embeddings, c.mixers[0].qkv_bias, c.mixers[0].qk_norm) == (
        tied,
        arch == "qwen2",
        arch in ("qwen3", "gemma3"),
    )


def test_newer_files_of_gemma_3_say_the_theta_of_windowed_layers(tmp_path):
    for theta in (1e4, 2e4):
        file = write_gguf(
            tmp_path / "m.gguf", "gemma3", change={"gemma3.rope.freq_base_swa": theta}
        )
        rope = open_checkpoint(file).config(target_config).mixers[0].rope
        assert rope and rope.theta == theta


def test_dtypes(tmp_path):
    for kind, stored in zip(PLAIN, ("float32", "float16", "bfloat16"), strict=True):
        file = write_gguf(tmp_path / f"{kind.name}.gguf", kind=kind)
        params = load_target(file, "float32")[1]
        own = read_params(file, None)
        assert own["embedding"].dtype == stored and own["norm"]["scale"].dtype == "float32"
        assert jnp.array_equal(own["embedding"].astype("float32"), params["embedding"])
    file = write_gguf(tmp_path / "q.gguf", kind=Kind.Q5_1)
    assert {x.dtype for x in jax.tree.leaves(read_params(file, None))} == {jnp.dtype("float32")}
    cast = jax.tree.map(lambda x: x.astype("bfloat16"), load_target(file, "float32")[1])
    jax.tree.map(np.testing.assert_array_equal, load_target(file, "bfloat16")[1], cast)


def read_params(file: Path, dtype: str | None) -> dict:
    checkpoint = open_checkpoint(file)
    return checkpoint.check(checkpoint.config(target_config))(dtype, False)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_K], ids=lambda k: k.name)
def test_pieces_of_a_tensor_join_in_whole_heads(kind, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf", kind=kind)
    whole = load_target(file, "float32")[1]
    made = []
    honest = read_ahead.read
    monkeypatch.setattr(read_ahead, "PIECE", 50_000)  # of q's 256 rows: one head of 64
    monkeypatch.setattr(read_ahead, "read", lambda piece: made.append(honest(piece)) or made[-1])
    jax.tree.map(np.testing.assert_array_equal, load_target(file, "float32")[1], whole)
    assert max(rows.nbytes for rows in made) <= 4 * 64 * WIDTH
    assert len(made) > 40


def scaled(tmp_path: Path, scaling: Llama3Scaling, theta: float = 50000.0) -> Path:
    width = HEADS["llama"][2]
    plain, own = (
        rope_frequencies(RopeConfig(theta=theta, scaling=s), width) for s in (None, scaling)
    )
    factors = (plain / own).astype(np.float32)
    data = {"rope_freqs.weight": (factors, Kind.F32)}
    return write_gguf(tmp_path / "scaled.gguf", data=data)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_found_in_its_factors(factor, tmp_path):
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    file = scaled(tmp_path, scaling)
    assert open_checkpoint(file).config(target_config).mixers[0].rope == RopeConfig(
        theta=50000.0, scaling=scaling
    )
    open_checkpoint(file).check(open_checkpoint(file).config(target_config))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("form", ["linear", "yarn"])
def test_a_scaled_rope_is_that_of_the_same_target_in_hugging_faces_form(arch, form, tmp_path):
    """As llama.cpp's converter writes it: YaRN with the length of texts before."""
    ours = {"factor": 4.0, "original_max_position_embeddings": 60}
    theirs = {"type": form, "factor": 4.0, "original_context_length": 60}
    if form == "linear":
        del ours["original_max_position_embeddings"], theirs["original_context_length"]
    change = {f"{arch}.rope.scaling.{key}": value for key, value in theirs.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, change=change))
    config, plain = checkpoint.config(target_config), write_gguf(tmp_path / "n.gguf", arch)
    unscaled = open_checkpoint(plain).raw
    assert "rope_scaling" not in unscaled
    assert config == target_config(unscaled | {"rope_scaling": {"rope_type": form, **ours}})
    assert config != target_config(unscaled)
    checkpoint.check(config)


def test_other_frequency_factors_are_refused(tmp_path):
    other = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=2.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        open_checkpoint(scaled(tmp_path, other)).config(target_config)


def test_a_converted_target_decodes_the_same(tmp_path, capsys):
    file, folder = write_gguf(tmp_path / "m.gguf", kind=Kind.Q4_0), tmp_path / "converted"
    assert run("convert", [str(file), str(folder)]) == 0
    assert open_checkpoint(folder).config(target_config) == open_checkpoint(file).config(
        target_config
    )
    jax.tree.map(
        np.testing.assert_array_equal, load_target(folder, "float32")[1], load_target(file)[1]
    )
    assert stop_token_ids(folder) == stop_token_ids(file) == [EOS]
    ours, theirs = load_tokenizer(file), load_tokenizer(folder)
    text = "<user>It 12345  a\n<assistant>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token == theirs.eos_token == "<eos>"
    runs = []
    for target in (file, folder):
        [made] = generate(load_pair(target, dtype="float32"), [[5, 6, 7]], max_new_tokens=12)
        runs.append(made.token_ids)
    assert runs[0] == runs[1] and len(set(runs[0])) > 3
    capsys.readouterr()
    outputs = []
    for target in (file, folder):
        options = ["--target", str(target), "--drafter", "none", "--max-new-tokens", "12"]
        assert run("generate", [*options, "--json", "It a"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0]["text"] == outputs[1]["text"]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]


def test_stops_are_the_ends_that_the_file_names(tmp_path):
    stops = {f"tokenizer.ggml.{name}_token_id": i for name, i in
             (("eos", 5), ("eot", 9), ("eom", 5))}  # fmt: skip
    assert stop_token_ids(write_gguf(tmp_path / "m.gguf", change=stops)) == [5, 9]
    none = {"tokenizer.ggml.eos_token_id": None}
    assert stop_token_ids(write_gguf(tmp_path / "n.gguf", change=none)) == []


def test_stops_are_also_the_ends_of_a_turn_that_no_key_names(tmp_path):
    """A chat of Gemma 3 ends with <end_of_turn>, whose files may name <eos> alone."""
    tokens = TOKENS + PADDING
    tokens[USER], tokens[ASSISTANT] = "<start_of_turn>", "<end_of_turn>"
    change = {"tokenizer.ggml.tokens": tokens}
    file = write_gguf(tmp_path / "m.gguf", change=change)
    assert stop_token_ids(file) == [EOS, ASSISTANT]
    assert open_checkpoint(file).raw["eos_token_id"] == [EOS, ASSISTANT]
    change |= {"tokenizer.ggml.eos_token_id": ASSISTANT, "tokenizer.ggml.eot_token_id": ASSISTANT}
    assert stop_token_ids(write_gguf(tmp_path / "n.gguf", change=change)) == [ASSISTANT]


LENGTH = "llama.rope.scaling.original_context_length"
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, LENGTH: 60}
FACTORS = {"rope_freqs.weight": (np.ones(HEADS["llama"][2] // 2, np.float32), Kind.F32)}
Q = (np.zeros((256, 84), np.uint8), Kind.Q2_K)
SQUARE = (np.zeros((WIDTH, WIDTH), np.float32), Kind.F32)
BAD = {
    "architecture": (dict(arch="gemma2"), {}, "unsupported GGUF architecture 'gemma2'; supported"),
    "drafter": (dict(arch="dflash-draft"), {}, "architecture 'dflash-draft' are not read, only"),
    "no key": ({}, {"llama.block_count": None}, "the metadata lacks llama.block_count"),
    "mixture": ({}, {"llama.expert_count": 8}, r"not supported: llama\.expert_count \(8\)"),
    "longrope": ({}, {"llama.rope.scaling.type": "longrope"}, r"scaling\.type 'longrope' is not"),
    "yarn": ({}, {"llama.rope.scaling.type": "yarn"}, r"lacks llama\.rope\.scaling\.factor"),
    "yarn, partly": ({}, YARN | {LENGTH: None}, rf"lacks {LENGTH}"),
    "yarn, another": ({}, YARN | {"llama.rope.scaling.attn_factor": 0.5}, r"attn_factor \(0\.5\)"),
    "yarn of Gemma": (dict(arch="gemma3"), {"gemma3.rope.scaling.type": "yarn"}, "'yarn' is not"),
    "twice scaled": (dict(data=FACTORS), YARN, "beside llama.rope.scaling.factor: only one is"),
    "linear": ({}, {"llama.rope.scaling.factor": 2.0}, r"rope\.scaling\.factor \(2\.0\)"),
    "window": ({}, {"llama.attention.sliding_window": 64}, "sliding_window"),
    "encoder": ({}, {"llama.attention.causal": False}, "causal: false"),
    "partial": ({}, {"llama.rope.dimension_count": 32}, "rope.dimension_count 32 differs"),
    "values": ({}, {"llama.attention.value_length": 32}, "value_length 32 differs"),
    "per layer": ({}, {"llama.attention.head_count": [4, 4]}, r"head_count must be .* \[4, 4\]"),
    "KV per layer": ({}, {"llama.attention.head_count_kv": [2, 1]}, r"must be a whole .* \[2, 1\]"),
    "split": ({}, {"split.count": 3}, "split.count is 3: merge"),
    "adapter": ({}, {"general.type": "adapter"}, "holds a GGUF 'adapter', not a model"),
    "type": (dict(data={"blk.0.ffn_up.weight": Q}), {}, "blk.0.ffn_up.weight is Q2_K"),
    "missing": (dict(data={"blk.1.attn_v.weight": None}), {}, "missing: blk.1.attn_v.weight"),
    "unknown": (dict(data={"blk.0.ffn_norm.bias": SQUARE}), {}, "unknown: blk.0.ffn_norm.bias"),
    "shape": (dict(data={"blk.0.attn_k.weight": SQUARE}), {}, r"attn_k\.weight is \(256, 256\)"),
    "embedding": (dict(data={"token_embd.weight": None}), {}, "missing: token_embd.weight"),
    "vocabulary": ({}, {"llama.vocab_size": 99}, rf"\({VOCABULARY}, 256\), expected \(99, 256\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_supported_is_named(case, tmp_path, capsys):
    how, change, said = BAD[case]
    file = write_gguf(tmp_path / "bad.gguf", **how, change=change)
    assert run("convert", [str(file), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert re.search(said, line) and "bad.gguf" in line and line.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert run("generate", ["--target", str(file), "--drafter", "none", "--prompt-ids", "1,2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_broken_files(tmp_path, capsys):
    whole = write_gguf(tmp_path / "whole.gguf", kind=Kind.Q4_1).read_bytes()
    broken = {size: whole[:size] for size in (0, 3, 4, 17, 60, 900, 9000, 20_000, len(whole) - 1)}
    broken |= {-1: b"<!doctype html>" * 9, -2: whole[:4] + b"\x63\0\0\0" + whole[8:]}
    broken |= {-3: whole[:8] + b"\xff" * 16 + whole[24:], -4: whole[:30] + b"\xff" * 9 + whole[39:]}
    for size, content in broken.items():
        file = tmp_path / f"broken{size}.gguf"
        file.write_bytes(content)
        code = run("generate", ["--target", str(file), "--drafter", "none", "hi"])
        line = capsys.readouterr().err
        assert code == 2 and line.count("\n") == 1, (size, line)
        assert ("is no GGUF file" if size in (0, 3, -1) else "is corrupt or truncated") in line


def test_a_file_cut_short_after_its_header_was_read(tmp_path):
    file = write_gguf(tmp_path / "m.gguf")
    files = configure_pair(file)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match="corrupt or truncated"):
        load_weights(files)


def test_places_that_are_no_target(tmp_path, capsys):
    file = write_gguf(tmp_path / "m.gguf")
    drafter = write_gguf(tmp_path / "drafter.gguf", arch="dflash-draft")
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    for arguments, said in (
        (["--target", str(tmp_path / "none.gguf")], "none.gguf: no such file"),
        (["--target", "models/none.gguf"], "models/none.gguf: no such file"),
        (["--target", str(tmp_path / "m.bin")], "expected a checkpoint folder or a .gguf file"),
        (["--target", str(file), "--drafter", str(file)], "unsupported drafter LlamaForCausalLM"),
        (["--target", str(file), "--drafter", str(drafter)], "'dflash-draft' are not read"),
    ):
        assert run("generate", ["--drafter", "none", *arguments, "--prompt-ids", "1,2"]) == 2
        assert said in capsys.readouterr().err
