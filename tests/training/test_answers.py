"""Answers are the target's own, whatever batch a prompt fell in."""

import pytest

from jflash.generate import Pair, generate
from jflash.models.decoder import Target
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding
from jflash.training.answers import answer_prompts
from tests.support.pairs import prompts, random_params, target_config

CONFIG = target_config(num_layers=1)
PAIR = Pair(Models(Target(CONFIG)), Params(random_params(CONFIG, 0)))
STOPS = tuple(range(0, 67, 9))
DECODING = Decoding(max_new_tokens=12, stop_token_ids=STOPS)


def test_answers_are_the_targets_own_in_order():
    asked = prompts(5, low=3, high=40)
    found = answer_prompts(PAIR, asked, DECODING, batch_size=2)
    reasons = set()
    for prompt, answer in zip(asked, found, strict=True):
        alone = generate(PAIR, [prompt] * 2, DECODING)[0]
        assert answer.token_ids == alone.token_ids
        assert answer.finish_reason == alone.finish_reason
        assert (answer.token_ids[-1] in STOPS) == (answer.finish_reason == "stop")
        reasons.add(answer.finish_reason)
    assert "stop" in reasons


def test_unfit_requests_are_refused():
    def ask(prompts, batch_size=2):
        return answer_prompts(PAIR, prompts, Decoding(max_new_tokens=4), batch_size=batch_size)

    with pytest.raises(ValueError, match="token id 67"):
        ask([[1], [67]])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ask([[1]], 0)
    with pytest.raises(ValueError, match="no prompts"):
        ask([])
