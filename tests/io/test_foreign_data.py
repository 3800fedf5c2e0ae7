"""Foreign data that would take all memory, end in a traceback, or reach outside of its folder."""

import json
import shutil
import struct

import jax
import numpy as np
import pytest
import transformers

from jflash.io import convert_checkpoint, encode_prompt, load_target, load_tokenizer, stop_token_ids
from jflash.io.gguf.checkpoint import open_gguf
from jflash.io.hf_config import drafter_config, target_config
from jflash.io.hf_rope import rope_config
from tests.support.gguf_files import write_gguf
from tests.support.refusals import decode
from tests.support.small_checkpoints import Folders, edit_config, make_pair

DEEP = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 9\n"
QWEN = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def pair(tmp_path) -> Folders:
    return make_pair(tmp_path)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*values: bytes, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    """A GGUF header of these keys with their values, and these tensors."""
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(values)) + b"".join(values) + tensors


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_what_it_is(pair, refused, name):
    (pair.target / name).write_text(POINTER)
    refused(decode(pair), f"{name} is only a pointer of Git LFS: git lfs pull")


def test_a_gguf_file_that_is_a_pointer_of_git_lfs(tmp_path):
    (tmp_path / "m.gguf").write_text(POINTER)
    with pytest.raises(ValueError, match=r"m.gguf is only a pointer of Git LFS"):
        open_gguf(tmp_path / "m.gguf")


