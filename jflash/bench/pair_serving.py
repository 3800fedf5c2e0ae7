"""A real pair that answers questions through the engine and over HTTP, and its recording."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jflash.bench.over_http import served, service_of, streamed
from jflash.bench.serving_cases import engine_for, layout_of, warm
from jflash.bench.serving_speed import burst, median_of
from jflash.generate import Pair
from jflash.serving.request import Request

ALONE = 24  # questions at batch 1


class Questions(NamedTuple):
    """Texts, their prompts' ids, and what ends an answer."""

    texts: list[str]
    prompts: list[list[int]]
    stops: tuple[int, ...]
    tokenizer: Any


class Load(NamedTuple):
    batches: Sequence[int]
    new: int  # tokens of an answer at most
    steps: int  # of a call
    repeats: int
    clients: int | None


def answered(pair: Pair, asked: Questions, load: Load) -> Iterator[dict[str, Any]]:
    """A row for each batch, all of whose questions come at once, then one over HTTP."""
    context = max(map(len, asked.prompts)) + load.new
    stops = len(asked.stops)
    layouts = [layout_of(batch, context, load.steps, stops) for batch in load.batches]
    warm([(pair, layout) for layout in layouts])
    for layout in layouts:
        batch = layout.shape.batch
        count = len(asked.prompts) if batch > 1 else ALONE
        turns = iter(range(100))
        row = {"what": "questions", "batch": batch, "steps_per_call": load.steps}
        row["rows"] = pair.models.rows

        def once(count: int = count, turns: Iterator[int] = turns) -> dict[str, Any]:
            salt = str(next(turns))  # so that no repeat finds the prefixes of another
            requests = [
                Request(prompt_ids=ids, max_tokens=load.new, stop_ids=asked.stops, cache_salt=salt)
                for ids in asked.prompts[:count]
            ]
            return burst(engine, requests)

        with engine_for(pair, layout, 2 * len(asked.prompts)) as engine:
            through = median_of(load.repeats, once)
            yield row | through
            if load.clients is not None and batch > 1:
                service = service_of(engine, asked.tokenizer, asked.stops)
                with served(service) as url:
                    warming = [f"{text} Once more." for text in asked.texts[:batch]]
                    streamed(service, url, warming, load.new, load.clients)
                    found = streamed(service, url, asked.texts, load.new, load.clients)
                share = found["tokens_per_second"] / through["tokens_per_second"]
                yield row | {"what": "questions over HTTP"} | found | {"share": share}


def with_rows(pair: Pair, rows: str | None) -> Pair:
    return replace(pair, models=replace(pair.models, rows=rows))
