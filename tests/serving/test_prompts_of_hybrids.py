"""One program brings the ends of several prompts of a hybrid, whose states lie at their slots."""

import pytest

from jflash.compiled.shape import Shape
from jflash.proof.under_load import DRAWN
from jflash.serving.calls import prefill
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.pass_sizes import Several, several_prompts
from jflash.serving.engine import Engine
from jflash.serving.handle import Result
from jflash.serving.request import Request
from tests.serving import test_prompts_at_once
from tests.serving.test_prompts_at_once import asked
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import hybrid_pair

pytestmark = pytest.mark.skipif(ON_GPU, reason="the law of a CPU's operations")
BATCH, PAGES, STATES = 4, 24, 4
SHAPE = Shape.of(BATCH, 256, 16, 32)


@pytest.fixture(scope="module")
def pair():
    return hybrid_pair()


def at_once(pair, requests: list[Request], pages: int = PAGES) -> tuple[list[Result], list[int]]:
    layout = Layout(SHAPE, pages, 2, states=STATES, prompts=3)
    return test_prompts_at_once.at_once(pair, requests, layout)


def alone(pair, requests: list[Request]) -> list[Result]:
    how = {"max_batch": BATCH, "max_context": 256, "prefill_chunk": 32, "pages": PAGES}
    with Engine(pair, **how, steps_per_call=2, prompts_at_once=1) as engine:
        return [engine.generate([one])[0] for one in requests]


def mixed() -> list[Request]:
    """Short and long prompts, drawn ones among them, and some that begin with another's pages."""
    lengths = (20, 31, 7, 70, 32, 33, 3, 90, 12, 64, 25, 26, 27)
    requests = asked(lengths) + asked(lengths[:3], sampling=DRAWN, seed=3, logprobs=True)
    shared = list(requests[7].prompt_ids[:64])
    return requests + [Request(prompt_ids=[*shared, i], max_tokens=12) for i in range(1, 5)]


def test_no_bit_changes_where_several_are_brought_at_once(pair):
    requests = mixed()
    got, sizes = at_once(pair, requests)
    assert set(sizes) == {1, 3}  # a pass over nothing would change somebody's state
    assert got[-1].cached_tokens == 64  # its state began as a copy
    for mine, own in zip(got, alone(pair, requests), strict=True):
        assert mine.token_ids == own.token_ids and mine.logprobs == own.logprobs


@pytest.mark.long
def test_states_that_are_not_cleared_are_noticed(pair, monkeypatch):
    """Slots are filled again, so that a text would begin with another one's state."""
    requests = asked(tuple(range(20, 32)))
    want, sizes = at_once(pair, requests)
    assert sizes.count(3) > 1
    monkeypatch.setattr(prefill, "cleared", lambda state, slot: state)
    got, _ = at_once(pair, requests, PAGES + 1)  # whose programs are others
    differ = [i for i in range(12) if got[i].token_ids != want[i].token_ids]
    assert differ and min(differ) >= BATCH  # the first ones lie in slots of zeros


def test_as_many_wait_as_the_pass_takes(pair):
    layout = Layout(SHAPE, PAGES, 2, prompts=3)
    assert several_prompts(pair.models, layout) == (Several(3, 32, 3),)
    assert at_once(pair, asked((9, 10)))[1] == [1, 1]
    assert at_once(pair, asked((9, 10, 11, 12)))[1] == [3, 1]
