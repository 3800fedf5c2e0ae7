"""Programs are dispatched by a thread beside the engine's: it is waited for where it must be."""

import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

from jflash.budget.rounds import Step
from jflash.budget.row_choice import ChosenRows
from jflash.generate import Pair
from jflash.records.kernels import AUTO
from jflash.serving.engine import Engine
from jflash.serving.request import Event, Failed, Request
from jflash.serving.thread.in_order import InOrder
from jflash.serving.thread.work import close_all
from tests.support.pairs import one_arithmetic, random_pair

PATIENCE = 60.0  # seconds


@pytest.fixture(scope="module")
def pair():
    return one_arithmetic(random_pair())


def engine_of(pair: Pair) -> Engine:
    return Engine(pair, max_batch=2, max_context=160, kinds=("greedy",))


def test_what_a_call_gave_goes_on_before_the_next_prompts_token_is_there(pair):
    """Whoever sends news hears of it before the engine's thread waits for the prompt."""
    asked, came, let_go = threading.Event(), threading.Event(), threading.Event()
    handles = []

    with engine_of(pair) as engine:
        device: Any = engine._loop.device
        passes: Any = engine._loop.prompts.passes
        whole, programs = passes.whole, device.programs

        def take(_: Any) -> None:
            if not handles:  # the first token of the text: it steps from now on
                handles.append(engine.submit(Request(prompt_ids=[4, 5], max_tokens=2)))
            elif asked.is_set():
                came.set()

        def noted(*given: Any) -> Any:
            if handles:
                asked.set()
            return whole(*given)

        def slow(program: Any) -> Any:
            def dispatched(*given: Any) -> Any:
                assert not asked.is_set() or let_go.wait(PATIENCE), "the events still wait"
                return program(*given)

            return dispatched

        passes.whole = noted
        slowly = {sizes: slow(one) for sizes, one in programs.whole.items()}
        device.programs = programs._replace(whole=slowly)
        engine.before_waiting(lambda: let_go.set() if came.is_set() else None)
        first = engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=100))
        first.forward(take)
        assert len(first.result().token_ids) == 100
        assert len(handles[0].result().token_ids) == 2


@pytest.mark.parametrize("rows", [None, AUTO])
def test_events_go_out_while_the_next_call_is_dispatched(pair, rows):
    """The engine's thread does not wait for a dispatch to hand on what it has, nor to choose rows:
    then a call would begin only after the one before it was dispatched *and* read."""
    pair = replace(pair, models=replace(pair.models, rows=rows))
    begun, let_go, came = threading.Event(), threading.Event(), threading.Event()
    lengths = list[int]()

    def take(events: list[Event] | BaseException) -> None:
        assert isinstance(events, list)
        lengths.extend(len(event.token_ids) for event in events)
        if begun.is_set():
            came.set()

    with engine_of(pair) as engine:
        of_steps = engine._loop.device.step_programs
        programs = of_steps.programs
        calls = iter(range(1000))

        def slow(program: Any) -> Any:
            def dispatched(*given: Any) -> Any:
                number = next(calls)
                if number == 1:  # the next call waits here before this one's end is seen
                    time.sleep(0.5)
                if number == 2:
                    begun.set()
                    assert let_go.wait(PATIENCE)
                return program(*given)

            return dispatched

        slowly = {rows: slow(one) for rows, one in programs.greedy.items()}
        of_steps.programs = programs._replace(greedy=slowly)
        handle = engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=100))
        handle.forward(take)
        try:
            assert begun.wait(PATIENCE) and came.wait(PATIENCE)
        finally:
            let_go.set()
        assert sum(lengths) <= len(handle.result().token_ids) == 100


def test_chosen_rows_cost_a_call_one_small_array(pair):
    """Each array that goes in or out takes the host's time; whole blocks are chosen here."""
    leaves = {}
    for rows in (None, AUTO):
        models = replace(pair.models, rows=rows)
        with engine_of(replace(pair, models=models)) as engine:
            (_, widest), program = max(engine._loop.device.programs.greedy.items())
            leaves[rows] = program.in_tree.num_leaves, program.out_tree.num_leaves
            device = engine._loop.device
            for slots, chosen in device.step_programs.rows.items():
                times = dict.fromkeys(chosen.times, Step(99.0)) | {widest: Step(1.0)}
                device.step_programs.rows[slots] = ChosenRows(None, times, times, 0.0)
            engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=100)).result()
            steps = engine.stats().steps_by_rows
    assert leaves[AUTO] == tuple(count + 1 for count in leaves[None])
    assert steps.pop(widest) > 0 == sum(steps.values())


@pytest.mark.parametrize("name", ["whole", "greedy"])
def test_a_dispatch_that_fails_ends_the_engine(pair, name):
    """Also if nobody waits for what it gives."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    with engine_of(pair) as engine:
        device = engine._loop.device
        programs = getattr(device.programs, name)
        new = dict.fromkeys(programs, broken) if isinstance(programs, dict) else broken
        device.programs = device.programs._replace(**{name: new})
        device.step_programs.programs = device.programs
        with pytest.raises(Failed) as failed:
            engine.submit(Request(prompt_ids=[1, 2, 3], max_tokens=9)).result()
        assert str(failed.value.__cause__) == "no memory"


def test_nothing_is_done_after_an_error():
    done, work = list[int](), InOrder("one")

    def fails() -> None:
        raise ValueError("once")

    first = work.do(lambda: done.append(1))
    failed, after = work.do(fails), work.do(lambda: done.append(2))
    assert first.result() is None
    for one in (failed, after):
        with pytest.raises(ValueError, match="once"):
            one.result()
    with pytest.raises(ValueError, match="once"):
        work.finish()
    work.close()
    assert done == [1]


def test_a_closed_engine_leaves_no_thread(pair):
    before = threading.active_count()
    with engine_of(pair) as engine:
        engine.submit(Request(prompt_ids=[1], max_tokens=4)).result()
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_an_engine_that_nobody_holds_frees_its_memory(pair):
    """Not while a handle is held whose request is under way."""
    before, engine = threading.active_count(), engine_of(pair)
    device = weakref.ref(engine._loop.device)
    handle = engine.submit(Request(prompt_ids=[1], max_tokens=40))
    del engine
    assert handle.result().finish_reason == "length" and len(handle.result().token_ids) == 40
    begin = time.monotonic()
    while threading.active_count() > before or device() is not None:
        assert time.monotonic() < begin + 20, "the thread or the device is still there"
        time.sleep(0.01)


def test_an_engine_that_nobody_closed_ends_with_its_process(pair):
    """`atexit` calls it: with a thread in XLA the end of the process would be an abort."""
    before, engine = threading.active_count(), engine_of(pair)
    handle = engine.submit(Request(prompt_ids=[1], max_tokens=90))
    next(iter(handle))
    close_all()
    assert handle.result().finish_reason == "cancelled"
    assert threading.active_count() == before
