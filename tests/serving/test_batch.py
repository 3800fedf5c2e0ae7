"""Jobs through an engine: everybody's own tokens, freed slots filled, nothing compiled anew."""

import random
import time
from dataclasses import replace

import pytest

from jflash.generate import generate
from jflash.records.decoding import GREEDY, Decoding, Sampling
from jflash.serving.batch import Job, layout_for, serve
from jflash.serving.calls.layout import settled
from jflash.serving.thread.loop import Loop
from tests.support.pairs import prompts, random_pair, replay_pair, unit_head

STOPS = [3, 9]


def some_jobs(count: int, seed: int = 0, new: tuple[int, int] = (1, 50)) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(i, prompt, Decoding(max_new_tokens=rng.randrange(*new)))
        for i, prompt in enumerate(prompts(count, seed=seed, high=150))
    ]


def by_itself(pair, job: Job, **how):
    return generate(pair, [job.prompt_ids], job.decoding, first_index=job.index, **how)[0]


def test_everybody_gets_the_tokens_of_generate():
    """Whatever the batch, the order and the steps a call; the oracle the same one by one."""
    pair, jobs = random_pair(), some_jobs(13)
    free = [by_itself(pair, job).token_ids for job in jobs]
    stops = [ids[len(ids) // 2] for ids in free[:3]]
    own = {job.index: by_itself(pair, job, stop_token_ids=stops) for job in jobs}
    assert {g.finish_reason for g in own.values()} == {"stop", "length"}
    assert any(len(g.token_ids) == 1 for g in own.values())
    for batch, steps in ((1, 8), (5, 3)):
        random.Random(batch).shuffle(jobs)
        how = dict(batch_size=batch, steps_per_call=steps, stop_token_ids=stops)
        answers = list(serve(pair, jobs, **how))
        assert sorted(job.index for job, _ in answers) == list(range(len(jobs)))
        for job, answer in answers:
            want = own[job.index]
            assert answer.token_ids == want.token_ids
            assert answer.acceptance_lengths == want.acceptance_lengths
            assert answer.finish_reason == want.finish_reason
            assert answer.prompt_tokens == len(job.prompt_ids)
    for job, answer in serve(
        pair, jobs, batch_size=5, steps_per_call=3, stop_token_ids=stops, oracle=True
    ):
        assert answer.token_ids == own[job.index].token_ids
        assert set(answer.acceptance_lengths) <= {1}


@pytest.mark.long
def test_draws_depend_on_seed_and_index_alone():
    """In a batch with greedy ones, in any order, as `generate` draws them one by one; the engine's
    in test_exact_under_load.py, and a step's in tests/step/test_laws.py."""
    pair, jobs = random_pair(), some_jobs(5, seed=2)
    ways = [Sampling(temperature=1.0), GREEDY, Sampling(temperature=0.7, top_k=9, top_p=0.8)]
    jobs = [
        job._replace(decoding=replace(job.decoding, sampling=ways[job.index % 3])) for job in jobs
    ]
    drawn = replace(pair, models=replace(pair.models, sampled=True))  # one program for all
    for seed in (0, 7):
        own = {j.index: by_itself(drawn, j, seed=seed) for j in jobs}
        for order in (jobs, jobs[::-1]):
            for job, answer in serve(pair, order, batch_size=2, seed=seed):
                assert answer.token_ids == own[job.index].token_ids
    first, other = (
        {j.index: g.token_ids for j, g in serve(pair, jobs, batch_size=2, seed=s)} for s in (7, 8)
    )
    assert [first[i] == other[i] for i in range(5)] == [False, True, False, False, True]


def test_a_free_slot_is_filled_while_the_others_go_on(monkeypatch):
    """One long job beside many short ones takes no more calls than the long one alone, but one
    that was dispatched before its end was known."""
    pair, short = random_pair(), some_jobs(8, new=(5, 9))
    long = Job(99, prompts(1)[0], Decoding(max_new_tokens=150))
    steps = by_itself(pair, long).steps
    loops, made = [], Loop.__init__

    def kept(self, *args):
        loops.append(self)
        made(self, *args)

    monkeypatch.setattr(Loop, "__init__", kept)
    answers = list(serve(pair, [*short, long], batch_size=2, steps_per_call=2))
    assert [job.index for job, _ in answers][-1] == 99
    assert len(answers) == 9
    [loop] = loops
    assert loop.counts.calls <= -(-steps // 2) + 1


def test_nothing_compiles_anew_within_a_capacity(compilations):
    pair = random_pair(intermediate_size=39)  # a shape of its own: no other test compiled it
    list(serve(pair, some_jobs(3), batch_size=2))
    assert compilations, "the listener hears nothing: the test would pass in vain"
    before = len(compilations)
    for seed in (1, 2):
        jobs = some_jobs(9, seed=seed)
        list(serve(pair, jobs, batch_size=2, stop_token_ids=STOPS, seed=seed))
        list(serve(pair, jobs, batch_size=2, oracle=True))
    assert len(compilations) == before


def test_seconds_add_up_to_the_run():
    pair = random_pair()
    list(serve(pair, some_jobs(4), batch_size=2))
    begin = time.perf_counter()
    answers = list(serve(pair, some_jobs(9), batch_size=2))
    wall = time.perf_counter() - begin
    spent = {
        part: sum(getattr(g.seconds, part) for _, g in answers)
        for part in ("compile", "prefill", "decode")
    }
    assert spent["prefill"] > 0 and spent["decode"] > 0
    assert 0.5 * wall < sum(spent.values()) <= wall
    assert spent["compile"] < 0.5 * wall  # the second run found its programs


def test_what_was_answered_is_not_run_and_keeps_the_shapes(monkeypatch):
    """The rest of an interrupted run has the sizes of the whole; long jobs begin first."""
    pair, asked = random_pair(), []
    jobs = [Job(i, [1], Decoding(max_new_tokens=n)) for i, n in enumerate([90] * 3 + [500] * 2)]
    monkeypatch.setattr(
        "jflash.serving.batch._served",
        lambda pair, layout, jobs: iter(asked.append((layout, [j.index for j in jobs])) or ()),
    )
    for answered in ((), [0, 3, 4], range(5)):
        assert list(serve(pair, jobs, batch_size=2, answered=answered)) == []
    layout = layout_for(pair.models, jobs, 2)
    assert layout.shape.capacity == 512 and settled(pair.models, layout).pages == 2 * 8
    assert asked == [(layout, [3, 4, 0, 1, 2]), (layout, [1, 2])]
    assert list(serve(pair, [], batch_size=2)) == []


def test_a_drafter_that_knows_the_text_is_accepted_in_any_slot():
    """Rows of the drafter's context are right after a refill, not only the target's."""
    pair, job = unit_head(random_pair()), Job(5, prompts(1, seed=8)[0], Decoding(max_new_tokens=41))
    text = by_itself(pair, job).token_ids
    knowing = replay_pair(pair, job.prompt_ids + text)
    others = some_jobs(5, new=(3, 20))
    served = serve(knowing, [*others, job], batch_size=2)
    answers = {job.index: answer for job, answer in served}
    assert answers[5].acceptance_lengths == [8] * 5


@pytest.mark.parametrize(
    ("jobs", "how", "named"),
    [
        ([Job(0, [])], {}, "job 0: the prompt is empty"),
        ([Job(7, [1, 67])], {}, "job 7: token id 67"),
        ([Job(3, [1], Decoding(stop_when=len))], {}, "job 3: stop_when is for generate and stream"),
        ([Job(0, [1]), Job(0, [2])], {}, "same index"),
        ([Job(0, [1])], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([Job(0, [1])], {"steps_per_call": 0}, "steps_per_call must be at least 1, got 0"),
        ([Job(0, [1])], {"steps_per_call": 10**11}, "100000000000: a sequence has no more steps"),
        ([Job(0, [1]), Job(-1, [2])], {}, "index -1 must be a whole number within 0 …"),
        ([Job(2**32, [1])], {}, "index 4294967296"),
        ([Job(0, [1])], {"seed": 2**32}, "seed 4294967296"),
        ([Job(0, [1])], {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ([Job(0, [1] * 500)], {"context": 256}, "context 256 is below the 756 tokens"),
    ],
)
def test_bad_jobs_are_refused_at_the_call(jobs, how, named):
    with pytest.raises(ValueError, match=named):
        serve(random_pair(), jobs, **({"batch_size": 2} | how))
