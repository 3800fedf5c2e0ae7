"""Names of special tokens in a grammar's texts, where they are letters and not the tokens.

llguidance tokenizes what a grammar forces, and a tokenizer of Hugging Face reads a special token's
name as the token, which ends the text or is no text.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Names(NamedTuple):
    """What all tokens stand for, and which of them are special."""

    of_tokens: list[bytes]
    special: list[int]

    @classmethod
    def of(cls, tokens: Any, size: int) -> "Names":
        """Those of a tokenizer of llguidance."""
        special = [token for token in range(size) if tokens.is_special_token(token)]
        return cls([tokens.decode_bytes([token]) for token in range(size)], special)

    @property
    def texts(self) -> list[str]:
        """The special tokens' names that have several letters."""
        texts = [self.of_tokens[token].decode(errors="ignore") for token in self.special]
        return [text for text in texts if len(text) > 1]

    def within(self, source: str) -> bool:
        """Whether a grammar has one of the names, perhaps with signs escaped."""
        source = source.replace("\\", "")
        return any(text in source for text in self.texts)


def as_letters(tokens: Any, names: Names, stop_ids: Sequence[int]) -> Any:
    """The tokenizer of llguidance as one to which the names are letters.

    It asks Python for each forced text, which takes its turn among all threads: so only grammars
    with such a name use it.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    letters = TokenizerWrapper(_Letters(tokens, names))
    return LLTokenizer(letters, n_vocab=len(names.of_tokens), eos_token=list(stop_ids))


class _Letters:
    """Tokenizes a text with the first letter of each name apart."""

    bos_token_id = None

    def __init__(self, tokens: Any, names: Names) -> None:
        self.tokens, self.special_token_ids = names
        self.eos_token_id, self._tokens = tokens.eos_token, tokens
        cuts = (f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names.texts)
        self._cut = re.compile("|".join(cuts))

    def __call__(self, text: bytes) -> list[int]:
        parts = self._cut.split(text.decode())
        return [token for part in parts for token in self._tokens.tokenize_str(part)]
