"""What the routes make of an answer, of a choice among tools and of a client that reads slowly, by
an engine that recites."""

import asyncio
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from starlette.testclient import TestClient

from jflash.compiled.shape import Shape
from jflash.server import protocol
from jflash.server.app import make_app
from jflash.server.metrics import Metrics, Times
from jflash.server.run import listen, server_of
from jflash.serving.calls.layout import Layout
from jflash.serving.grammar import Opening
from jflash.serving.handle import Handle
from jflash.serving.limits import check
from jflash.serving.request import Request
from tests.support.letters import END, END_OF_THOUGHTS, letters_tokenizer
from tests.support.pairs import random_pair
from tests.support.reciting import (
    MOST_WAITING,
    QUEUED,
    SLOTS,
    Reciting,
    client_of,
    service_of,
)

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES: list = [{"role": "user", "content": "abc"}]
FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in ("one", "two")]
TOOLS: list = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT: list = [{"type": "function"} | function for function in FUNCTIONS]
CALL = '<tool_call>\n{"name": "two", "arguments": {"x": "a"}}\n</tool_call>'
TWO = {"type": "function", "function": {"name": "two"}}
# vLLM's figures that its dashboard and `vllm bench serve` read.
READ = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total
generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total
prefix_cache_hits_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_params_max_tokens_bucket
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_inference_time_seconds_sum spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
iteration_tokens_total_bucket iteration_tokens_total_sum
"""


@pytest.fixture(scope="module")
def engine() -> Reciting:
    return Reciting(letters_tokenizer())


@pytest.fixture(scope="module")
def client(engine) -> Iterator[TestClient]:
    with client_of(engine, END) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(client) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client)


def test_a_chats_tokens_are_those_of_its_prompt(engine, client):
    """With the tools, which its template shows; what would make another prompt is refused."""
    engine.text = "a<end>"
    body = {"messages": MESSAGES, "tools": TOOLS}
    assert client.post(CHAT, json=body).status_code == 200
    told = client.post("/tokenize", json=body).json()
    assert told["tokens"] == [*engine.asked[-1].prompt_ids] and told["count"] == len("abconetwo.")
    for name, value in (("add_generation_prompt", False), ("chat_template", "x")):
        refused = client.post("/tokenize", json=body | {name: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def some(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [TWO]}}


@pytest.mark.parametrize(
    ("choice", "shown", "must"),
    [
        (None, "onetwo", []),
        ("none", "", []),
        ("auto", "onetwo", []),
        ("required", "onetwo", ["one", "two"]),
        (TWO, "onetwo", ["two"]),
        (some("auto"), "two", []),
        (some("required"), "two", ["two"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_choice_among_tools_on_both_routes(engine, sdk, choice, shown, must):
    """What the prompt shows, what the grammar forces, and the call, whole and streamed."""
    engine.text = f"</think>{CALL}<end>"

    def checked() -> None:
        assert engine.prompt() == f"abc{shown}<think>"
        grammar = engine.asked[-1].grammar
        found = re.findall(r'"const":"(\w+)"', grammar.text) if grammar else []
        assert found == must

    extra: dict[str, Any] = {} if choice is None else {"tool_choice": choice}
    extra = {"model": "small"} | extra
    whole = sdk.chat.completions.create(messages=MESSAGES, tools=TOOLS, **extra).choices[0]
    checked()
    chunks = list(sdk.chat.completions.create(messages=MESSAGES, tools=TOOLS, stream=True, **extra))
    checked()
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    text = "".join(delta.content or "" for delta in deltas)
    ends = whole.finish_reason, chunks[-1].choices[0].finish_reason
    if choice == "none":
        assert whole.message.content == text == CALL and not calls
        assert ends == ("stop", "stop") and not whole.message.tool_calls
    else:
        assert ends == ("tool_calls", "tool_calls") and not text.strip()
        assert {call.index for call in calls} == {0}
        first, *more = [call.function for call in calls]
        assert (first.name, first.arguments) == ("two", "")
        assert "".join(call.arguments for call in more) == '{"x": "a"}' and len(more) > 5
        [call] = whole.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("two", '{"x": "a"}')

    if isinstance(choice, dict):  # this route has what a type holds one level higher
        inner = choice[choice["type"]]
        extra["tool_choice"] = {"type": choice["type"]} | inner
        if "tools" in inner:
            extra["tool_choice"]["tools"] = [{"type": "function", "name": "two"}]
    got = sdk.responses.create(input="abc", tools=FLAT, **extra)
    checked()
    events = list(sdk.responses.create(input="abc", tools=FLAT, stream=True, **extra))
    checked()
    [item] = got.output
    assert events[-1].response.output[0].type == item.type
    if choice == "none":
        assert got.output_text == CALL
    else:
        assert (item.type, item.name, item.arguments) == ("function_call", "two", '{"x": "a"}')
        [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert done.arguments == item.arguments


OTHER = '<tool_call>{"name": "one", "arguments": {"a": [{}, "b c"]}}</tool_call>'
LATE = '<tool_call>{"arguments": {"d":  1}, "name": "one"}</tool_call>'
X, A, D = ("two", '{"x": "a"}'), ("one", '{"a": [{}, "b c"]}'), ("one", '{"d":  1}')


@pytest.mark.parametrize(
    ("text", "finish", "said", "calls"),
    [
        (f"so{CALL}and {OTHER}{LATE}{CALL}so<end>", "stop", "soand so", [X, A, D, X]),
        (f"\n{CALL}\n{CALL}\n<end>", "stop", "", [X, X]),
        (f"{OTHER}<tool_call>none</tool_call><end>", "stop", "<tool_call>none</tool_call>", [A]),
        (CALL + OTHER.partition('"b')[0], "length", "", [X, ("one", '{"a": [{}, ')]),
        (CALL + OTHER.removesuffix("}</tool_call>"), "length", "", [X, A]),
        (CALL + LATE[:-30], "length", LATE[:-30], [X]),
    ],
    ids=["several", "lines", "no call", "cut within", "cut after", "cut before the name"],
)
def test_streamed_calls_are_those_of_the_whole_answer(
    engine, sdk, text, finish, said, calls, monkeypatch
):
    """Put together by OpenAI's own helpers for streams, on both routes."""
    engine.text = "</think>" + text
    monkeypatch.setattr(engine, "finish", finish)
    strict: list = [{"type": "function", "function": each | {"strict": True}} for each in FUNCTIONS]
    flat: list = [{"type": "function", "strict": True} | each for each in FUNCTIONS]
    how: dict[str, Any] = {"model": "small", "messages": MESSAGES, "tools": strict}
    whole = sdk.chat.completions.create(**how).choices[0]
    found = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert found == calls and (whole.message.content or "") == said
    assert whole.finish_reason == ("length" if finish == "length" else "tool_calls")
    ended, pieces = list[tuple[str, str]](), dict[int, str]()
    chunks = sdk.chat.completions.create(stream=True, **how)
    state, last = ChatCompletionStreamState(), None
    for chunk in chunks:
        for event in state.handle_chunk(chunk):
            if event.type == "tool_calls.function.arguments.delta":
                pieces[event.index] = pieces.get(event.index, "") + event.arguments_delta
            if event.type == "tool_calls.function.arguments.done":
                ended.append((event.name, event.arguments))
        last = chunk.choices[0].finish_reason
    assert list(pieces.values()) == [arguments for _, arguments in calls] and ended == calls
    assert last == whole.finish_reason

    whole = sdk.responses.create(model="small", input="abc", tools=flat)
    statuses = [item.status for item in whole.output if item.type == "function_call"]
    assert statuses[:-1] == ["completed"] * (len(calls) - 1)
    assert (statuses[-1] == "completed") == (calls[-1][1][-1] == "}")
    with sdk.responses.stream(model="small", input="abc", tools=flat) as stream:
        events = list(stream)
        final = stream.get_final_response() if finish == "stop" else events[-1].response
    assert [event.sequence_number for event in events] == [*range(len(events))]
    for response in (whole, final):
        items = [item for item in response.output if item.type == "function_call"]
        assert [(item.name, item.arguments) for item in items] == calls
        assert response.output_text == said
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert done == [arguments for _, arguments in calls] and len(deltas) > 2 * len(calls)


