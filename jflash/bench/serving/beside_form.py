"""What texts lose in time beside one in a form: each of its steps waits for masks of the host."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jflash.bench.serving.cases import engine_for, pair_layout, warm
from jflash.bench.serving.pair import Questions
from jflash.bench.serving.speed import figures, median_of
from jflash.generate import Pair
from jflash.serving.calls.constrained import compile_constrained
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammar, Grammars
from jflash.serving.request import Request


def beside_form(
    pair: Pair,
    asked: Questions,
    batches: Sequence[int],
    new: int,
    steps: int,
    repeats: int,
    wait: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """A row for each batch: B - 1 texts of `new` tokens beside one by a JSON schema, and beside one
    more of their kind. All programs are compiled before `wait`.

    ValueError if the text in a form ended before its neighbours.
    """
    most = outlasting(pair, new)
    context = max(map(len, asked.prompts)) + most
    stops = len(asked.stops)
    layouts = [pair_layout(pair.models, batch, context, steps, stops) for batch in batches]
    warm([(pair, layout) for layout in layouts])
    for layout in layouts:
        compile_constrained(pair.models, pair.params, layout)
    wait()
    grammars = Grammars(asked.tokenizer, pair.models.target.config.vocab_size, asked.stops)
    form = grammars.compile("json_schema", _list_of(most))
    for batch, layout in zip(batches, layouts, strict=True):
        with engine_for(pair, layout, batch) as engine:
            found = _measured(engine, asked, form, most, new, repeats, batch)
        row = {"what": "beside a form", "batch": batch, "rows": pair.models.rows}
        yield row | {"steps_per_call": steps, "neighbours": batch - 1} | found


def outlasting(pair: Pair, new: int) -> int:
    """Tokens that a text cannot have before its neighbours have `new`, whatever either accepts.

    A text of numbers may accept whole blocks while its neighbours accept nothing, and it begins
    before they do: so there are `new` tokens more.
    """
    return (1 + pair.models.block_size) * new


def _list_of(count: int) -> str:
    """A schema of so many numbers: a text by it has at least as many tokens."""
    return json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": count})


def _measured(
    engine: Engine, asked: Questions, form: Grammar, most: int, new: int, repeats: int, batch: int
) -> dict[str, Any]:
    texts, turns = list[list[tuple[int, ...]]](), itertools.count()
    first, *others = asked.prompts[:batch]

    def once(grammar: Grammar | None, new: int) -> dict[str, Any]:
        salt = str(next(turns))  # so that no turn finds the prefixes of another
        last: dict[str, Any] = {"max_tokens": new}
        if grammar is not None:
            last = {"max_tokens": most, "grammar": grammar, "stop_ids": asked.stops}
        before, begin = engine.stats(), time.perf_counter()
        one = engine.submit(Request(prompt_ids=first, cache_salt=salt, **last))
        results = engine.generate(
            Request(prompt_ids=ids, max_tokens=new, cache_salt=salt) for ids in others
        )
        seconds, after, early = time.perf_counter() - begin, engine.stats(), one.ended
        one.cancel()
        why = one.result().finish_reason
        if grammar is not None and early:
            raise ValueError(f"the text in a form ended before its neighbours: {why}")
        texts.append([tuple(result.token_ids) for result in results])
        tokens = sum(len(result.token_ids) for result in results)
        return figures(before, after, seconds) | {
            "new_tokens": tokens, "tokens_per_second": tokens / seconds,
        }  # fmt: skip

    for grammar in (form, None):
        once(grammar, min(new, 2 * engine.pair.models.block_size))  # warms up
    texts.clear()
    beside = median_of(repeats, lambda: once(form, new))
    plain = median_of(repeats, lambda: once(None, new))
    return beside | {
        "beside_plain": plain,
        "kept": beside["tokens_per_second"] / plain["tokens_per_second"],
        "differ": sum(a != b for a, b in zip(texts[0], texts[-1], strict=True)),
    }
