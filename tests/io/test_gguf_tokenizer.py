"""Tokenizers out of GGUF metadata: splits, special tokens, sentencepiece, what is refused.

All expected splits were compared with llama.cpp's (2026-10) on SmolLM2's vocabulary.
"""

import pytest

from jflash.io import encode_prompt, load_tokenizer, open_checkpoint
from tests.support.gguf_files import (
    ASSISTANT,
    BOS,
    PADDING,
    TOKENS,
    USER,
    sentencepiece,
    write_gguf,
)

TEXT = "It'S  12345  (x)!\n\n \n a=b"
# What each name makes of TEXT before merges; Ġ is a space, Ċ the end of a line.
PIECES = {
    "gpt-2": ["It", "'", "S", "Ġ", "Ġ12345", "Ġ", "Ġ(", "x", ")!", "ĊĊĠĊ", "Ġa", "=", "b"],
    "default": [
        "It", "'", "S", "Ġ", "Ġ", "123", "45", "ĠĠ", "(", "x", ")!", "ĊĊĠĊ", "Ġa", "=", "b",
    ],
    "smollm": [
        "It", "'", "S", "ĠĠ", "1", "2", "3", "4", "5", "Ġ", "Ġ(", "x", ")!", "ĊĊĠĊ", "Ġa", "=", "b",
    ],
    "qwen2": [
        "It", "'S", "Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġ(", "x", ")!ĊĊ", "ĠĊ", "Ġa", "=b",
    ],
    "llama-bpe": [
        "It", "'S", "Ġ", "Ġ", "123", "45", "Ġ", "Ġ(", "x", ")!ĊĊ", "ĠĊ", "Ġa", "=b",
    ],
}  # fmt: skip


def tokenizer_of(tmp_path, **changes):
    change = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return load_tokenizer(write_gguf(tmp_path / "m.gguf", change=change))


@pytest.mark.parametrize("name", PIECES)
def test_how_text_is_split(name, tmp_path):
    tokenizer = tokenizer_of(tmp_path, pre=name)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [piece for piece, _ in split] == PIECES[name]
    assert tokenizer.decode(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) == TEXT


@pytest.mark.parametrize(
    ("other", "name"),
    [
        *((other, "gpt-2") for other in ("phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4")),
        *((other, "smollm") for other in ("starcoder", "refact")),
        ("deepseek-r1-qwen", "qwen2"),
        *((other, "llama-bpe") for other in ("llama3", "llama-v3", "falcon3", "falcon-h1")),
        *((other, "llama-bpe") for other in ("pixtral", "midm-2.0", "lfm2")),
    ],
)
def test_names_that_llama_cpp_reads_alike(other, name, tmp_path):
    one, same = (tokenizer_of(tmp_path, pre=pre) for pre in (other, name))
    assert one.backend_tokenizer.to_str() == same.backend_tokenizer.to_str()


def test_smaugs_split_is_llamas_alone(tmp_path):
    """With merges in words that are a token, and no begin token unless the file wants one."""
    one, llama = (tokenizer_of(tmp_path, pre=pre) for pre in ("smaug-bpe", "llama-bpe"))
    split, theirs = (each.backend_tokenizer.pre_tokenizer for each in (one, llama))
    assert split.pre_tokenize_str(TEXT) == theirs.pre_tokenize_str(TEXT)
    assert not one.backend_tokenizer.model.ignore_merges
    assert llama.backend_tokenizer.model.ignore_merges
    assert one.convert_ids_to_tokens(one("a")["input_ids"]) == ["a"]


def test_tokens_and_merges(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer("<user>It a123  4<pad>[PAD266]")["input_ids"]
    # SmolLM2's kind keeps digits apart; of the last, which only fills the table, no text is made.
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<user>", "It", "Ġa", "1", "2", "3", "ĠĠ", "4", *"<pad>[PAD", "2", "6", "6", "]",
    ]  # fmt: skip
    assert tokenizer.decode(ids, skip_special_tokens=True) == "It a123  4<pad>[PAD266]"
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<eos>", "<bos>")
    assert len(tokenizer) == len(TOKENS + PADDING)
    llama = tokenizer_of(tmp_path, pre="llama-bpe")
    assert llama.convert_ids_to_tokens(llama("a123")["input_ids"]) == ["<bos>", "a", "123"]
    qwen = tokenizer_of(tmp_path, pre="qwen2")
    assert qwen.decode(qwen("e\u0301")["input_ids"]) == "\u00e9"


def test_the_chat_template(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    ids = encode_prompt(tokenizer, "It")
    assert ids == [USER, TOKENS.index("It"), ASSISTANT]


def test_the_begin_token(tmp_path):
    for pre, says, begins in (
        ("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False),
        ("smollm", True, True),
    ):  # fmt: skip
        tokenizer = tokenizer_of(tmp_path, pre=pre, add_bos_token=says)
        ids = tokenizer("a")["input_ids"]
        assert ids == [BOS, TOKENS.index("a")] if begins else ids == [TOKENS.index("a")]
        assert tokenizer("a", add_special_tokens=False)["input_ids"] == [TOKENS.index("a")]


def test_sentencepiece(tmp_path):
    change = sentencepiece()
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", change=change))

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])

    assert pieces("banana") == ["<s>", "▁banana"]
    assert pieces("bananab") == ["<s>", "▁banana", "b"]
    assert pieces(" bann") == ["<s>", "▁", "▁ban", "n"]
    assert pieces("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces("ban<user>a<tool>b") == ["<s>", "▁ban", "<user>", "▁a", "<tool>", "▁b"]
    ids = tokenizer("ban<user> an<tool>é", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ban  an<tool> é"
    plain = load_tokenizer(
        write_gguf(tmp_path / "p.gguf", change=change | {"tokenizer.ggml.add_space_prefix": False})
    )
    assert plain.convert_ids_to_tokens(plain("banana")["input_ids"]) == ["<s>", "ban", "ana"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(pre="tekken"), "tokenizer.ggml.pre 'tekken' is not supported, only default, gpt-2"),
        (dict(model="bert"), "tokenizer.ggml.model 'bert' is not supported"),
        (dict(merges=None), "lacks tokenizer.ggml.merges"),
        (dict(tokens=None), "lacks tokenizer.ggml.tokens"),
        (dict(merges=["I tt"]), "'I tt' is no merge"),
        (dict(tokens=["a", "a"], merges=["a a"]), "holds a token twice"),
        (dict(add_eos_token=True), "add_eos_token is not supported"),
        (dict(bos_token_id=999), "bos_token_id 999 names no token"),
        (dict(model="llama"), "lacks tokenizer.ggml.scores"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_what_is_refused(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        tokenizer_of(tmp_path, **changes)


def test_a_file_without_a_tokenizer(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", change={"tokenizer.ggml.model": None})
    assert not open_checkpoint(file).has_tokenizer()
    with pytest.raises(ValueError, match="holds no tokenizer: text needs one"):
        load_tokenizer(file)