@pytest.mark.parametrize(("rest", "finish"), [(f"so{CALL}<end>", "stop"), ("so", "length")])
def test_each_record_has_all_fields_that_the_sdks_has(engine, sdk, rest, finish, monkeypatch):
    """Which the SDK itself does not check: who reads one that is not there meets an error."""
    engine.text = f"hm</think>{rest}"
    monkeypatch.setattr(engine, "finish", finish)
    chat: dict[str, Any] = {"model": "small", "messages": MESSAGES, "tools": TOOLS}
    flat: dict[str, Any] = {"model": "small", "input": "abc", "tools": FLAT}
    options = {"include_usage": True}
    for record in (
        sdk.chat.completions.create(**chat),
        *sdk.chat.completions.create(**chat, stream=True, stream_options=options),
        sdk.completions.create(model="small", prompt="abc"),
        sdk.responses.create(**flat),
        *sdk.responses.create(**flat, stream=True),
    ):
        type(record).model_validate(record.to_dict(warnings=False))


@pytest.mark.parametrize(
    "choice",
    [
        some("maybe"),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}},
        {"type": "allowed_tools", "allowed_tools": [TWO]},
        {"type": "allowed_tools"},
        {"type": "function", "function": {"name": "three"}},
        {"type": "function", "function": "two"},
        {"type": "custom", "custom": {"name": "two"}},
    ],
)
def test_a_wrong_choice_is_refused(client, choice):
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"


