"""Calls over some of the slots: which they are, and that no text shows it."""

import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jflash.compiled.shape import Shape
from jflash.proof.under_load import DRAWN
from jflash.records.kernels import AUTO, XLA, Kernels
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.some_slots import (
    Stepping,
    first_of,
    given_slots,
    places,
    slot_counts,
    steppings,
)
from jflash.serving.engine import Engine
from jflash.serving.request import Request, Result
from jflash.serving.thread import device
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import hybrid_pair, one_arithmetic, prompts, random_pair

BATCH = 4
cpu_law = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")


LONG = [pytest.param(x, marks=pytest.mark.long) for x in ("a delta net", "none")]


@pytest.fixture(scope="module", params=["a window", *LONG])
def pair(request):
    """With a layer that has a window or a recurrent state and one that has none, or two without."""
    if request.param == "a delta net":
        return hybrid_pair()
    windows = request.param == "a window"
    return one_arithmetic(random_pair(sights=({"window": 24}, {})) if windows else random_pair())


def layout(batch: int, counts: tuple[int, ...] | None = None, ahead: int | None = 0) -> Layout:
    return Layout(Shape.of(batch, 256), 4 * batch, 2, counts=counts, ahead=ahead)


def test_the_slots_of_a_call():
    assert places([2, 0], 2, layout(4)).tolist() == [2, 0]
    assert places([3], 2, layout(4)).tolist() == [3, ~0]
    assert places([3, 1], 4, layout(4)).tolist() == [~0, 1, ~2, 3]
    assert places([], 1, layout(2)).tolist() == [~0]
    ahead = layout(3, ahead=2)
    assert [given_slots(ahead, n) for n in (1, 3)] == [3, 5]
    assert places([4, 2], 3, ahead).tolist() == [4, 2, ~0]
    assert places([4, 2, 0, 1], 5, ahead).tolist() == [4, 2, 0, 1, ~3]


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_the_first_that_are_able_step(count):
    """In their order, and others only where a call has more places."""
    for able in itertools.product((False, True), repeat=6):
        got = first_of(jnp.array(able), count).tolist()
        order = sorted(range(6), key=lambda i: not able[i])
        assert got == order[:count]


def test_the_numbers_of_slots_that_have_programs(pair):
    """A quarter less at least, or half where rows are chosen, which has programs where they pay."""
    assert slot_counts(pair.models, layout(32)) == (32,)  # a CPU
    assert slot_counts(pair.models, layout(4, (2, 1, 2, 4))) == (1, 2, 4)
    kernels = Kernels(*["canonical"] * len(XLA))._replace(heads="triton", delta="triton")
    gpu = replace(pair.models, kernels=kernels)
    counts = {batch: slot_counts(gpu, layout(batch)) for batch in (1, 2, 4, 6, 8, 9, 32, 48)}
    assert counts == {
        1: (1,), 2: (1, 2), 4: (1, 4), 6: (1, 4, 6), 8: (1, 4, 8), 9: (1, 4, 9),
        32: (1, 4, 8, 16, 24, 32), 48: (1, 4, 8, 16, 24, 32, 48),
    }  # fmt: skip
    assert slot_counts(replace(gpu, rows=AUTO), layout(64)) == (1, 4, 8, 16, 32, 64)
    assert slot_counts(gpu, layout(8, ())) == (8,)
    width = gpu.block_size
    assert steppings(gpu, layout(8)) == [Stepping(n, n * width) for n in (1, 4, 8)]
    assert steppings(replace(gpu, rows=12), layout(8)) == [(1, width), (4, 12), (8, 12)]
    chosen = steppings(replace(gpu, rows=AUTO), layout(64))
    rows = [(n, n * width) for n in (1, 4, 8, 16)]
    assert chosen == rows + [(n, n * row) for n in (32, 64) for row in (1, 4, width)]


@cpu_law
def test_a_text_is_the_same_in_every_call(pair):
    """Requests of all kinds come to one engine and leave it, so calls have one slot, two and four;
    each text is that of an engine whose calls serve all."""
    windows = any(mixer.window for mixer in pair.models.target.config.mixers)
    requests, models = asked(7), replace(pair.models, rows=AUTO if windows else None)
    with engine_of(pair, ()) as engine:
        want = [engine.generate([one])[0] for one in requests]
    with engine_of(replace(pair, models=models), (1, 2)) as engine:
        served = counted(engine)
        got = [engine.generate([one])[0] for one in requests]
        assert set(served) == {1}
        got += engine.generate(requests)
        assert set(served) == {1, 2, BATCH}
    for mine, alone in zip(got, want * 2, strict=True):
        assert answer(mine) == answer(alone)


def test_every_program_of_steps_has_run_before_the_first_request(pair, monkeypatch):
    """A request of one slot would not reach the others, and their first runs take longest."""
    ran, compile_programs = list[Any](), device.compile_programs

    def counting(*given: Any) -> Any:
        programs = compile_programs(*given)

        def noted(key: Any, program: Any) -> Any:
            return lambda *given: (ran.append((key, len(given[3]))), program(*given))[1]

        kinds = {name: getattr(programs, name) for name in ("greedy", "drawn")}
        return programs._replace(
            **{name: {k: noted(k, p) for k, p in kind.items()} for name, kind in kinds.items()}
        )

    monkeypatch.setattr(device, "compile_programs", counting)
    with engine_of(pair, (1, 2)) as engine:
        width = pair.models.block_size
        each = [(Stepping(n, n * width), n) for n in (1, 2, BATCH)]
        assert ran == [*each, (1, 1), (2, 2), (BATCH, BATCH)]
        assert engine.stats().calls == 0 and engine.stats().steps_by_rows == {}


def asked(count: int) -> list[Request]:
    """Short texts and long ones; every third is drawn, and tells its logprobs."""
    drawn: dict[str, Any] = dict(sampling=DRAWN, logprobs=True, presence_penalty=0.5)
    ids = prompts(count, seed=3, low=5, high=40)
    return [
        Request(prompt_ids=p, max_tokens=10 + 9 * i, seed=i, cache_salt=str(i), **more)
        for i, p in enumerate(ids)
        for more in [drawn if i % 3 == 1 else {}]
    ]


def engine_of(pair, counts: tuple[int, ...], ahead: int | None = None) -> Engine:
    return Engine(
        pair, max_batch=BATCH, max_context=192, prefill_chunk=32, slots_at_once=counts,
        prompts_ahead=ahead,
    )  # fmt: skip


def counted(engine: Engine) -> list[int]:
    """The slots of each call from now on."""
    own, served = engine._loop.device, list[int]()
    call = own.call
    own.call = lambda jobs, count, *rest: (served.append(count), call(jobs, count, *rest))[1]
    return served


def answer(result: Result) -> tuple:
    return result.token_ids, result.acceptance_lengths, result.logprobs, result.finish_reason


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((0,), "slots_at_once 0: it must be 1 to 4, the engine's slots"),
        ((1, 5), "slots_at_once 5: it must be 1 to 4"),
        ((1.5,), "slots_at_once 1.5 must be a whole number"),
    ],
)
def test_numbers_that_are_none_are_refused(pair, counts, why):
    with pytest.raises(ValueError, match=why):
        engine_of(pair, counts)


def test_texts_that_depend_on_their_neighbours_step_together():
    with pytest.raises(ValueError, match="slots_at_once 1: a prompt's bits may depend on the othe"):
        engine_of(random_pair(), (1,))
