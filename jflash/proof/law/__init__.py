"""The law: plain decoding at width 1 and batch 1 against every other way to decode the same texts.

This file does not know the command line. It counts every breach of the law, also on a device whose
operations do not promise it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jflash.compiled.shape import Shape, new_state
from jflash.pair import Models, Params
from jflash.proof.cases import Case
from jflash.proof.digest import Digest
from jflash.proof.faults import Fault, planted
from jflash.proof.law.bench import Bench, Compared, compared, decoded, enough, new_tokens
from jflash.proof.law.forms import PLAIN, Form, Way
from jflash.proof.law.prompts import halves, long_prompts
from jflash.proof.lossless import Executable, compile_all, lower_recorded

REFERENCE = Way(1, 1, PLAIN)
FAULTY_TEXTS = 2
BATCHES = 4  # of prompts, at most, until texts that end early have enough tokens


def check_law(
    case: Case, form: Form, seed: int, dtype: str, progress: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """All comparisons of one pair, and the planted faults that were caught."""
    begin = time.perf_counter()
    form = form.fitting(case.models)
    bench = Bench(case, dtype, min(form.new_tokens, case.max_new_tokens))
    long = [Way(1, 1, PLAIN, True, chunk) for chunk in form.long_chunks]
    alone, *others = bench.executables([REFERENCE, *form.ways, *long])
    others, large = others[: len(form.ways)], others[len(form.ways) :]
    prompts = case.prompts(form.batch * BATCHES, seed)
    texts = enough(bench, alone, "plain", prompts, form.anchored, seed)
    anchors = len(texts)
    found: list[Compared] = []
    for way, executable in zip(form.ways, others, strict=True):
        for mode in way.modes:
            if way.batch > 1 and len(texts) == anchors:  # the first way of several texts
                made = enough(bench, executable, mode, prompts, form.tokens, seed, form.batch)
                prompts = prompts[: len(made)]
            else:  # at batch 1 no more than the anchors
                count = len(prompts) if way.batch > 1 else anchors
                made = decoded(bench, executable, mode, prompts[:count], texts, seed)
            count = len(made)
            found.append(compared(way.named(mode), texts[:count], made[: len(texts)]))
            texts += made[len(texts) :]
            progress(found[-1].result)
    prompted = [halves(bench, alone, texts[:anchors])]
    for way, executable in zip(long, large, strict=True):
        prompted += long_prompts(bench, way, executable, texts)
    for each in prompted:
        progress(each.result)
    found += prompted
    blocks = [made for way, made in zip(form.ways, others, strict=True) if way.modes != PLAIN]
    faults = []
    for found_fault in caught(bench, form.planted_in(case.models), alone, blocks, texts, prompts):
        faults.append(found_fault)
        progress(found_fault)
    return {
        "pair": case.name,
        "backends": case.models.kernels._asdict(),
        "promised": case.models.one_arithmetic,
        "texts": len(texts),
        "tokens": new_tokens(texts),
        "tokens_wanted": form.tokens,
        "anchored_tokens": new_tokens(texts[:anchors]),
        "anchored_tokens_wanted": form.anchored,
        "compared": [each.result for each in found],
        "differences": sum(sum(each.apart[:3]) for each in found),
        "faults": faults,
        "seconds": time.perf_counter() - begin,
    }


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