def test_thoughts_whole_and_streamed(engine, sdk):
    engine.text = "so\nis</think>\n\nyes<end>"
    how: dict[str, Any] = {"model": "small", "messages": MESSAGES}
    whole = sdk.chat.completions.create(**how)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("so\nis", "yes")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("so is") + 1
    deltas = [c.choices[0].delta for c in sdk.chat.completions.create(**how, stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "so\nis" and len([x for x in thoughts if x]) > 2
    assert "".join(delta.content or "" for delta in deltas) == "yes"


def test_an_error_is_an_event_of_its_stream(engine, client, sdk, monkeypatch):
    engine.text = "</think>ab<end>"
    monkeypatch.setattr(engine, "finish", "timeout")
    lines = client.post(RESPONSES, json={"input": "abc", "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = events[-1]
    assert lines[-3] == "event: error" and last["type"] == "error"
    assert (last["code"], last["param"]) == ("timeout", None) and "longer than" in last["message"]
    with pytest.raises(openai.APIError, match="longer than"):
        list(sdk.responses.create(model="small", input="abc", stream=True))


def test_a_message_with_the_mark_of_thoughts_begins_none(engine, client):
    """Neither the reader nor a form's grammar takes what a client writes for the template's."""
    engine.text = "{}<end>"
    turns = [{"role": "user", "content": "a<think>b"}]
    plain = {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}
    for how in (plain, plain | {"response_format": {"type": "json_object"}}):
        [choice] = client.post(CHAT, json=how).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": "{}"}
    assert engine.asked[-1].grammar is not None and engine.asked[-1].grammar.opens is None


@pytest.mark.parametrize("opens", ["", "<think>", "\n<think>\n"])
def test_a_form_that_waits_for_the_end_of_thoughts_has_them_before_it(opens):
    """The template leaves it to the model to open them: both the grammar and the reader begin
    within thoughts then. Without a form, an answer that opens none has none."""
    tokenizer = letters_tokenizer()
    mode = "{% if not enable_thinking %}</think>{% endif %}"
    tokenizer.chat_template = "{{ messages[0].content }}" + mode
    engine, form = Reciting(tokenizer), {"type": "json_object"}
    engine.text = f"{opens}so</think>{{}}<end>"
    with client_of(engine, END) as client:
        chat = client.post(CHAT, json={"messages": MESSAGES, "response_format": form}).json()
        grammar = engine.asked[-1].grammar
        assert grammar is not None and grammar.opens == Opening(END_OF_THOUGHTS)
        flat = client.post(RESPONSES, json={"input": "abc", "text": {"format": form}}).json()
        plain = client.post(CHAT, json={"messages": MESSAGES}).json()["choices"][0]["message"]
        engine.text = "{}<end>"
        how = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
        none = client.post(CHAT, json=how | {"response_format": form}).json()
    message, thoughts = chat["choices"][0]["message"], chat["usage"]["completion_tokens_details"]
    assert (message["reasoning_content"], message["content"]) == ("so", "{}")
    assert thoughts["reasoning_tokens"] == len(tokenizer.tokenize(f"{opens}so</think>"))
    assert [item["type"] for item in flat["output"]] == ["reasoning", "message"]
    assert flat["output"][1]["content"][0]["text"] == "{}"
    assert ("reasoning_content" in plain) == bool(opens)
    assert none["choices"][0]["message"]["content"] == "{}"
    assert engine.asked[-1].grammar is not None and engine.asked[-1].grammar.opens is None


@pytest.mark.parametrize(
    ("route", "kind", "given"),
    [
        (CHAT, protocol.Chat, {"messages": MESSAGES}),
        (TEXT, protocol.Completion, {"prompt": "abc"}),
        (RESPONSES, protocol.Responses, {"input": "abc"}),
        ("/tokenize", protocol.Tokenize, {"prompt": "abc"}),
        ("/tokenize", protocol.Tokenize, {"messages": MESSAGES}),
        ("/detokenize", protocol.Detokenize, {"tokens": [3]}),
    ],
)
def test_a_field_that_is_null_is_as_one_that_is_not_given(engine, client, route, kind, given):
    engine.text = "ab<end>"
    nulls = dict.fromkeys(kind.__struct_fields__)
    answer = client.post(route, json=nulls | given)
    assert answer.status_code == 200, answer.text
    varies = ("id", "created", "created_at", "output")
    one, other = (
        {name: value for name, value in got.json().items() if name not in varies}
        for got in (answer, client.post(route, json=given))
    )
    assert one == other


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_what_clients_without_a_store_ask_for_beside_thoughts_changes_nothing(engine, sdk, include):
    """The thoughts' text is there in any case, and is read where it comes back."""
    engine.text = "<think>hm</think>ab<end>"
    answer = sdk.responses.create(model="small", input="abc", store=False, include=include)
    thoughts, message = answer.output
    assert (thoughts.content[0].text, message.content[0].text) == ("hm", "ab")


def test_usage_in_the_chunks_of_completions(engine, sdk):
    engine.text = "abcde<end>"
    how: dict[str, Any] = {"model": "small", "prompt": "xyz", "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = sdk.completions.create(**how, stream_options=options)
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert last.choices == [] and last.usage == chunks[-1].usage
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (3, 9)
    silent = list(sdk.completions.create(**how))
    assert len(silent) == 6 and all(chunk.usage is None for chunk in silent)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({}, 200 - len("abc") - 1),
    ],
)
def test_the_newer_name_of_the_most_tokens_counts(engine, client, asked, most):
    engine.text = "a<end>"
    assert client.post(CHAT, json={"messages": MESSAGES} | asked).status_code == 200
    assert engine.asked[-1].max_tokens == most


def test_what_the_pages_never_hold_is_refused_at_once(engine, client, monkeypatch):
    """The engine's own check, of a pair of random weights: 128 tokens fit into two pages."""
    models, layout = random_pair().models, Layout(Shape.of(2, 192), 2, 1)
    submit, engine.text = engine.submit, "a<end>"

    async def checked(request: Request) -> Handle:
        check(request, models, layout, engine.max_context)
        return await submit(request)

    monkeypatch.setattr(engine, "submit", checked)
    body = {"prompt": "x" * 100, "max_tokens": 28}
    assert client.post(TEXT, json=body).status_code == 200
    refused = client.post(TEXT, json=body | {"max_tokens": 29})
    error = refused.json()["error"]
    assert refused.status_code == 400 and "2 pages of 64 tokens" in error["message"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_more_requests_than_slots_and_queue_are_refused_by_their_field(engine, client):
    engine.text, fits = "a<end>", SLOTS + MOST_WAITING
    chat, text = {"messages": MESSAGES, "n": fits}, {"prompt": ["x"] * fits}
    for route, body, more in (
        (CHAT, chat, {"n": fits + 1}),
        (TEXT, text, {"prompt": ["x"] * (fits + 1)}),
        (TEXT, text, {"n": 2}),
    ):
        assert client.post(route, json=body).status_code == 200
        refused = client.post(route, json=body | more)
        assert refused.status_code == 400 and "retry-after" not in refused.headers
        assert refused.json()["error"]["param"] == next(iter(more))
        assert f"at most {fits} requests" in refused.json()["error"]["message"]


def test_a_full_queue_is_not_ready_and_is_well(engine, client):
    assert client.get("/health/ready").status_code == 200
    engine.waiting = MOST_WAITING
    refused = client.get("/health/ready")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
    assert client.get("/health").status_code == 200
    assert "num_requests_waiting{" in client.get("/metrics").text
    engine.waiting = 0


def test_figures_have_the_names_that_dashboards_read(engine, client):
    def figures() -> dict[str, float]:
        lines = re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", client.get("/metrics").text, re.M)
        return {name: float(value) for name, value in lines}  # of a histogram its last bucket

    engine.text = "</think>abc<end>"
    before = figures()
    assert set(READ.split()) <= set(before)
    assert client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 9}).status_code == 200
    after = figures()
    gained = {name: after[name] - before[name] for name in after}
    for name, sum_ in (("prompt_tokens", 4), ("generation_tokens", 5), ("params_max_tokens", 9)):
        assert gained[f"request_{name}_count"] == gained[f"request_{name}_bucket"] == 1
        assert gained[f"request_{name}_sum"] == sum_
    for name in ("queue", "prefill", "inference", "decode"):
        assert gained[f"request_{name}_time_seconds_count"] == 1
    assert gained["request_queue_time_seconds_sum"] == QUEUED
    assert gained["generation_tokens_total"] == 5


def test_a_requests_time_is_the_sum_of_its_phases(engine):
    metrics, request = Metrics("small", 3, engine.stats), Request(prompt_ids=[1])
    metrics.ended("stop", request, 3, Times(queued=1.0, first=1.5, whole=4.0))
    metrics.ended("timeout", request, 0, Times(queued=None, first=0.0, whole=9.0))  # in the queue
    metrics.ended("abort", request, 0, Times(queued=2.0, first=0.0, whole=5.0))  # without a token
    found = re.findall(r"^vllm:(\w+)_seconds_(\w+)\{.*\} (\S+)$", metrics.text().decode(), re.M)
    sums = {name: float(value) for name, kind, value in found if kind == "sum"}
    assert sums["e2e_request_latency"] == 18
    assert (sums["request_queue_time"], sums["request_prefill_time"]) == (3.0, 0.5)
    assert (sums["request_inference_time"], sums["request_decode_time"]) == (6.0, 2.5)
    assert sums["request_time_per_output_token"] == 1.25


def test_a_client_that_reads_nothing_keeps_nobody_waiting(engine):
    """The rest of its answer waits for it, and is whole when it reads at last."""
    count, service, listener = 20_000, service_of(engine, END), listen("127.0.0.1", 0)
    server, port = server_of(make_app(service), 1.0), listener.getsockname()[1]
    text = "".join(random.Random(0).choices("abcdefgh", k=count))

    def serve() -> None:
        asyncio.run(server.serve(sockets=[listener]))

    def written() -> int:
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return round(float(re.findall(r"generation_tokens_total\{.*\} (\S+)", metrics)[0]))

    def asked(text: str, **how: Any) -> str:
        engine.text = f"{text}<end>"
        return json.dumps({"prompt": "x"} | how)

    slow, line, got = http.client.HTTPConnection("127.0.0.1", port), b"", ""
    thread = threading.Thread(target=serve, daemon=True)
    listener.listen()  # whoever comes before the server waits
    thread.start()
    with socket.socket() as slow.sock:
        slow.sock.settimeout(60)
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sock.connect(("127.0.0.1", port))
        slow.request("POST", TEXT, asked(text, stream=True))
        seen = -1
        while seen != (seen := written()) or not seen:
            time.sleep(0.3)
        assert 0 < seen < count and service.live
        body = asked("yes")
        answer = httpx.post(f"http://127.0.0.1:{port}{TEXT}", content=body).json()
        assert answer["choices"][0]["text"] == "yes"
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        answer = slow.getresponse()
        while line != b"data: [DONE]\n":
            if line.startswith(b"data: {"):
                got += json.loads(line[6:])["choices"][0]["text"]
            line = answer.readline()
            assert line, "the stream has no end"
    assert got == text and written() == count + 1 + len("yes<")
    assert not service.live
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
