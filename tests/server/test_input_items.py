"""Conversations that clients bring to /v1/responses item by item: the prompt is that of a chat."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from tests.server.test_harmony import harmony_tokenizer
from tests.support.letters import END, letters_tokenizer
from tests.support.reciting import Reciting, client_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TURNS = (  # each in brackets: role, thoughts, text, calls
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.reasoning_content or m.thinking or '' }}"
    ",{{ m.content }}{% for c in m.tool_calls or [] %},{{ c.function.name }}{% endfor %}]"
    "{% endfor %}{# tools #}"
)
ONE_SYSTEM = (  # as Qwen3.5's template
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('it is not at the beginning') }}{% endif %}{% endfor %}"
)
NAMES = ("one", "two")
FLAT: list = [{"type": "function", "name": name, "parameters": {}} for name in NAMES]
THOUGHTS = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SAYS = {"type": "message", "role": "assistant", "content": "so"}
ONE, TWO = ({"type": "function_call", "call_id": x, "name": x} for x in NAMES)
GAVE = {"type": "function_call_output", "call_id": "one", "output": "7"}
ASKS = {"role": "user", "content": "abc"}
REFUSES = {"type": "refusal", "refusal": "no"}  # as another server's answer may come back


@pytest.fixture(scope="module")
def engine() -> Reciting:
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = TURNS
    return Reciting(tokenizer)


@pytest.fixture(scope="module")
def client(engine) -> Iterator[TestClient]:
    with client_of(engine, END) as client:
        yield client


def test_an_answer_that_comes_back_is_one_turn_as_in_a_chat(engine, client):
    """Its thoughts, text and two calls at once, which a chat has in one message."""
    sdk = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client)
    calls = [f'<tool_call>{{"name":"{name}","arguments":{{}}}}</tool_call>' for name in NAMES]
    engine.text = f"<think>hm</think>so{''.join(calls)}<end>"
    answer = sdk.responses.create(model="small", input="abc", tools=FLAT)
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2]
    gave = [GAVE, GAVE | {"output": [{"type": "input_text", "text": "8"}]}]
    engine.text = "a<end>"
    turns: list[Any] = [ASKS, *items, *gave]
    sdk.responses.create(model="small", input=turns, tools=FLAT)
    assert engine.prompt() == "[u:,abc][a:hm,so,one,two][t:,7][t:,8]"
    functions = [{"type": "function", "function": {"name": name}} for name in NAMES]
    turns = [
        ASKS,
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": functions},
        *({"role": "tool", "content": text, "tool_call_id": "x"} for text in "78"),
    ]
    before = engine.prompt()
    assert client.post(CHAT, json={"messages": turns, "tools": functions}).status_code == 200
    assert engine.prompt() == before


@pytest.mark.parametrize(
    ("items", "prompt"),
    [
        ([ASKS, ONE, GAVE, TWO, GAVE], "[u:,abc][a:,,one][t:,7][a:,,two][t:,7]"),
        ([ASKS, THOUGHTS, ONE, THOUGHTS, TWO], "[u:,abc][a:hm,,one][a:hm,,two]"),
        ([ASKS, SAYS, SAYS, ONE], "[u:,abc][a:,so][a:,so,one]"),
        ([THOUGHTS, ASKS, ONE], "[u:,abc][a:,,one]"),
        ([ASKS | {"type": None, "phase": None}, SAYS], "[u:,abc][a:,so]"),
        ([ASKS, {"role": "assistant", "content": [REFUSES]}, ASKS], "[u:,abc][a:,no][u:,abc]"),
        ([ASKS, ONE, GAVE | {"output": [{"x": 1}]}], '[u:,abc][a:,,one][t:,[{"x":1}]]'),
    ],
)
def test_only_items_of_one_answer_are_one_turn(engine, client, items, prompt):
    engine.text = "a<end>"
    assert client.post(RESPONSES, json={"input": items}).status_code == 200
    assert engine.prompt() == prompt


@pytest.mark.parametrize("said", [{"content": None, "refusal": "no"}, {"content": [REFUSES]}])
def test_a_refusal_that_comes_back_is_what_the_assistant_said(engine, client, said):
    engine.text = "a<end>"
    turns = [ASKS, {"role": "assistant"} | said, ASKS]
    assert client.post(CHAT, json={"messages": turns}).status_code == 200
    assert engine.prompt() == "[u:,abc][a:,no][u:,abc]"


def test_a_template_of_channels_gets_each_call_in_a_turn_of_its_own():
    """That of gpt-oss reads the first call of a message, and takes the text beside it for
    thoughts."""
    tokenizer = harmony_tokenizer()
    tokenizer.chat_template = TURNS.replace("tools", "tools <|channel|>")
    engine = Reciting(tokenizer)
    engine.text = "a<end>"
    with client_of(engine, END) as client:
        items = [ASKS, SAYS, THOUGHTS, ONE, TWO]
        assert client.post(RESPONSES, json={"input": items}).status_code == 200
    assert engine.prompt() == "[u:,abc][a:,so][a:hm,,one][a:,,two]"


def test_a_template_of_channels_gets_all_instructions():
    """That of gpt-oss reads the first message of the system, and leaves the next ones out."""
    tokenizer = harmony_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{# <|channel|> #}"
    engine = Reciting(tokenizer)
    engine.text = "a<end>"
    with client_of(engine, END) as client:
        items = [{"role": "developer", "content": "cd"}, ASKS]
        body = {"instructions": "ab", "input": items}
        assert client.post(RESPONSES, json=body).status_code == 200
    assert engine.prompt() == "ab\n\ncd"


def test_a_template_of_one_system_message_gets_those_at_the_beginning_as_one():
    """Instructions and a developer's message, as agents send them. Other templates get each."""
    first, second = {"role": "system", "content": "ab"}, {"role": "developer", "content": "cd"}
    flat = {"instructions": "ab", "input": [second, ASKS]}
    for begins, system in (("", "[s:,ab][s:,cd]"), (ONE_SYSTEM, "[s:,ab\n\ncd]")):
        tokenizer = letters_tokenizer()
        tokenizer.chat_template = begins + TURNS
        engine = Reciting(tokenizer)
        engine.text = "a<end>"
        with client_of(engine, END) as client:
            for route, body in ((RESPONSES, flat), (CHAT, {"messages": [first, second, ASKS]})):
                assert client.post(route, json=body).status_code == 200
                assert engine.prompt() == f"{system}[u:,abc]"
            late = client.post(CHAT, json={"messages": [first, second, ASKS, second]})
            assert late.status_code == (400 if begins else 200)
            assert not begins or late.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image"}]}, "content[0].type"),
        (GAVE | {"output": [{"type": "input_file"}]}, "output[0].type"),
        ({"role": "cat", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        (ONE | {"arguments": "{"}, "arguments"),
        ({"role": 1, "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "input_text", "text": 5}]}, "content[0].text"),
        (ONE | {"name": None}, "name"),
        (THOUGHTS | {"content": [{"type": 1}]}, "content[0].type"),
        (THOUGHTS | {"content": 5}, "content"),
        (GAVE | {"output": [{"type": "input_text", "text": 5}]}, "output[0].text"),
        ({"type": "function_call_output", "call_id": "one"}, "output"),
    ],
)
def test_an_item_that_cannot_be_read_is_named_by_its_own_place(client, item, param):
    """Instructions before it, and a call that makes no turn, do not shift the place."""
    body: dict[str, Any] = {"instructions": "abc", "input": [ASKS, ONE, item, TWO]}
    refused = client.post(RESPONSES, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == f"input[2].{param}" and error["message"].startswith(error["param"])
    assert "`$" not in error["message"]
