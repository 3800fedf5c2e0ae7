"""Folders of tokenizers: what tokenizer.json says holds, whatever class the config names."""

import json

import pytest
from tokenizers import Tokenizer

from jflash.io import encode_prompt, load_tokenizer
from jflash.io.text import decode
from tests.support.gguf_files import TEMPLATE, sentencepiece, write_gguf

TEXT = "It'S  12345  (x)!\n\n \n a=b<user> ban é"
KINDS = {
    "smollm": {"tokenizer.ggml.pre": "smollm"},
    "qwen2": {"tokenizer.ggml.pre": "qwen2"},
    "llama-bpe": {"tokenizer.ggml.pre": "llama-bpe"},
    "sentencepiece": sentencepiece(),
}


@pytest.mark.parametrize(
    ("kind", "model", "name"),
    [
        ("smollm", "llama", "GPT2Tokenizer"),  # as SmolLM2's folder says
        ("smollm", "qwen2", None),
        ("llama-bpe", "llama", "LlamaTokenizerFast"),
        ("llama-bpe", "qwen3", "Qwen2Tokenizer"),
        ("qwen2", "qwen3", "Qwen2Tokenizer"),
        ("sentencepiece", "llama", "LlamaTokenizer"),
        ("sentencepiece", "gemma3_text", None),
    ],
)
def test_text_is_split_and_joined_as_the_file_says(kind, model, name, tmp_path):
    source = load_tokenizer(write_gguf(tmp_path / "m.gguf", change=KINDS[kind]))
    source.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": source.bos_token, "eos_token": source.eos_token}
    config |= {"chat_template": TEMPLATE} | ({"tokenizer_class": name} if name else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    file, ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    for special in (False, True):
        wanted = file.encode(TEXT, add_special_tokens=special).ids
        assert ours(TEXT, add_special_tokens=special)["input_ids"] == wanted
    assert decode(ours, wanted) == file.decode(wanted)
    assert (ours.bos_token, ours.eos_token) == (source.bos_token, source.eos_token)
    assert encode_prompt(ours, "a 12") == encode_prompt(source, "a 12")


def test_the_special_tokens_of_a_class_stay(tmp_path):
    """A template would write an empty text for a begin token that is not known."""
    source = load_tokenizer(write_gguf(tmp_path / "m.gguf", change=KINDS["sentencepiece"]))
    source.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<s>", "</s>", None)
    assert encode_prompt(ours, "a") == [1]
    assert decode(ours, [1, *ours.convert_tokens_to_ids(["▁ban", "ana"]), 2]) == "banana"


def test_a_class_that_does_what_the_file_says_is_kept(tmp_path):
    source = load_tokenizer(write_gguf(tmp_path / "m.gguf", change=KINDS["qwen2"]))
    source.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert type(load_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"


def test_a_file_of_sentencepiece_alone(tmp_path, monkeypatch, capfd):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    monkeypatch.setattr("jflash.io.tokenizer_file.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tokenizer\.model needs the package sentencepiece"):
        load_tokenizer(tmp_path)
    assert "tiktoken" not in str(capfd.readouterr())


def test_nothing_is_asked_about_code_of_the_folder(tmp_path, monkeypatch):
    """The answer would be a line of the prompts on stdin, and with `y` the code would run."""
    asked = list[str]()
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    source = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    source.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert load_tokenizer(tmp_path)("a12")["input_ids"] == source("a12")["input_ids"]
    assert not asked and not (tmp_path / "ran").exists()
