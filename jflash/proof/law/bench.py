"""How the law's check decodes texts in one way, and what it keeps of a comparison."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.compiled.shape import Shape, capacity_for
from jflash.pair import Models, Params
from jflash.proof.cases import LONGEST_PROMPT, Case
from jflash.proof.digest import Apart, Digest, apart, digests
from jflash.proof.law.forms import CHUNKS, PLAIN, Way
from jflash.proof.lossless import Executable, Mode, Task, compile_executables, corrupted, decode
from jflash.records.decoding import Decoding


class Bench(NamedTuple):
    """What all comparisons of a pair share."""

    case: Case
    dtype: str
    new_tokens: int

    def shape(self, way: Way) -> Shape:
        width = self.case.models.block_size
        capacity = capacity_for(LONGEST_PROMPT, self.case.max_new_tokens, width, max(CHUNKS))
        slots, stops = capacity * (1 + way.roomy), len(self.case.stops)
        return Shape.of(way.batch, slots, stops, way.chunk)

    def models(self, way: Way) -> Models:
        if way.modes == PLAIN:
            return self.case.models.plain()
        return replace(self.case.models, block_size=way.width, rows=way.rows)

    def params(self, mode: str) -> Params:
        if mode == "plain":
            return Params(self.case.params.target)
        return self.case.other_drafter if mode == "other drafter" else self.case.params

    def executables(self, ways: Sequence[Way]) -> list[Executable]:
        return compile_executables(
            [(self.models(way), self.params(way.modes[0]), self.shape(way)) for way in ways]
        )

    def task(self, prompts: Sequence[list[int]]) -> Task:
        return Task(prompts, self.decoding(self.new_tokens))

    def decoding(self, new_tokens: int) -> Decoding:
        return Decoding(max_new_tokens=new_tokens, stop_token_ids=tuple(self.case.stops))


def decoded(
    bench: Bench, executable: Executable, mode: str, prompts: Sequence[list[int]],
    texts: Sequence[Digest], seed: int,
) -> list[Digest]:  # fmt: skip
    """The prompts by one mode, a batch at a time; a batch that is not full repeats its last one."""
    batch, made = executable.shape.batch, []
    for i in range(0, len(prompts), batch):
        some = list(prompts[i : i + batch])
        filled = some + some[-1:] * (batch - len(some))
        text = None
        if mode == "replay":
            rows = np.zeros((batch, executable.shape.capacity), np.int32)
            for row, digest in zip(rows, texts[i : i + batch], strict=False):
                row[: len(digest.tokens)] = digest.tokens
            vocabulary = bench.case.models.target.config.vocab_size
            text = corrupted(jnp.asarray(rows), jax.random.key(seed + i), vocabulary)
        task = bench.task(filled)
        run = decode(executable, Mode(mode, bench.params(mode), text=text), task)
        made += digests(run, task)[: len(some)]
    return made


def enough(
    bench: Bench, executable: Executable, mode: str, prompts: Sequence[list[int]], tokens: int,
    seed: int, texts: int = 1,
) -> list[Digest]:  # fmt: skip
    """The first prompts by one mode, at least `texts` of them, until they have so many tokens."""
    batch, made = executable.shape.batch, []
    while len(made) < len(prompts) and (len(made) < texts or new_tokens(made) < tokens):
        some = prompts[len(made) : len(made) + batch]
        made += decoded(bench, executable, mode, some, (), seed)
    return made


def new_tokens(texts: Sequence[Digest]) -> int:
    """Those after the prompts."""
    return sum(len(text.tokens) - text.prompt_tokens for text in texts)


class Compared(NamedTuple):
    """One comparison with plain decoding, summed over texts."""

    way: str
    texts: int
    apart: Apart
    first: dict[str, Any] | None  # the text that differs first, and from which index

    @property
    def result(self) -> dict[str, Any]:
        return {"way": self.way, "texts": self.texts, **self.apart._asdict(), "first": self.first}


def compared(way: str, texts: Sequence[Digest], found: Sequence[Digest]) -> Compared:
    sums, first = Apart(), None
    for number, (one, other) in enumerate(zip(texts, found, strict=True)):
        each = apart(one, other)
        if each.differ and first is None:
            first = {"text": number, "prompt_tokens": one.prompt_tokens, **each._asdict()}
        sums = sums.plus(each)
    return Compared(way, len(found), sums, first)
