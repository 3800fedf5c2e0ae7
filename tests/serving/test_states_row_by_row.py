"""The engine and a delta net by a GPU's kernels, interpreted: its state lies anywhere in a text,
and in any slot of a call.

The backends of a CPU keep it at multiples of 16, so nothing else here sees a base that a slot's
next block begins at: of a slot that idles, that was preempted, or that began with a copy.
"""

import functools
from dataclasses import replace

import pytest

from jflash.generate import Pair
from jflash.serving.handle import result_of
from jflash.serving.paging.copies import delta_nets
from jflash.serving.request import Event
from pallas_kernels.gated_delta import triton
from tests.serving.test_states import asked, job_of, loop_of, same, told
from tests.support import pairs
from tests.support.attention_checks import ON_GPU

COMPILED_FULLY = True  # an interpreted kernel's bits hang on how it is compiled
pytestmark = pytest.mark.skipif(ON_GPU, reason="there the kernels are compiled")


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Its heads are as wide as the kernels take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "DELTA", replace(pairs.DELTA, key_dim=16, value_dim=16))
        found = pairs.hybrid_pair()
    kernels = found.models.kernels._replace(delta="triton")
    return replace(found, models=replace(found.models, kernels=kernels))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for name in ("gated_delta", "next_inputs", "finish"):
        monkeypatch.setattr(triton, name, functools.partial(getattr(triton, name), interpret=True))


@pytest.mark.long
def test_texts_beside_others_after_hits_and_after_preemption_are_those_alone(pair):
    [first, other] = pairs.prompts(2, seed=4, low=100, high=120)
    alone, loop = loop_of(pair), loop_of(pair, counts=(1,), ahead=1)
    requests = [asked(first, 40), asked(other, 25, speculate=False), asked([*first, 5, 6], 30)]
    want = [told(alone, replace(each, cache_salt=str(i)))[0][1] for i, each in enumerate(requests)]
    assert all(len(set(text.token_ids)) > 5 for text in want)
    beside = told(loop, *requests)
    later = [told(loop, each)[0] for each in requests]
    assert [cached for cached, _ in later] == [64, 64, 64]
    assert all(same(x, y) for (_, x), y in zip([*beside, *later], [*want, *want], strict=True))
    assert {int(base) % 16 for net in delta_nets(loop.device.state) for base in net.memory.base} - {
        0
    }

    events = list[Event]()
    job = job_of(replace(requests[0], cache_salt="again"))
    loop.waiting.append(job)
    while job.reason is None:
        loop.round(lambda _, some: events.extend(some))
        loop.drain(lambda _, some: events.extend(some))
        if job.reason is None and not job.end:
            loop.preempt(job)
    assert loop.counts.preempted > 3 and same(result_of(job.request, events), want[0])
