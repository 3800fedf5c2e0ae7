"""The law: plain decoding at width 1 and batch 1 against every other way to decode the same texts.

This file does not know the command line. It counts every breach of the law, also on a device whose
operations do not promise it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflash.decoding import Decoding
from jflash.pair import Models, Params
from jflash.programs import Shape, capacity_for, new_state
from jflash.proof.cases import LONGEST_PROMPT, Case
from jflash.proof.digest import Apart, Digest, apart, digests
from jflash.proof.faults import Fault, planted
from jflash.proof.law_forms import CHUNKS, PLAIN, Form, Way
from jflash.proof.lossless import (
    Executable,
    Mode,
    Task,
    compile_all,
    compile_executables,
    corrupted,
    decode,
    lower_recorded,
)


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


REFERENCE = Way(1, 1, PLAIN)
FAULTY_TEXTS = 2


def check_law(
    case: Case, form: Form, seed: int, dtype: str, progress: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """All comparisons of one pair, and the planted faults that were caught."""
    begin = time.perf_counter()
    form = form.fitting(case.models)
    bench = Bench(case, dtype, min(form.new_tokens, case.max_new_tokens))
    alone, *others = bench.executables([REFERENCE, *form.ways])
    prompts = case.prompts(form.batch, seed)
    texts = decoded(bench, alone, "plain", prompts[: _anchors(form, bench)], (), seed)
    anchors = len(texts)
    found: list[Compared] = []
    for way, executable in zip(form.ways, others, strict=True):
        for mode in way.modes:
            # Until all texts are known, those that are: the anchors; at batch 1 no more than them.
            count = len(prompts) if way.batch > 1 else anchors
            made = decoded(bench, executable, mode, prompts[:count], texts, seed)
            found.append(compared(way.named(mode), texts[:count], made[: len(texts)]))
            texts += made[len(texts) :]
            progress(found[-1].result)
    found.append(halves(bench, alone, texts[:anchors]))
    progress(found[-1].result)
    blocks = [made for way, made in zip(form.ways, others, strict=True) if way.modes != PLAIN]
    faults = []
    for found_fault in caught(bench, form.planted_in(case.models), alone, blocks, texts, prompts):
        faults.append(found_fault)
        progress(found_fault)
    tokens = sum(len(text.tokens) - text.prompt_tokens for text in texts)
    return {
        "pair": case.name,
        "backends": case.models.kernels._asdict(),
        "promised": case.models.one_arithmetic,
        "texts": len(texts),
        "tokens": tokens,
        "anchored_tokens": sum(len(t.tokens) - t.prompt_tokens for t in texts[:anchors]),
        "compared": [each.result for each in found],
        "differences": sum(sum(each.apart[:3]) for each in found),
        "faults": faults,
        "seconds": time.perf_counter() - begin,
    }


def _anchors(form: Form, bench: Bench) -> int:
    """How many texts the reference decodes."""
    return min(form.batch, max(1, -(-form.anchored // bench.new_tokens)))


def halves(bench: Bench, alone: Executable, texts: Sequence[Digest]) -> Compared:
    """The texts with their first halves as prompts: chunks in place of steps."""
    long = [text for text in texts if len(text.tokens) > text.prompt_tokens + 2]
    middle = [(text.prompt_tokens + len(text.tokens)) // 2 for text in long]
    found = []
    for text, end in zip(long, middle, strict=True):
        new = len(text.tokens) - end
        task = Task([text.tokens[:end].tolist()], bench.decoding(new))
        found += digests(decode(alone, Mode("plain", bench.params("plain")), task), task)
    return compared("width 1, batch 1, half of the text as a prompt: plain", long, found)


class Planted(NamedTuple):
    """The executable of the reference with a fault, and of the last way."""

    alone: Executable | None  # None if it is the sound one
    wide: Executable


def with_faults(
    bench: Bench, faults: Sequence[Fault], alone: Executable, wide: Executable
) -> list[Planted]:
    """The executables with each fault in its steps; prompts are admitted by the sound ones."""
    wanted = [(f, sound) for f in faults for sound in ((wide,) if f.sound_alone else (alone, wide))]
    models = [planted(sound.models, fault) for fault, sound in wanted]

    def lowered(own: Models, shape: Shape) -> jax.stages.Lowered:
        drafter = bench.case.params.drafter if own.drafter is not None else None
        state = jax.eval_shape(lambda: new_state(own, shape))
        return lower_recorded(own, Params(bench.case.params.target, drafter), state, shape)

    pairs = list(zip(wanted, models, strict=True))
    runs = compile_all(lowered(own, sound.shape) for (_, sound), own in pairs)
    made = {
        (fault.name, sound is wide): sound._replace(models=own, run=run)
        for ((fault, sound), own), run in zip(pairs, runs, strict=True)
    }
    return [Planted(made.get((fault.name, False)), made[fault.name, True]) for fault in faults]


def caught(
    bench: Bench, faults: Sequence[Fault], alone: Executable, blocks: Sequence[Executable],
    texts: Sequence[Digest], prompts: Sequence[list[int]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Each planted fault in the last blocks, the widest of most sequences, or else in the others.

    Some CPUs' own product of 128 rows has the bits of one row's, and that of 32 rows has others.
    """
    for fault, faulty in zip(faults, with_faults(bench, faults, alone, blocks[-1]), strict=True):
        found = differing(bench, fault, faulty, texts, prompts)
        for narrower in reversed(blocks[:-1]):
            if found.apart.differ:
                break
            (faulty,) = with_faults(bench, [fault], alone, narrower)
            found = differing(bench, fault, faulty, texts, prompts)
        yield {"fault": fault.name, "caught": found.apart.differ, **found.apart._asdict()}


def differing(
    bench: Bench, fault: Fault, faulty: Planted, texts: Sequence[Digest],
    prompts: Sequence[list[int]],
) -> Compared:  # fmt: skip
    """One planted fault in blocks, against width 1 and batch 1 with it.

    The blocks replay the texts, so that rows of all places are committed: a random drafter's steps
    commit the first, and a fault that begins where the block does is the same there.
    """
    prompts, want = prompts[:FAULTY_TEXTS], texts[:FAULTY_TEXTS]
    if faulty.alone is not None:
        want = decoded(bench, faulty.alone, "plain", prompts, (), 0)
    return compared(fault.name, want, decoded(bench, faulty.wide, "replay", prompts, want, 0))
