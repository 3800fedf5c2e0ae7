"""One program brings a greedy prompt into its slot, and one the prompts of several requests."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jflash.bench.shapes import model_shape
from jflash.compiled.shape import Shape
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models
from jflash.proof.under_load import DRAWN
from jflash.records.kernels import XLA, Kernels
from jflash.serving.calls import layout as layouts
from jflash.serving.calls import pass_sizes as sizes_of_passes
from jflash.serving.calls.layout import STEPS_OF_SMALL, STEPS_PER_CALL, Layout, steps_of_call
from jflash.serving.calls.pass_sizes import (
    Several,
    burst_of,
    copying_sizes,
    engine_chunk,
    pass_rows,
    pass_sizes,
    several_prompts,
)
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle, result_of
from jflash.serving.request import Event, Request, Result
from jflash.serving.schedule import Pass
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from jflash.serving.thread.prompts import Prompts, counts
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import hybrid_pair, one_arithmetic, prompts, random_pair

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
BATCH = 4


WAYS: dict[str, dict[str, Any]] = {
    "window": {"sights": ({"window": 24}, {}), "target_layer_ids": (0,)},
    "none": {"target_layer_ids": (0,)},
    "last layer read": {"sights": ({"window": 24}, {})},
}


@pytest.fixture(
    scope="module",
    params=["window", *(pytest.param(x, marks=pytest.mark.long) for x in WAYS if x != "window")],
)
def pair(request):
    """With a layer that has a window and one that has none, or two without; the drafter reads the
    last one's output, or the pass makes that of the newest tokens alone."""
    return one_arithmetic(random_pair(**WAYS[request.param]))


def engine_of(pair, at_once: int = 3) -> Engine:
    """With the programs of `at_once`."""
    how: dict[str, Any] = dict(max_batch=BATCH, max_context=256, prefill_chunk=32, pages=16)
    return Engine(pair, **how, steps_per_call=2, prompts_at_once=at_once)


def counted(engine: Engine) -> list[str]:
    """The names of the programs that are dispatched from now on, but for steps."""
    names, device = list[str](), engine._loop.device

    def each(name: str, program: Any) -> Any:
        return lambda *given: (names.append(name), program(*given))[1]

    def of(name: str) -> dict[Any, Any]:
        return {key: each(name, one) for key, one in getattr(device.programs, name).items()}

    kinds = ("chunk", "whole", "first", "score")
    device.programs = device.programs._replace(**{name: of(name) for name in kinds})
    return names


def asked(lengths: tuple[int, ...], **options: Any) -> list[Request]:
    ids = [prompts(1, seed=n, low=n, high=n + 1)[0] for n in lengths]
    return [Request(prompt_ids=one, max_tokens=12, **options) for one in ids]


def test_one_dispatch_brings_a_prompt(pair):
    with engine_of(pair) as engine:
        names = counted(engine)
        engine.generate(asked((20,)))
        assert names == ["whole"]
        engine.generate(asked((70,)))  # two whole chunks before its end
        assert names == ["whole", "chunk", "chunk", "whole"]
        engine.generate(asked((20,), sampling=DRAWN, seed=1, cache_salt="new"))
        assert names[4:] == ["chunk", "first"]


def test_no_bit_changes_where_several_are_brought_at_once(pair):
    """Short and long prompts, drawn ones among them, prefixes that are found: texts alone."""
    lengths = (20, 31, 7, 70, 32, 33, 3, 90, 12, 64)
    requests = asked(lengths) + asked(lengths[:3], sampling=DRAWN, seed=3, logprobs=True)
    shared = list(requests[7].prompt_ids[:64])
    requests += [Request(prompt_ids=[*shared, i], max_tokens=12) for i in range(1, 4)]
    with engine_of(pair) as engine:
        names = counted(engine)
        want = [engine.generate([one])[0] for one in requests]
    assert len(names) > len(requests)  # by programs of one prompt
    got, sizes = at_once(pair, requests)
    assert max(sizes) == 3 and len(sizes) < len(requests) - 3  # the drawn ones go alone
    assert got[-1].cached_tokens == 64
    for mine, alone in zip(got, want, strict=True):
        assert mine.token_ids == alone.token_ids and mine.logprobs == alone.logprobs


