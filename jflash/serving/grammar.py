"""Grammars of texts: the tokens that may come next, after a text and along its drafts.

llguidance compiles and follows them. This file knows token ids and masks of bits, no request.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from jflash.serving.token_names import Names, as_letters

Kind = Literal["json_schema", "lenient_json_schema", "regex", "grammar", "choice"]
KEPT = 128  # compiled grammars
LONGEST = 2**18  # characters of a grammar
# Bytes. llguidance follows rules that name one another by recursion, and the process would end
# where a stack does. Chains of LONGEST characters fitted into the half of it.
STACK = 2**29
_starts = threading.Lock()
SHOWN = 40  # first characters of a grammar in an error
MOST_SHOWN = 300  # characters of an error, whose end says what is wrong
# A space, or a new line with its indentation: any amount of white space would be legal JSON, and a
# text that never ends.
WHITE_SPACE = r" |\r?\n[ \t]{0,32}"


class GrammarError(Exception):
    """A grammar became too complex for a text, which cannot be continued."""


class Opening(NamedTuple):
    """Where a grammar begins: after the first `token`, or after the first that follows all tokens
    of `after`, which stand together."""

    token: int
    after: tuple[int, ...] = ()


class _Waits(NamedTuple):
    """A text before its grammar: its newest tokens, and whether `after` was there."""

    newest: tuple[int, ...] = ()
    ready: bool = False


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar of the text from `opens` on, or of the whole text.

    Where the text may end, one of `stop_ids` may come; before `opens` none may. `kind` and `text`
    are what it was compiled from.
    """

    start: Any  # llguidance's matcher at the beginning
    vocabulary: int  # of the model
    words: int  # of 32 bits, of a mask over the tokenizer's vocabulary, which may be larger
    stop_ids: tuple[int, ...]
    kind: Kind
    text: str
    opens: Opening | None = None


class Grammars:
    """Compiles grammars for one tokenizer, a fast one of transformers; keeps the newest."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: Sequence[int]) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise ValueError("llguidance is not installed: pip install 'jflash[serve]'") from None
        self._vocabulary, self._stop_ids = vocabulary, tuple(stop_ids)
        # Gemma 3's tokenizer, for one, has a token for images that its text models lack.
        known = max(vocabulary, 1 + max(tokenizer.get_vocab().values()))
        self._known, self._words = known, -(-known // 32)
        self._tokens = from_tokenizer(tokenizer, n_vocab=known, eos_token=list(stop_ids))
        self._names = Names.of(self._tokens, known)
        self._compiled = functools.lru_cache(maxsize=KEPT)(self._compile)

    def compile(self, kind: Kind, text: str, opens: Opening | None = None) -> Grammar:
        """The grammar that `text` describes; ValueError says what is wrong with it.

        `kind` grammar is llguidance's Lark or GBNF, choice a JSON list of texts.
        """
        return replace(self._compiled(kind, text), opens=opens)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for in a text."""
        return self._tokens.decode_bytes([token])

    def mark(self, text: str) -> str:
        """A text in a grammar: a token with that name if there is one, else its characters."""
        ids = self._tokens.tokenize_str(text, parse_special=True)
        if len(ids) == 1 and self._tokens.is_special_token(ids[0]):
            return text
        return json.dumps(text)

    @functools.cached_property
    def _as_letters(self) -> Any:
        return as_letters(self._tokens, self._names, self._stop_ids)

    def _compile(self, kind: Kind, text: str) -> Grammar:
        if kind != "choice" and len(text) > LONGEST:  # choices do not name one another
            raise ValueError(f"{len(text)} characters: at most {LONGEST}")
        return _with_stack(functools.partial(self._read, kind, text))

    def _read(self, kind: Kind, text: str) -> Grammar:
        from llguidance import LLMatcher

        tokens = self._as_letters if self._names.within(text) else self._tokens
        matcher = LLMatcher(tokens, source_of(kind, text), log_level=0)
        if matcher.is_error():
            raise ValueError(_brief(matcher.get_error(), text))
        grammar = Grammar(
            matcher, self._vocabulary, self._words, self._stop_ids, kind, text
        )  # fmt: skip
        _take_time(grammar)
        return grammar


def _with_stack[T](work: Callable[[], T]) -> T:
    """What `work` gives in a thread of its own, whose stack has STACK bytes."""
    with ThreadPoolExecutor(1) as pool:
        # Threads that others start meanwhile have such a stack too, as far as they use it.
        with _starts:
            usual = threading.stack_size(STACK)
            try:
                given = pool.submit(work)
            finally:
                threading.stack_size(usual)
        return given.result()


