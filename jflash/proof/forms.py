"""Forms for requests of token ids: grammars of a pair's tokenizer, or of letters without one."""

from collections.abc import Sequence
from typing import Any

from jflash.serving.grammar import Grammar, Grammars, Kind

SCHEMA = """{"type": "object", "properties": {"n": {"type": "integer"}, "sure": {"type":
"boolean"}}, "required": ["n", "sure"], "additionalProperties": false}"""
FORMS: tuple[tuple[Kind, str], ...] = (
    ("json_schema", SCHEMA),
    ("regex", "[a-z]{2,9}( [0-9]{1,3}){1,4}"),
    ("choice", '["yes", "no", "nobody knows"]'),
)
LETTERS = 'Ġ{}":,-abcdefghijklmnopqrstuvwxyz0123456789'  # Ġ is the space of byte-level tokenizers


def letters() -> tuple[Any, int]:
    """A tokenizer with a token for each letter of the forms, and the id of its end."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])  # its id is the next one
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), len(LETTERS)


def grammars(tokenizer: Any, vocabulary: int, stop_ids: Sequence[int]) -> list[Grammar]:
    """The forms for a model of so many token ids; ValueError without llguidance."""
    compiled = Grammars(tokenizer, vocabulary, stop_ids)
    return [compiled.compile(kind, text) for kind, text in FORMS]