def test_what_waits_is_computed_at_once(pair):
    """Four prompts that wait when a round begins take two dispatches, of three and of one."""
    assert at_once(pair, asked((9, 10, 11, 12)))[1] == [3, 1]


def test_a_prompt_of_several_passes_parts_no_others(pair):
    """It comes after those that one pass ends, which one program computes, if one of them came
    before it."""
    requests = asked((9, 40, 10))
    got, sizes = at_once(pair, requests)
    assert sizes == [2, 1]
    with engine_of(pair) as engine:
        assert [x.token_ids for x in got] == [engine.generate([x])[0].token_ids for x in requests]


@pytest.mark.parametrize(
    ("texts", "order"),
    [("lsss", "lsss"), ("slss", "sssl"), ("slsssl", "ssssll"), ("dslms", "dslms"),
     ("lslm", "lslm"), ("slmsds", "ssslmd"), ("mlmlm", "mmllm"), ("slssssls", "sssslsls")],
)  # fmt: skip
def test_only_younger_texts_that_fill_an_older_ones_program_overtake(texts, order):
    """Of short prompts, of which a program computes three or four, of middle ones, two at once, and
    of what goes alone: long ones, and drawn ones."""
    of = {"s": Several(4, 128, 3), "m": Several(2, 512)}
    jobs = {i: (kind, 2 if kind == "l" else 1) for i, kind in enumerate(texts)}
    passes = SimpleNamespace(together=lambda i, over: of.get(jobs[i][0]), device=None)
    prompts: Any = Prompts(cast(Any, passes), cast(Any, None), dict)
    given = [[(i, Pass(128, 128))] * count for i, (_, count) in jobs.items()]
    found = [i for i, _ in prompts._in_order(given)]
    once = list(dict.fromkeys(found))
    assert "".join(texts[i] for i in once) == order
    for kind in set(texts):
        of_kind = [i for i in once if texts[i] == kind]
        assert of_kind == sorted(of_kind)
    assert [found.count(i) for i in once] == [jobs[i][1] for i in once]


LAYOUT = Layout(Shape.of(BATCH, 256, 16, 32), 16, 2, prompts=3)


def at_once(
    pair, requests: list[Request], layout: Layout = LAYOUT
) -> tuple[list[Result], list[int]]:
    """The results of requests that come at once, by passes over three prompts at most; and of how
    many prompts each pass was that chose first tokens."""
    loop, sizes = Loop(pair.models, pair.params, layout, b""), list[int]()
    passes: Any = loop.prompts.passes
    whole = passes.whole
    passes.whole = lambda some, *rest: (sizes.append(len(some)), whole(some, *rest))[1]
    events = [list[Event]() for _ in requests]
    loop.waiting += [
        Job(
            handle=Handle(one, lambda _: None), order=(0, i), seed=one.seed or 0, deadline=None,
            tokens=list(one.prompt_ids),
        )
        for i, one in enumerate(requests)
    ]  # fmt: skip
    while not loop.idle:
        loop.round(lambda job, some: events[job.order[1]].extend(some))
    loop.close()
    return [result_of(*each) for each in zip(requests, events, strict=True)], sizes


def test_how_many_prompts_a_pass_takes(pair):
    layout = Layout(Shape.of(BATCH, 256, 16, 32), 8, 2)
    assert several_prompts(pair.models, layout) == ()  # a CPU waits for no dispatch
    assert several_prompts(pair.models, layout._replace(prompts=5)) == (Several(5, 32),)
    assert several_prompts(pair.models, layout._replace(prompts=1)) == ()
    with pytest.raises(ValueError, match="prompts_at_once must be at least 1, got 0"):
        engine_of(pair, at_once=0)


