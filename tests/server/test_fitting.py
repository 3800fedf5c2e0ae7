"""A prompt that cannot fit is refused before all of it is tokenised."""

from typing import Any

import pytest

from jflash.server import service as services
from jflash.server.fitting import PIECE, Beyond, fitting_ids
from tests.support.letters import END, letters_tokenizer
from tests.support.reciting import Reciting, client_of

MOST = 100  # tokens of a context


class Counting:
    """A tokenizer whose tokens have so many characters each; how many it was given."""

    def __init__(self, each: int) -> None:
        self.each, self.given = each, 0

    def __call__(self, text: str) -> list[int]:
        self.given += len(text)
        return [1] * -(-len(text) // self.each)


@pytest.mark.parametrize(("longest", "given"), [(1000, 0), (10**6, PIECE)])
def test_not_more_is_tokenised_than_shows_that_a_text_is_too_long(longest, given):
    tokens = Counting(each=4)
    with pytest.raises(Beyond, match="1000000 characters pass the context of 100 tokens"):
        fitting_ids(tokens, longest, "x" * 10**6, MOST)
    assert tokens.given == given


@pytest.mark.parametrize("each", [4, 5000])
def test_what_fits_has_all_its_ids(each):
    """Tokens of white space may be long."""
    text = "x" * (each * MOST)
    assert fitting_ids(Counting(each), 5000, text, MOST) == [1] * MOST


@pytest.mark.parametrize(
    ("route", "name"), [("completions", "prompt"), ("chat/completions", "messages"),
                        ("responses", "input")],
)  # fmt: skip
def test_a_prompt_of_more_letters_than_the_context_holds(monkeypatch, route, name):
    engine = Reciting(letters_tokenizer())
    client, text = client_of(engine, END), "a" * 8000

    def read(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("the prompt was tokenised")

    monkeypatch.setattr(services, "token_ids", read)
    given: Any = [{"role": "user", "content": text}] if name == "messages" else text
    answered = client.post(f"/v1/{route}", json={name: given})
    assert answered.status_code == 400, answered.text
    error = answered.json()["error"]
    assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert "pass the context of 200 tokens" in error["message"]


@pytest.mark.parametrize("count", [200, 201])
def test_a_prompt_that_fills_the_context_is_scored(count):
    engine = Reciting(letters_tokenizer())
    engine.text = "a"
    asked = {"prompt": [30] * count, "max_tokens": 0, "echo": True}
    answered = client_of(engine, END).post("/v1/completions", json=asked)
    assert (answered.status_code == 200) == (count == 200), answered.text


def test_too_many_ids_are_counted_before_they_are_looked_at():
    client = client_of(Reciting(letters_tokenizer()), END)
    answered = client.post("/v1/completions", json={"prompt": [9999] * 1000})
    error = answered.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