ARRAYS = {
    **{f"2^62 of type {kind}": struct.pack("<IIQ", 9, kind, 2**62) for kind in range(13)},
    "2^64 - 1 texts": struct.pack("<IIQ", 9, 8, 2**64 - 1),
    "arrays 5,000 deep": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
    "text of 2^62": struct.pack("<IQ", 8, 2**62),
    "type 77": struct.pack("<I", 77),
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_a_gguf_header_announces_more_than_its_file_holds(value, tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(header(text("x") + value))
    with pytest.raises(ValueError, match=r"a\.gguf is corrupt or truncated") as error:
        open_gguf(file)
    assert len(str(error.value).splitlines()) == 1


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


TENSORS = {
    "five dimensions": (tensor("a", (1,) * 5), "5 dimensions"),
    "2^32 dimensions": (text("a") + struct.pack("<I", 2**32 - 1), "4294967295 dimensions"),
    "after the file": (tensor("a", (2,), offset=2**60), "ends after"),
    "larger than the file": (tensor("a", (2**40, 2**40)), "ends after"),
    "half a block": (tensor("a", (33,), kind=8), "no multiple of 32"),
    "unknown type": (tensor("a", (2,), kind=999), "999"),
    "cut short": (tensor("a", (2,))[:-1], "are left"),
}


@pytest.mark.parametrize(("tensors", "named"), TENSORS.values(), ids=TENSORS)
def test_a_gguf_tensor_that_no_file_holds(tensors, named, tmp_path):
    (tmp_path / "a.gguf").write_bytes(header(tensors=tensors, num_tensors=1))
    with pytest.raises(ValueError, match=rf"corrupt or truncated: .*{named}"):
        open_gguf(tmp_path / "a.gguf")


def test_gguf_keys_and_tensors_given_twice(tmp_path):
    value = text("x") + struct.pack("<II", 4, 1)
    (tmp_path / "a.gguf").write_bytes(header(value, value))
    with pytest.raises(ValueError, match="'x' is given twice"):
        open_gguf(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(header(tensors=2 * tensor("t", ()), num_tensors=2))
    with pytest.raises(ValueError, match="tensor 't' is given twice"):
        open_gguf(tmp_path / "b.gguf")


GGUF_KINDS = {
    "general.architecture": [1, 2],
    "general.type": 3,
    "split.count": "two",
    "llama.embedding_length": "256",
    "llama.block_count": 2**31 - 1,
    "llama.attention.head_count": [4, 4],
    "llama.attention.key_length": 2**30,
    "llama.attention.layer_norm_rms_epsilon": 0.0,
    "llama.rope.freq_base": "x",
    "llama.context_length": 1.5,
    "tokenizer.ggml.eos_token_id": [1],
    "tokenizer.ggml.eot_token_id": float("inf"),
}


@pytest.mark.parametrize("key", GGUF_KINDS)
def test_gguf_metadata_of_another_kind(key, tmp_path, refused, caplog):
    file = write_gguf(tmp_path / "a.gguf", change={key: GGUF_KINDS[key]})
    caplog.clear()  # the writer's warning
    command = ["--target", str(file), "--drafter", "none", "--prompt-ids", "1,2"]
    refused(command, "a.gguf", *([] if "key_length" in key else [key.split(".")[-1]]))


TOKENIZER_KINDS = {
    "model": 1,
    "tokens": [1, 2],
    "merges": [1.5],
    "merges ": "a b",
    "token_type": ["x"],
    "token_type ": [1],
    "pre": 5,
    "bos_token_id": "first",
    "chat_template": 7,
    "add_bos_token": "yes",
}


@pytest.mark.parametrize("key", TOKENIZER_KINDS)
def test_gguf_tokenizers_of_another_kind(key, tmp_path):
    name = f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key.strip()}"
    file = write_gguf(tmp_path / "a.gguf", change={name: TOKENIZER_KINDS[key]})
    with pytest.raises(ValueError, match=name):
        load_tokenizer(file)


def test_gguf_scores_that_are_too_few(tmp_path):
    change = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}
    with pytest.raises(ValueError, match="scores has 1 values for 320 tokens"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", change=change))


JSON_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", [DEEP, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_json_that_python_does_not_take(name, content, pair, refused):
    (pair.target / name).write_text(content)
    if "index" in name:
        (pair.target / "model.safetensors").unlink()  # which would come first
    refused(decode(pair), name, "is not valid JSON")


@pytest.mark.parametrize("ids", [{"a": 1}, [None], [[1]], 1.5, "a", True, 2**31, [2**40]])
def test_stop_ids_that_are_no_ids(ids, pair):
    (pair.target / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be"):
        stop_token_ids(pair.target)
    (pair.target / "generation_config.json").unlink()
    edit_config(pair.target, eos_token_id=ids)
    with pytest.raises(ValueError, match=r"/config\.json: eos_token_id must be"):
        stop_token_ids(pair.target)


def test_an_index_names_files_of_its_folder_alone(pair, tmp_path):
    """Also one that would load: the same tensors, outside."""
    shutil.move(pair.target / "model.safetensors", tmp_path / "elsewhere.safetensors")
    index = pair.target / "model.safetensors.index.json"
    names = ["../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors")]
    for name in (*names, "a/../../x", "", ["x"], 5, None, True):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="must name only files of its folder"):
            load_target(pair.target)


SIZES = {
    "num_hidden_layers": (10**9, 1024),
    "head_dim": (10**9, 1024),
    "vocab_size": (10**12, 2**31 - 1),
    "intermediate_size": (2**70, 2**31 - 1),
    "num_attention_heads": (2**70, 2**31 - 1),
    "num_target_layers": (10**9, 1024),
    "block_size": (2**63, 1024),
    "num_experts": (10**9, 1024),
}


@pytest.mark.parametrize("key", SIZES)
def test_sizes_have_an_upper_bound(key):
    value, most = SIZES[key]
    own = {"num_target_layers": 4, "mask_token_id": 1, "num_hidden_layers": 1}
    moe = {"architectures": ["Qwen3MoeForCausalLM"]}
    read, raw = {
        "num_target_layers": (drafter_config, {"architectures": ["DFlashDraftModel"], **own}),
        "block_size": (drafter_config, {"architectures": ["DFlashDraftModel"], **own}),
        "num_experts": (target_config, moe),
    }.get(key, (target_config, QWEN))
    with pytest.raises(ValueError, match=rf"{key} must be a whole number from \d to {most}, got"):
        read(raw | {key: value})


TEMPLATES = {
    "{{ 1 / 0 }}": "division by zero",
    "{{ 1 + 'a' }}": "unsupported operand",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{{ messages.nothing.at_all }}": "no attribute",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_that_fail(template, pair):
    tokenizer = load_tokenizer(pair.target)
    tokenizer.chat_template = template
    with pytest.raises(
        ValueError, match=f"chat template refuses: .*{TEMPLATES[template]}"
    ) as error:
        encode_prompt(tokenizer, "hi")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("prompt", [b"hi", None, 5, ["hi"]])
@pytest.mark.parametrize("chat_template", [True, False])
def test_a_prompt_that_is_no_text(prompt, chat_template, pair):
    """A template would write the bytes as Python does, with the b and the quotes."""
    with pytest.raises(ValueError, match="must be a text"):
        encode_prompt(load_tokenizer(pair.target), prompt, chat_template=chat_template)


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ([{"role": "user", "content": "hi"}], r"history: {.* must be \(user's text, answer\)"),
        ([("a", "b"), ("c", 5)], r"history: \('c', 5\) must be"),
        (["ab"], "history: 'ab' must be"),
        (None, "history None must be a list"),
    ],
)
@pytest.mark.parametrize("chat_template", [True, False])
def test_a_history_that_has_no_pairs_of_texts(history, why, chat_template, pair):
    """A message in the form of others became the turn ("role", "content"), without a word."""
    tokenizer = load_tokenizer(pair.target)
    with pytest.raises(ValueError, match=why):
        encode_prompt(tokenizer, "hi", history=history, chat_template=chat_template)


