"""The tokenizer that a GGUF file describes, as transformers' fast tokenizer.

GGUF stores tokens and merges, but of the pre-tokenizer only its name. SPLITS has the supported
pre-tokenizers by name; other names are refused. (transformers' conversion splits every Llama's text
as GPT-2 does, and confuses the first token of a text with the last.)
"""

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jflash.io.gguf.file import GgufFile
from jflash.io.hf_values import ID, NUMBERS, SWITCH, TEXT, TEXTS, WHOLES

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
SPACE = "▁"  # how sentencepiece writes one
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# The pattern differs in how many digits stay together: one for Qwen 2 and 3, three for Llama 3.
_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KEYS = {
    TEXT: "model pre",
    TEXTS: "tokens merges",
    WHOLES: "token_type",
    NUMBERS: "scores",
    ID: "bos_token_id eos_token_id unknown_token_id padding_token_id",
    SWITCH: "add_bos_token add_eos_token add_space_prefix",
}
_KINDS = {f"tokenizer.ggml.{key}": kind for kind, keys in _KEYS.items() for key in keys.split()}
_KINDS |= {"tokenizer.chat_template": TEXT}


class Split(NamedTuple):
    """How text is split before merges: by each pattern in turn; the text between matches stays."""

    patterns: tuple[str, ...]
    nfc: bool = False  # Unicode composed first
    whole_words: bool = False  # a piece that is a token needs no merges
    begins: bool = False  # with the begin token, unless the file says otherwise


SPLITS = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Split((_GPT2,)),
    "smollm": Split((r"\p{N}", _GPT2)),
    "qwen2": Split((_LATER.replace("DIGITS", ""),), nfc=True),
    "llama-bpe": Split((_LATER.replace("DIGITS", "{1,3}"),), whole_words=True, begins=True),
    "smaug-bpe": Split((_LATER.replace("DIGITS", "{1,3}"),)),
}
# Other names that llama.cpp reads as these (its src/llama-vocab.cpp at 00ad355).
_ALIKE = {
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum exaone4",
    "smollm": "starcoder refact",
    "qwen2": "deepseek-r1-qwen",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
}
SPLITS |= {other: SPLITS[name] for name, others in _ALIKE.items() for other in others.split()}


def has_gguf_tokenizer(file: GgufFile) -> bool:
    """Whether the file has a tokenizer, supported or not."""
    return file.metadata.get("tokenizer.ggml.model", "no_vocab") not in ("none", "no_vocab")


def gguf_tokenizer(file: GgufFile) -> Any:
    """The file's tokenizer with its special tokens and chat template; ValueError if unsupported."""
    from transformers import PreTrainedTokenizerFast

    file.check(_KINDS)
    tokens = file.need("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens holds a token twice")
    for name in ("token_type", "scores"):
        count = len(file.metadata.get(f"tokenizer.ggml.{name}", tokens))
        if count != len(tokens):
            raise ValueError(f"tokenizer.ggml.{name} has {count} values for {len(tokens)} tokens")
    kind = file.need("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, begins = _sentencepiece(file, tokens)
    else:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' and 'llama'")
    _add_tokens(file, tokenizer, tokens)
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": _token(file, tokens, key) for name, key in keys.items()}
    _begin(file, tokenizer, special["bos_token"], begins)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """GPT-2's kind: bytes written as letters, merged within the pieces of a split."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported, only {', '.join(SPLITS)}")
    split = SPLITS[name]
    merges = [merge.split(" ") for merge in file.need("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    broken = [m for m in merges if len(m) != 2 or m[0] + m[1] not in vocabulary]
    if broken:
        raise ValueError(f"tokenizer.ggml.merges: {' '.join(broken[0])!r} is no merge")
    pairs = [(left, right) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in split.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.begins


def _sentencepiece(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Llama 2's kind: spaces written as ▁, pairs merged by the score of what they make."""
    scores = file.need("tokenizer.ggml.scores")
    kinds = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = [
        (tokens[i][:cut], tokens[i][cut:])
        for i in ranked
        if kinds[i] not in (UNKNOWN, CONTROL, USER_DEFINED)
        for cut in range(1, len(tokens[i]))
        if tokens[i][:cut] in vocabulary and tokens[i][cut:] in vocabulary
    ]
    unknown = _token(file, tokens, "unknown")
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), *spaces] if prefix else spaces
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence([*steps, *strip])
    return tokenizer, True


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Adds the tokens that are matched before all else; decoded text leaves out special ones."""
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, kinds or [1] * len(tokens), strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _begin(file: GgufFile, tokenizer: Tokenizer, begin: str | None, begins: bool) -> None:
    """Puts the begin token before plain text if the file or its kind of tokenizer wants it."""
    if file.metadata.get("tokenizer.ggml.add_eos_token"):
        raise ValueError("tokenizer.ggml.add_eos_token is not supported")
    if not file.metadata.get("tokenizer.ggml.add_bos_token", begins) or begin is None:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=[begin, "$A"], special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )


def _token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    """The token that the metadata names for a role; ValueError if the file lacks it."""
    index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ValueError(f"tokenizer.ggml.{name}_token_id {index} names no token")
    return tokens[index]
