"""Every text under load is plain decoding's at batch 1, bit for bit.

Requests of all kinds come at random, with others that are cancelled or time out, in a pool of few
pages, so that prefixes are shared, evicted and computed again. Knows token ids only.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jflash.generate import Pair
from jflash.records.decoding import GREEDY, Sampling
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammar
from jflash.serving.request import Request, Result

DRAWN = Sampling(temperature=0.9, top_k=20, top_p=0.95)
CHANGES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {5: 1.5, 9: -100.0}},
)
LOST = 0.3  # of the requests bring one that is not waited for
SAME = (
    "token_ids", "finish_reason", "logprobs", "top_logprobs", "prompt_logprobs",
    "prompt_top_logprobs",
)  # fmt: skip


class Load(NamedTuple):
    """The sizes of the engine under load, and the seed of requests and arrivals."""

    batch: int
    context: int
    pages: int
    chunk: int
    steps: int
    seed: int = 0
    slots_at_once: tuple[int, ...] | None = None  # of the engine


def mixed(count: int, load: Load, vocabulary: int, forms: Sequence[Grammar] = ()) -> list[Request]:
    """Half of them with a common beginning; among them drawn, changed and scored ones, `forms`."""
    rng = random.Random(load.seed)
    ids = lambda n: [rng.randrange(vocabulary) for _ in range(n)]  # noqa: E731
    half = load.context // 2
    shared, requests = ids(half), []
    for i in range(count):
        prompt = shared[: rng.randrange(1, half)] if i % 2 else []
        prompt += ids(rng.randrange(1, half // 3))
        changes = CHANGES[i % len(CHANGES)] if i % 7 == 0 else {}
        scores = {"logprobs": True, "top_logprobs": i % 5} if i % 3 == 0 else {}
        form = forms[i % len(forms)] if forms and i % 4 == 2 else None
        requests.append(
            Request(
                prompt_ids=prompt,
                max_tokens=min(rng.choice([1, 9, 40, half]), load.context - len(prompt)),
                stop_ids=form.stop_ids if form else [3] if i % 4 == 0 else [],
                grammar=form,
                sampling=DRAWN if i % 3 == 0 else GREEDY,
                seed=i,
                priority=rng.randrange(2),
                speculate=i % 5 > 0,
                prompt_logprobs=2 if i % 11 == 0 else None,
                **changes,
                **scores,
            )
        )
    return requests


def alone(pair: Pair, requests: Sequence[Request], load: Load) -> list[Result]:
    """Plain decoding at width 1, one by one, of chunks of another size, without a cached prefix."""
    with Engine(
        pair.plain(), max_batch=1, max_context=load.context, prefill_chunk=2 * load.chunk,
        max_queue=len(requests),
    ) as engine:  # fmt: skip
        return engine.generate(
            replace(request, cache_salt=str(i)) for i, request in enumerate(requests)
        )


def engine_for(pair: Pair, load: Load, requests: int) -> Engine:
    """The engine that is put under load."""
    return Engine(
        pair, max_batch=load.batch, max_context=load.context, pages=load.pages,
        prefill_chunk=load.chunk, steps_per_call=load.steps, max_queue=2 * requests,
        slots_at_once=load.slots_at_once,
    )  # fmt: skip


def through(engine: Engine, requests: Sequence[Request], seed: int, pause: float) -> list[Result]:
    """The results in order; arrivals are up to `pause` seconds apart, and others get lost."""
    rng, handles = random.Random(seed), []
    for request in requests:
        handles.append(engine.submit(request))
        if rng.random() < LOST:
            timeout = rng.choice([None, 0.01, 0.03])
            lost = engine.submit(replace(request, timeout=timeout, priority=rng.randrange(2)))
            if rng.random() < 0.3:
                next(iter(lost), None)  # one that streams already
            time.sleep(pause * rng.random())
            lost.cancel()
    results = [handle.result() for handle in handles]
    while (stats := engine.stats()).running + stats.waiting:  # the lost ones end too
        time.sleep(0.01)
    return results


def differing(got: Sequence[Result], want: Sequence[Result]) -> list[int]:
    """The requests whose text, end or logprobs differ by a bit."""
    return [
        i
        for i, (one, other) in enumerate(zip(got, want, strict=True))
        if any(getattr(one, name) != getattr(other, name) for name in SAME)
    ]


def compared(
    pair: Pair, count: int, load: Load, forms: Sequence[Grammar], pause: float = 0.02
) -> dict[str, Any]:
    """The counts of a run."""
    requests = mixed(count, load, pair.models.target.config.vocab_size, forms)
    begin = time.perf_counter()
    want = alone(pair, requests, load)
    middle = time.perf_counter()
    with engine_for(pair, load, count) as engine:
        got = through(engine, requests, load.seed, pause)
        stats = engine.stats()
    return {
        "requests": count,
        "differ": differing(got, want),
        "drawn": sum(request.sampling != GREEDY for request in requests),
        "with_grammar": sum(request.grammar is not None for request in requests),
        "with_logprobs": sum(request.logprobs for request in requests),
        "tokens": sum(len(result.token_ids) for result in got),
        "ended": stats.ended,
        "preempted": stats.preempted,
        "cached_tokens": stats.cached_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "accepted": stats.accepted,
        "drafted": stats.drafted,
        "pages_lost": stats.pages - stats.pages_available,
        "seconds_alone": round(middle - begin, 1),
        "seconds_under_load": round(time.perf_counter() - middle, 1),
        **load._asdict(),
    }