def _take_time(grammar: Grammar) -> None:
    """Makes the mask of the first token, which may take seconds, where only this request waits: all
    texts of the grammar share what is known then. The second one fails at once if the first has
    used up what llguidance allows."""
    for _ in range(2):
        first = Matcher(grammar)
        fill(np.full((1, 1, grammar.words), -1, np.int32), [(0, first, ())])
        if first.error:
            raise ValueError(first.error)


def _brief(error: str, text: str) -> str:
    """llguidance's error in one line; it quotes the grammar, sometimes more than once, and may tell
    the state of its parser, or where its own code stood when it gave up."""
    for begins in ("<state>", "<backtrace>"):
        error, _, _ = error.partition(begins)
    line, quoted = (" ".join(x.split()) for x in (error, text))
    if len(quoted) > SHOWN:
        line = line.replace(quoted, f"{quoted[:SHOWN]}…")
    half = MOST_SHOWN // 2
    return line if len(line) <= MOST_SHOWN else f"{line[: half - 1]}…{line[-half:]}"


def source_of(kind: Kind, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        if not texts:
            raise ValueError("there is no text to choose")
        # A terminal: of a rule llguidance follows each text by itself, at most 2,000.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if kind == "grammar":
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(text))
        except Exception as error:  # the reader of GBNF has no narrower one
            raise ValueError(_brief(str(error), text)) from None
    options: Any = {"whitespace_pattern": WHITE_SPACE, "lenient": kind == "lenient_json_schema"}
    return LLMatcher.grammar_from_json_schema(text, overrides=options)


class Matcher:
    """A text's place in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher = grammar, grammar.start.deep_copy()
        self._waits = None if grammar.opens is None else _Waits()

    @property
    def words(self) -> int:
        return self._grammar.words

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._grammar.stop_ids

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any more, in one short line: it became too complex;
        else empty."""
        return _brief(self._matcher.get_error(), self._grammar.text)

    def take(self, token_ids: Sequence[int]) -> None:
        """Follows the text's next tokens."""
        for token in token_ids:
            if self._waits is None:
                self._matcher.consume_token(token)
            else:
                self._waits = self._waiting(self._waits, token)

    def constrained(self, drafts: Sequence[int]) -> tuple[int, Any, list[int]]:
        """The first row of a block that is constrained, llguidance's matcher, later drafts."""
        path, waits, first = list(drafts), self._waits, 0
        while waits is not None and first < len(path):
            waits = self._waiting(waits, path[first])
            first += 1
        # No row of this block, unless one of the drafts opens the grammar.
        return first + (waits is not None), self._matcher, path[first:]

    def _waiting(self, waits: _Waits, token: int) -> _Waits | None:
        """The state before the grammar after one more token; None where the grammar begins."""
        opens = self._grammar.opens
        assert opens is not None
        if token == opens.token and (waits.ready or not opens.after):
            return None
        newest = (*waits.newest, token)[-len(opens.after) :] if opens.after else ()
        return _Waits(newest, waits.ready or newest == opens.after)


def fill(masks: Int[np.ndarray, "B W M"], blocks: Sequence[tuple[int, Matcher, Sequence[int]]]):
    """Writes the masks of (sequence, matcher, drafts): of the token after the text, and of those
    after each of the drafts.

    Rows after the first draft that a grammar refuses stay as they are, for they are not read.
    """
    B, W, M = masks.shape
    assert masks.flags["C_CONTIGUOUS"] and masks.dtype == np.int32
    asked, words = [], masks.view(np.uint32)
    most = max((matcher.words for _, matcher, _ in blocks), default=M)
    wide = masks if most == M else np.full((B, W, most), -1, np.int32)
    for sequence, matcher, drafts in blocks:
        first, follows, path = matcher.constrained(drafts[: W - 1])
        for token in matcher.stop_ids:
            words[sequence, :first, token // 32] &= ~np.uint32(1 << token % 32)
        if first < W and not matcher.error:
            asked.append((follows, sequence * W + first, path))
    place, size = wide.ctypes.data, most * wide.itemsize
    if ends := [(follows, row) for follows, row, path in asked if not path]:
        _executor().unsafe_compute_mask_ptr(ends, place, size, B * W)
    if paths := [one for one in asked if one[2]]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(paths, place, size, B * W)
    if wide is not masks:
        masks &= wide[..., :M]


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()
