"""gpt-oss's channels: at any cut of the text, and by the routes, whose engine recites."""

import json
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from jflash.io.harmony import answer_text
from jflash.io.text import decode
from jflash.server.harmony import Channels
from jflash.serving.grammar import Opening
from tests.server.test_streamed_text import cuts, flags, joined
from tests.support.letters import TEMPLATE, letters_tokenizer
from tests.support.reciting import Reciting, client_of

THOUGHT = "<|channel|>analysis<|message|>so it is<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>yes<|return|>"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{%s}<|call|>"
OTHER = " to=functions.then<|channel|>commentary json<|message|>{}<|call|>"
SAYS = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
NONE = "<|channel|>commentary to=functions.now<|message|>{no"
HALF = '<|channel|>commentary to=functions.now<|message|> {"a": "'
CHAT = "/v1/chat/completions"


ANSWERS = [
    (THOUGHT + FINAL, "so it is", "yes", []),
    (THOUGHT + CALL % '"a": [1]', "so it is", "", [("now", '{"a": [1]}', True)]),
    (OTHER + "<|start|>assistant" + CALL % "", "", "", [("then", "{}", True), ("now", "{}", True)]),
    (SAYS + NONE, "", "I look.", []),
    (SAYS + HALF, "", "I look.", [("now", '{"a": "', False)]),
    (NONE[:-3] + " <|call|>", "", "", [("now", "{}", True)]),
    ("<|channel|>analysis<|message|>cut <|e", "cut <|e", "", []),
    ("<|channel|>fin", "", "", []),
    ("<|channel|>final<|message|>yes<|endoftext|>", "", "yes", []),
    # A message without a text ends too.
    ("<|channel|>analysis<|end|><|start|>assistant" + FINAL, "", "yes", []),
]  # reasoning, content, calls


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = letters_tokenizer()
    marks = ["channel", "message", "end", "start", "call", "return", "constrain", "endoftext"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{mark}|>" for mark in marks]})
    tokenizer.add_tokens(["analysis", "final", " to=functions."])
    tokenizer.chat_template = (
        "{{ 'a' if reasoning_effort == 'high' else 'b' }}{% for m in messages %}{{ m.content }}"
        "{{ m.thinking or '' }}{% endfor %}<|start|>assistant{# <|channel|> tools #}"
    )
    return tokenizer


@pytest.mark.parametrize(("whole", "reasoning", "content", "calls"), ANSWERS)
def test_a_whole_answer_is_its_text_without_thoughts_and_calls(whole, reasoning, content, calls):
    tokenizer = harmony_tokenizer()
    ids = tokenizer(whole)["input_ids"]
    assert answer_text(tokenizer, ids) == content
    tokenizer.chat_template = TEMPLATE  # of answers without channels
    assert answer_text(tokenizer, ids) == decode(tokenizer, ids) != content


@pytest.mark.parametrize(("whole", "reasoning", "content", "calls"), ANSWERS)
def test_channels_at_any_cut(whole, reasoning, content, calls):
    for pieces in cuts(whole):
        reader = Channels()
        parts = [reader.push(piece, last) for piece, last in flags(pieces)]
        assert "".join(part.reasoning for part in parts) == reasoning
        assert "".join(part.content for part in parts) == content
        assert joined(call for part in parts for call in part.calls) == calls
        assert reader.called == bool(calls)
    one = Channels(most=1).push(OTHER + CALL % "", True)
    assert joined(one.calls) == [("then", "{}", True)]


def test_the_routes_give_thoughts_text_and_calls_apart():
    tokenizer = harmony_tokenizer()
    engine = Reciting(tokenizer)
    client, asked = client_of(engine, 64), engine.asked
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}

    def post(route: str, **how: Any) -> httpx.Response:
        return client.post(route, json=body | how)

    engine.text = THOUGHT.replace(" ", "") + FINAL
    whole = post(CHAT, reasoning_effort="high").json()
    message = whole["choices"][0]["message"]
    assert message["content"] == "yes" and message["reasoning_content"] == "soitis"
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 1 + 1 + len("soitis") + 1  # name, two marks, letters
    assert tokenizer.decode(asked[-1].prompt_ids).startswith("ax<|start|>")
    [thought, text] = client.post("/v1/responses", json={"input": "x"}).json()["output"]
    assert thought["content"][0]["text"] == "soitis" and text["content"][0]["text"] == "yes"
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    engine.text = THOUGHT.replace(" ", "") + (CALL % '"a":1')
    lines = post(CHAT, tools=[tool], stream=True).text.splitlines()
    deltas = [json.loads(x[6:])["choices"][0] for x in lines if "delta" in x]
    assert "".join(one["delta"].get("reasoning_content", "") for one in deltas) == "soitis"
    calls = [call for one in deltas for call in one["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "now", "arguments": ""} and len(calls) > 2
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a":1}'
    assert deltas[-1]["finish_reason"] == "tool_calls"
    post(CHAT, guided_regex="[0-9]")
    ids = tokenizer.convert_tokens_to_ids(["<|message|>", "<|channel|>", "final"])
    assert asked[-1].grammar.opens == Opening(ids[0], after=tuple(ids[1:]))
    for how, param in (
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"tools": [tool], "tool_choice": "required"}, "tool_choice"),
    ):
        refused = post(CHAT, **how)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
