"""A folder's tokenizer, which splits and joins text as its tokenizer.json says.

transformers 5 gives some classes the vocabulary of that file alone, and builds the rest anew. The
class of GPT-2, which SmolLM2's folder names, would keep digits together that the model knows apart.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME, MODEL = "tokenizer.json", "tokenizer.model"
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_OF_MODEL = ("ignore_merges", "byte_fallback", "fuse_unk")  # how pieces become tokens
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer as transformers', of a folder with files of one."""
    from transformers import AutoTokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    _check_model(folder)
    # Without a word about code of the folder's own, transformers would ask on stdin whether to run
    # it, and take the answer from the prompts there.
    found = AutoTokenizer.from_pretrained(str(folder), **_LOCAL)
    file = folder / NAME
    if type(found) is Fast or not isinstance(found, Fast) or not file.exists():
        return found
    if _form(found.backend_tokenizer) == _form(_without_tokens(file)):
        return found
    made = Fast.from_pretrained(str(folder), **_LOCAL)
    knows = made.backend_tokenizer.token_to_id
    for role in _ROLES:  # those that no file names are known by the class
        token = getattr(found, role)
        if getattr(made, role) is None and token and knows(token) is not None:
            setattr(made, role, token)
    return made


def _check_model(folder: Path) -> None:
    """ValueError for a file of sentencepiece alone without its package: transformers would take the
    file for one of tiktoken, and ask for that."""
    file = folder / MODEL
    if not file.exists() or (folder / NAME).exists() or (folder / "vocab.json").exists():
        return
    with file.open("rb") as stream:
        is_proto = stream.read(1) == b"\n"  # tiktoken's are lines of base64
    if is_proto and find_spec("sentencepiece") is None:
        raise ValueError(f"there is no {NAME}, and {MODEL} needs the package sentencepiece")


def _without_tokens(file: Path) -> Any:
    """The tokenizer of a file without its vocabulary, which takes no time to build."""
    from tokenizers import Tokenizer

    described = json.loads(file.read_bytes())
    model = described["model"]
    if model.get("type") != "BPE":
        return Tokenizer.from_file(str(file))
    model = model | {"vocab": {}, "merges": [], "unk_token": None}
    return Tokenizer.from_str(json.dumps(described | {"model": model, "added_tokens": []}))


def _form(tokenizer: Any) -> list[Any]:
    """What a tokenizer does beside its vocabulary."""
    parts = [getattr(tokenizer, name) for name in _PARTS]
    states = [None if part is None else part.__getstate__() for part in parts]
    return [*states, *(getattr(tokenizer.model, name, None) for name in _OF_MODEL)]