@pytest.mark.parametrize("content", ["[]", '{"chat_template": 5}', '{"added_tokens_decoder": 3}'])
def test_tokenizer_configs_of_another_kind(content, pair):
    (pair.target / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError) as error:
        encode_prompt(load_tokenizer(pair.target), "hi")
    assert len(str(error.value).splitlines()) == 1


def test_lack_of_memory_is_not_the_templates_fault():
    class Full:
        chat_template = "x"

        def apply_chat_template(self, *_, **__):
            raise MemoryError

    with pytest.raises(MemoryError):
        encode_prompt(Full(), "hi")


UNREAD = [
    ("qwen3", "Qwen3ForCausalLM", {"mlp_bias": True}),
    ("qwen2", "Qwen2ForCausalLM", {"mlp_bias": True, "attention_bias": True}),
    ("llama", "LlamaForCausalLM", {"use_sliding_window": True, "sliding_window": 64}),
]


@pytest.mark.parametrize(("family", "name", "unread"), UNREAD)
def test_keys_that_transformers_does_not_read_are_ignored(family, name, unread):
    raw = {"architectures": [name]}
    assert target_config(raw | unread) == target_config(raw)


@pytest.mark.parametrize("nested", ["rope_parameters", "rope_scaling"])
def test_the_theta_beside_the_scaling_counts_first(nested):
    """Where both places have one and they differ."""
    inside = {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5}
    raw = {nested: inside, "rope_theta": 7e5}
    theirs = transformers.Qwen3Config.from_dict(raw).rope_parameters
    assert rope_config(raw, 4096).theta == theirs["rope_theta"] == 3e5


def test_nothing_is_converted_into_its_source(pair, refused):
    held = {path: path.read_bytes() for path in pair.target.iterdir()}
    for destination in (pair.target, pair.target / "orbax", pair.target / "a" / "b"):
        command = [str(pair.target), str(destination), "--overwrite"]
        refused(command, "would change the source", command="convert")
    (pair.target.parent / "config.json").write_text("{}")  # a checkpoint that holds the source
    command = [str(pair.target), str(pair.target.parent), "--overwrite"]
    refused(command, "would change the source", command="convert")
    assert {path: path.read_bytes() for path in pair.target.iterdir()} == held


def test_a_folder_named_orbax_is_no_checkpoint_of_ours(pair):
    want = load_target(pair.target)[1]
    (pair.target / "orbax").mkdir()
    (pair.target / "orbax" / "notes.txt").write_text("x")
    jax.tree.map(np.testing.assert_array_equal, load_target(pair.target)[1], want)


def test_no_flipped_bit_of_a_converted_checkpoint_loads(pair, tmp_path):
    """Orbax's arrays have no checksum: seen by it alone, some flips would give other weights."""
    convert_checkpoint(pair.target, tmp_path / "ours")
    files = sorted(file for file in (tmp_path / "ours" / "orbax").rglob("*") if file.is_file())
    rng = np.random.default_rng(5)
    for file in files:
        whole = file.read_bytes()
        at = int(rng.integers(len(whole)))
        file.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
        )
        with pytest.raises(ValueError) as error:
            load_target(tmp_path / "ours")
        assert len(str(error.value).splitlines()) == 1, error.value
        file.write_bytes(whole)
    load_target(tmp_path / "ours")


def test_a_converted_checkpoint_without_checksums_loads(pair, tmp_path):
    convert_checkpoint(pair.target, tmp_path / "ours")
    (tmp_path / "ours" / "orbax.crc32.json").unlink()
    load_target(tmp_path / "ours")
