"""Values that no request may have, which the error names in one short line."""

import gzip

import pytest

from jflash.serving.request import BIASED
from tests.server.test_bounds_of_a_request import TEXT, error_of
from tests.support.letters import END, letters_tokenizer
from tests.support.reciting import Reciting, client_of


@pytest.fixture(scope="module")
def client():
    return client_of(Reciting(letters_tokenizer()), END)


def test_too_many_biases_are_refused_before_any_is_read(client):
    bias = {f"x{i}": 1 for i in range(BIASED + 1)}  # none of these names is a token's
    error = error_of(client.post(TEXT, json={"prompt": "ab", "logit_bias": bias}))
    assert error["param"] == "logit_bias" and f"at most {BIASED}" in error["message"]


@pytest.mark.parametrize("name", [" 5", "0_5", "+5", "05", "-5", "５", "5.0", "x", "", "9" * 5000])
def test_a_bias_is_of_a_number_with_one_name(client, name):
    """Of two names of a token one would be lost."""
    bias = {"5": 1, name: 2}
    error = error_of(client.post(TEXT, json={"prompt": "ab", "logit_bias": bias}))
    assert error["param"] == "logit_bias" and len(error["message"]) < 120
    assert f"the name {name[:30]!r}"[:-1] in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n", "best_of", "top_k"])
@pytest.mark.parametrize("value", [2**63, 10**4000], ids=["2**63", "10**4000"])
def test_no_error_repeats_thousands_of_digits(client, name, value):
    error = error_of(client.post(TEXT, content=f'{{"prompt": "ab", "{name}": {value}}}'))
    assert error["param"] == name and len(error["message"]) < 80


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n"])
def test_as_many_as_a_clients_language_has_are_too_many_here(client, name):
    error = error_of(client.post(TEXT, json={"prompt": "ab", name: 2**63 - 1}))
    assert error["code"] != "invalid_type" and str(2**63 - 1) in error["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br, gzip"])
def test_a_compressed_body_is_refused_by_its_coding(client, coding):
    body = gzip.compress(b'{"prompt": "ab"}')
    headers = {"Content-Encoding": coding}
    error = error_of(client.post(TEXT, content=body, headers=headers), 415)
    assert error["code"] == "unsupported_encoding" and coding in error["message"]
    headers = {"Content-Encoding": "identity"}
    asked = {"prompt": "ab", "model": "none"}
    assert error_of(client.post(TEXT, json=asked, headers=headers), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("route", "field", "value", "why"),
    [
        ("completions", "max_completion_tokens", 9, "give max_tokens"),
        ("completions", "max_output_tokens", 9, "give max_tokens"),
        ("chat/completions", "max_output_tokens", 9, "give max_completion_tokens"),
        ("responses", "max_tokens", 9, "give max_output_tokens"),
        ("responses", "max_completion_tokens", 9, "give max_output_tokens"),
        ("responses", "messages", ["ab"], "give input"),
        ("responses", "response_format", {"type": "json_object"}, "give text.format"),
        ("responses", "reasoning_effort", "low", "give reasoning.effort"),
        ("responses", "stop", ["a"], "no stop texts"),
    ],
)
def test_a_field_of_another_route_would_be_lost(client, route, field, value, why):
    names = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}
    turns = [{"role": "user", "content": "ab"}]
    asked = {names[route]: "ab" if route == "completions" else turns, field: value}
    error = error_of(client.post(f"/v1/{route}", json=asked))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert why in error["message"]


def test_what_changes_nothing_may_have_any_name(client):
    asked = {"input": "ab", "max_tokens": None, "stop": [], "model": "none"}
    assert error_of(client.post("/v1/responses", json=asked), 404)["param"] == "model"
