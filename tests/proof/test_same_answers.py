"""same-answers: one arithmetic gives plain decoding's answers, and another model's are seen."""

from jflash.decoding import Decoding
from jflash.proof import same_answers
from jflash.proof.same_answers import Way, compared, ways
from tests.support.pairs import one_arithmetic, prompts, random_pair


def test_answers_are_counted_way_by_way(monkeypatch):
    pair, other = one_arithmetic(random_pair()), one_arithmetic(random_pair(seed=5))

    def with_another(*args):
        return ways(*args) | {"another target": Way(other, 2)}

    monkeypatch.setattr(same_answers, "ways", with_another)
    monkeypatch.setattr(same_answers, "GROUP", 2)
    decoding = Decoding(max_new_tokens=12)
    found = list(compared(pair, prompts(3, seed=3, low=4, high=20), 2, decoding))
    assert [result["answers"] for result in found] == [2, 3]
    same = found[-1]["same"]
    assert same.pop("another target") == 0
    assert set(same.values()) == {3} and len(same) == 4, same
