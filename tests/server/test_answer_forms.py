"""Forms of answers, as the routes compile them: the texts they take, and what is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from jflash.serving.grammar import Grammar
from tests.support.letters import END, letters_tokenizer
from tests.support.reciting import Reciting, client_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def engine() -> Reciting:
    return Reciting(letters_tokenizer())


@pytest.fixture(scope="module")
def client(engine) -> Iterator[TestClient]:
    with client_of(engine, END) as client:
        yield client


@pytest.fixture
def grammar(engine, client):
    """The grammar of the answer to a request with these fields."""

    def of(**how: Any) -> Grammar:
        engine.text = "</think>a<end>"
        answer = client.post(CHAT, json={"messages": MESSAGES} | how)
        assert answer.status_code == 200, answer.text
        grammar = engine.asked[-1].grammar
        assert grammar is not None
        return grammar

    return of


def takes(grammar: Grammar, text: str) -> bool:
    """Whether the whole text has the form; marks in it are the tokens of their names."""
    tokenizer: Any = letters_tokenizer()
    ids = tokenizer.encode(text)
    matcher = grammar.start.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{arguments}}}\n</tool_call>'


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TREE = {
    "type": "object", "required": ["v"], "additionalProperties": False,
    "properties": {
        "v": {"$ref": "#/$defs/V"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "default": {"$ref": "#/$defs/W/items"},
    },
    "$defs": {"V": {"$ref": "#/$defs/W"}, "W": {"type": "array", "items": {"type": "boolean"}}},
}  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "two"}}])
def test_the_pointers_of_a_tools_schema_lead_to_itself(grammar, choice):
    """Among others it lies deeper than where it came from."""
    own = {"$id": "http://schemas.example/one"} | TREE
    tools = [tool("one", own), tool("two", TREE)]
    form = grammar(tools=tools, tool_choice=choice)
    for name in ("one", "two") if choice == "required" else ("two",):
        assert takes(form, called(name, '{"v":[true],"next":{"v":[]}}'))
        assert takes(form, called(name, '{"v":[],"next":null,"default":true}'))
        assert not takes(form, called(name, '{"v":[1]}'))
        assert not takes(form, called(name, '{"v":[],"next":{"v":[1]}}'))


LEAF = {"properties": {"v": {"type": "boolean"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "parameters",
    [
        LEAF,
        LEAF | {"type": ["object", "null"]},
        {"$ref": "#/$defs/L", "$defs": {"L": LEAF}},
        {"anyOf": [LEAF, {"type": "null"}]},
        {"allOf": [LEAF]},
    ],
    ids=["open", "or null", "elsewhere", "any", "all"],
)
def test_the_arguments_of_a_forced_call_are_an_object(grammar, parameters):
    """Whatever else a tool's schema leaves open: only an object makes a call."""
    form = grammar(tools=[tool("one", parameters)], tool_choice="required")
    assert takes(form, called("one", '{"v":true}')) and takes(form, called("one", "{}"))
    for other in ("7", "null", '"v"', "[]", '{"v":1}'):
        assert not takes(form, called("one", other)), other


def test_parameters_that_are_no_schema_are_refused(client):
    for wrong in ([1], "object", True):
        body = {"messages": MESSAGES, "tools": [tool("one", wrong)]}
        refused = client.post(CHAT, json=body)
        assert refused.status_code == 400, wrong
        assert refused.json()["error"]["param"] == "tools[0].function.parameters"


def test_the_schema_true_is_any_json_and_false_is_none(client, grammar):
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}
    for how in ({"guided_json": True}, {"guided_json": "true"}, {"response_format": named}):
        form = grammar(**how)
        assert takes(form, '{"a":[1]}') and takes(form, "7") and not takes(form, "}")
    refused = client.post(CHAT, json={"messages": MESSAGES, "guided_json": False})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "guided_json"
    assert "false allows no text" in error["message"]


FLAG = {"type": "object", "required": ["v"], **LEAF}
TEXT = {"type": "json_schema", "json_schema": {"name": "x", "schema": FLAG}}


def test_the_form_of_the_text_leaves_calls_to_the_model(client, grammar):
    """On both routes, as frameworks ask for each turn of an agent that ends with a form."""
    tools = [tool("one", LEAF), tool("two", {})]
    one, two = called("one", '{"v":1,"w":[]}'), called("two", "{}")
    form = grammar(tools=tools, response_format=TEXT)
    for text in ('{"v":true}', one, two, f"{one}\n{two}"):
        assert takes(form, text), text
    for text in ('{"v":1}', "{}", "so", called("three", "{}"), f'{one}\n{{"v":true}}'):
        assert not takes(form, text), text
    single = grammar(tools=tools, response_format=TEXT, parallel_tool_calls=False)
    assert takes(single, one) and not takes(single, f"{one}\n{two}")
    must = grammar(tools=tools, response_format=TEXT, tool_choice="required")
    assert takes(must, two) and not takes(must, '{"v":true}')
    for how in ({"tool_choice": "none", "response_format": TEXT}, {"guided_json": FLAG}):
        form = grammar(tools=tools, **how)
        assert takes(form, '{"v":true}') and not takes(form, two)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "q"}}}
    body = {"messages": MESSAGES, "tools": tools, "response_format": wrong}
    error = client.post(CHAT, json=body).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"


def test_a_form_of_the_text_beside_calls_that_are_items(client, engine):
    engine.text = f"</think>{called('two', '{}')}<end>"
    flat = [{"type": "function", "name": "two", "parameters": {}}]
    body = {
        "input": "abc",
        "tools": flat,
        "text": {"format": {"type": "json_schema"} | TEXT["json_schema"]},
    }
    [item] = client.post("/v1/responses", json=body).json()["output"]
    assert item["type"] == "function_call"
    assert takes(engine.asked[-1].grammar, called("two", "{}"))
    assert takes(engine.asked[-1].grammar, '{"v":false}')
