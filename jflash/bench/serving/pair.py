"""A real pair that answers questions through the engine and over HTTP, and its recording."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jflash.bench.serving.cases import engine_for, pair_layout, warm
from jflash.bench.serving.over_http import served, settings_of, streamed
from jflash.bench.serving.speed import burst, median_of
from jflash.generate import Pair
from jflash.serving.engine import Engine
from jflash.serving.request import Request

ALONE = 24  # questions at batch 1
WARMING = 32  # tokens of the answers before the clock begins


class Questions(NamedTuple):
    """Texts, their prompts' ids, and what ends an answer."""

    texts: list[str]
    prompts: list[list[int]]
    stops: tuple[int, ...]
    tokenizer: Any


class Load(NamedTuple):
    """The sizes; the first number of steps is every batch's, the others only the largest one's."""

    batches: Sequence[int]
    new: int  # tokens of an answer at most
    steps: Sequence[int]  # of a call
    repeats: int
    clients: int | None


def answered(
    pair: Pair, asked: Questions, load: Load, wait: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Rows for each batch, the largest first; all are compiled before `wait`, timed after it."""
    context = max(map(len, asked.prompts)) + load.new
    first, *others = load.steps
    largest, *smaller = sorted(load.batches, reverse=True)
    sizes = [(largest, first), *((largest, n) for n in others), *((n, first) for n in smaller)]
    stops = len(asked.stops)
    layouts = [pair_layout(pair.models, batch, context, steps, stops) for batch, steps in sizes]
    warm([(pair, layout) for layout in layouts])
    wait()
    for (batch, steps), layout in zip(sizes, layouts, strict=True):
        row = {"batch": batch, "rows": pair.models.rows, "steps_per_call": steps}
        with engine_for(pair, layout, 2 * len(asked.prompts)) as engine:
            through = of_engine(engine, asked, load, batch)
            yield {"what": "questions"} | row | through
            if load.clients is not None and (batch, steps) == sizes[0]:
                found = over_http(engine, asked, load, load.clients)
                share = found["tokens_per_second"] / through["tokens_per_second"]
                yield {"what": "questions over HTTP"} | row | found | {"share": share}


def of_engine(engine: Engine, asked: Questions, load: Load, batch: int) -> dict[str, Any]:
    """All questions come at once."""
    prompts = asked.prompts if batch > 1 else asked.prompts[:ALONE]
    turns = itertools.count()

    def once(prompts: Sequence[list[int]], new: int) -> dict[str, Any]:
        salt = str(next(turns))  # so that no repeat finds the prefixes of another
        return burst(
            engine,
            [
                Request(prompt_ids=ids, max_tokens=new, stop_ids=asked.stops, cache_salt=salt)
                for ids in prompts
            ],
            batch,
        )

    once(prompts[:batch], WARMING)
    return median_of(load.repeats, lambda: once(prompts, load.new))


def over_http(engine: Engine, asked: Questions, load: Load, clients: int) -> dict[str, Any]:
    """So many clients, each of which asks its next question when it has an answer."""
    settings, turns = settings_of(engine, asked.tokenizer, asked.stops), itertools.count()
    with served(engine, settings) as url:

        def once(texts: Sequence[str], new: int) -> dict[str, Any]:
            return streamed(engine, url, texts, new, clients, salt=f"http {next(turns)}")

        once(asked.texts[:clients], WARMING)
        return median_of(load.repeats, lambda: once(asked.texts, load.new))


def with_rows(pair: Pair, rows: str | None) -> Pair:
    return replace(pair, models=replace(pair.models, rows=rows))
