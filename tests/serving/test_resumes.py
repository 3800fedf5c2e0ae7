"""A text that gives its slot back after each step, or that fills the model's last position."""

from dataclasses import replace
from typing import Any

import pytest

from jflash.compiled.shape import Shape
from jflash.generate import Pair, generate
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.records.decoding import Sampling
from jflash.serving.calls.layout import Layout
from jflash.serving.engine import Engine
from jflash.serving.handle import Handle, result_of
from jflash.serving.request import Event, Request, Result
from jflash.serving.thread.job import Job
from jflash.serving.thread.loop import Loop
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import (
    drafter_config,
    knowing,
    one_arithmetic,
    prompts,
    random_pair,
    target_config,
)

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
[PROMPT] = prompts(1, seed=19, low=70, high=71)
DRAWN = Sampling(temperature=0.8, top_k=30, top_p=0.95)
EVERY = Request(
    prompt_ids=PROMPT, max_tokens=60, seed=3, stop_ids=range(16), min_tokens=30, logprobs=True,
    top_logprobs=3, logit_bias={5: 1.5, 40: 2.0}, repetition_penalty=1.2, frequency_penalty=0.3,
    presence_penalty=0.2,
)  # fmt: skip
POSITIONS = 150  # no whole pages, chunks or blocks


@pytest.fixture(scope="module")
def loop() -> Loop:
    """One step a call, with a drafter that is now and then right."""
    pair = one_arithmetic(random_pair(num_layers=2))
    assert pair.models.draft_rule == "sampled"
    layout = Layout(Shape.of(2, 192, 16, 32), 6, 1, ("drawn",))
    return Loop(pair.models, pair.params, layout, b"")


def told(loop: Loop, request: Request, *, preempts: bool) -> Result:
    handle, tokens = Handle(request, lambda _: None), list(request.prompt_ids)
    job = Job(handle=handle, order=(0, 0), seed=request.seed or 0, deadline=None, tokens=tokens)
    events, give = list[Event](), lambda _, some: events.extend(some)
    loop.waiting.append(job)
    while job.reason is None:
        loop.round(give)
        loop.drain(give)
        if preempts and job.reason is None and job.begun:
            loop.preempt(job)
            if loop.counts.preempted % 2:  # by turns all of it is computed again
                loop.holdings.pages.forget_all()
    return result_of(request, events)


@pytest.mark.parametrize(
    "how",
    [{}, {"sampling": DRAWN}, {"sampling": DRAWN, "draft_rule": "sampled"}],
    ids=["greedy", "drawn", "drawn drafts"],
)
def test_preempted_after_every_step(loop, how):
    """Tokens, acceptance lengths, logprobs, penalties, the least length and the usage."""
    request = replace(EVERY, **how)
    loop.holdings.forget_all()  # what an earlier case left
    want = told(loop, replace(request, cache_salt="alone"), preempts=False)
    before = loop.counts.preempted
    got = told(loop, request, preempts=True)
    assert got == want
    assert loop.counts.preempted - before == len(want.acceptance_lengths) - 1
    assert want.finish_reason == "stop" and 30 < len(want.token_ids) < 60
    assert len(set(want.acceptance_lengths)) > 1


def test_a_text_up_to_the_models_last_position():
    """The last block has drafts for places that the model lacks; a token more is refused."""
    pair = one_arithmetic(random_pair())
    [want] = generate(pair, [PROMPT], max_new_tokens=80, capacity=256)
    configs = (make(max_position_embeddings=POSITIONS) for make in (target_config, drafter_config))
    target, drafter = configs
    models = replace(pair.models, target=Target(target), drafter=Drafter(drafter))
    short = knowing(Pair(models, pair.params), PROMPT, want.token_ids)
    how: dict[str, Any] = dict(max_batch=2, prefill_chunk=32, kinds=("greedy",))
    with Engine(short, **how) as engine:
        assert engine.max_context == POSITIONS
        request = Request(prompt_ids=PROMPT, max_tokens=80)
        text = [*PROMPT, *want.token_ids]
        again = Request(prompt_ids=text[: POSITIONS - 1], max_tokens=1)
        first, hit, last = engine.generate([request, request, again])
        assert first.token_ids == hit.token_ids == want.token_ids
        assert last.token_ids == text[-1:]
        assert sum(first.acceptance_lengths) == 79 and max(first.acceptance_lengths) > 4
        for one in (request, again):
            with pytest.raises(ValueError, match=r"150 (positions|tokens)"):
                engine.submit(replace(one, max_tokens=one.max_tokens + 1))
    with pytest.raises(ValueError, match="max_context 151 passes the model's 150 positions"):
        Engine(short, **how, max_context=POSITIONS + 1)