def test_passes_are_wider_where_a_target_has_experts():
    """In a context that holds one; pairs of prompts and the ends of long ones keep their sizes."""
    kernels = Kernels(*["canonical"] * len(XLA))._replace(heads="triton", delta="triton")
    slots = (448, 512, 1984, 2048, 40960)
    for name, most in (("qwen3-coder-30b", 2048), ("qwen3.5-35b-a3b", 2048), ("qwen3-8b", 512)):
        target, drafter = model_shape(name)
        models = Models(Target(target), Drafter(drafter), drafter.block_size, kernels=kernels)
        assert [engine_chunk(models, n) for n in slots] == [128, 512, 512, most, most]
        shape = Shape.of(BATCH, 40960, chunk=most)
        assert pass_sizes(models, shape) == tuple(sorted({64, 128, 512, most}))
        assert copying_sizes(models, shape) == (64, 128, 512)
        least = 4 if target.deltas else 3  # no pass over nothing may change a state
        several = several_prompts(models, Layout(shape, None, 2))
        assert several == (Several(4, 128, least), Several(2, 512))
    other = replace(models, kernels=kernels._replace(matmul="xla"))
    assert engine_chunk(other, 40960) == 128
    target, drafter = model_shape("gpt-oss-20b")  # of whose windows a slot has pages
    models = Models(Target(target), Drafter(drafter), drafter.block_size, kernels=kernels)
    assert target.experts and engine_chunk(models, 40960) == 512


def test_on_a_gpu_a_large_model_takes_several_that_fill_its_rows(pair, monkeypatch):
    """Four short prompts, of which three wait, and two long ones; a small model any two, in passes
    that hold most prompts whole."""
    models = replace(
        pair.models, kernels=Kernels(*["canonical"] * len(XLA))._replace(heads="triton")
    )
    layout = Layout(Shape.of(BATCH, 1024, 16, 512), 64, 2)
    shape = layout.shape
    assert several_prompts(models, layout) == (Several(4, 256),)
    assert several_prompts(models, layout._replace(prompts=5)) == (Several(5, 256),)
    assert pass_sizes(models, shape) == (256, 512)
    assert pass_sizes(models, shape._replace(chunk=256)) == (256,)
    for given in (layout._replace(shape=shape._replace(chunk=chunk)) for chunk in (128, 384)):
        assert several_prompts(models, given) == (Several(4, 128),)
        assert pass_sizes(models, given.shape)[:2] == (64, 128)
    slots = (192, 256, 448, 512, 4096)
    assert [engine_chunk(models, n) for n in slots] == [128, 256, 256, 512, 512]
    assert burst_of(models, shape, 2048) == 32 and pass_rows(models, layout) == 1024
    assert burst_of(models, shape._replace(chunk=128), 100) == 2
    recurrent = replace(hybrid_pair().models, kernels=models.kernels._replace(delta="triton"))
    assert recurrent.one_arithmetic and pass_sizes(recurrent, shape) == (64, 128, 512)
    monkeypatch.setattr(sizes_of_passes, "FEW_WEIGHTS", 0)
    assert several_prompts(models, layout) == (Several(4, 128),)
    assert burst_of(models, shape, 2048) == 32 and pass_rows(models, layout) == 512
    assert steps_of_call(models) == STEPS_OF_SMALL > steps_of_call(pair.models) == STEPS_PER_CALL
    monkeypatch.setattr(layouts, "MOST_WEIGHTS", 0)
    short, long = several_prompts(models, layout)
    assert (short, long) == (Several(4, 128, 3), Several(2, 512))
    assert pass_sizes(models, shape) == (64, 128, 512)
    assert [engine_chunk(models, n) for n in slots] == [128, 128, 128, 512, 512]
    assert steps_of_call(models) == STEPS_PER_CALL and steps_of_call(models, 3) == 3
    taken = {size: [each.takes(size) for each in (short, long)] for size in (64, 128, 512)}
    assert taken == {64: [True, False], 128: [True, False], 512: [False, True]}
    assert [*counts(9, short)] == [4, 4, 1] and [*counts(7, short)] == [4, 3]
    assert [*counts(2, short)] == [1, 1] and [*counts(3, long)] == [2, 1]
    assert [*counts(2, None)] == [1, 1]
