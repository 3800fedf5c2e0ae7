"""The routes as clients see them: OpenAI's SDK, plain HTTP, a refusal for each wrong field."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

from jflash.io import load_tokenizer
from jflash.io.text import decode
from jflash.server.errors import ApiError
from jflash.server.protocol import Chat, read
from jflash.system.embedded import EMBEDDED_PAIR

REFERENCE = Path(__file__).parents[1] / "golden" / "tiny_math_reference.json"
COMPILED_FULLY = True  # the server runs longer than it compiles
QUESTION = "8 players share 168 crayons from Emma equally. How many crayons does each get?"
ANSWER = "Each player gets 168 / 8 = 21 crayons.\n#### 21"
MESSAGES: list = [{"role": "user", "content": QUESTION}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tiny-math/target"
    return model.id


@pytest.fixture(scope="module")
def reference():
    """What the authors' PyTorch code answers: the question, its text, and the tokens of its steps.

    tests/step/test_embedded_pair.py says where it comes from.
    """
    case = json.loads(REFERENCE.read_text())["cases"][0]
    tokenizer = load_tokenizer(EMBEDDED_PAIR / "target")
    asked = tokenizer.decode(case["prompt_ids"])
    question = asked.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
    return question, decode(tokenizer, case["output_ids"]), case["acceptance_lengths"]


def test_a_chat_is_the_text_of_the_reference_one_chunk_a_step(client, model, reference):
    question, text, lengths = reference
    messages: list = [{"role": "user", "content": question}]
    whole = client.chat.completions.create(model=model, messages=messages)
    [choice] = whole.choices
    assert choice.message.content == text and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and whole.model == model
    used = whole.usage
    assert used.completion_tokens == 1 + sum(lengths)
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    assert used.completion_tokens_details.accepted_prediction_tokens == sum(lengths) - len(lengths)
    assert used.completion_tokens_details.rejected_prediction_tokens > 0
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *chunks, last = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options=options
    )
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    counts = [0, *(chunk.usage.completion_tokens for chunk in chunks)]
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, *lengths]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == [] and last.usage == used
    plain = client.chat.completions.create(
        model=model, messages=messages, extra_body={"speculation": False}
    )
    assert plain.choices[0].message.content == text
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_completions_of_texts_and_ids_with_echo_stops_and_several_answers(client, model, server):
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()
    ids = answer["tokens"]
    assert answer["count"] == len(ids) and answer["max_model_len"] == 512
    plain = httpx.post(f"{server.url}/tokenize", json={"prompt": prompt}).json()
    assert plain["tokens"] == ids
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == prompt
    for given in (prompt, [prompt], ids, [ids]):
        got = client.completions.create(model=model, prompt=given, max_tokens=60)
        assert got.choices[0].text == ANSWER
    short = client.completions.create(model=model, prompt=ids)
    assert short.usage.completion_tokens == 16 and short.choices[0].finish_reason == "length"
    [one, two] = client.completions.create(
        model=model, prompt=[prompt, "The answer"], max_tokens=60, echo=True,
        stop=["21 cray", "zzz"],
    ).choices  # fmt: skip
    assert one.text == f"{prompt}Each player gets 168 / 8 = " and one.finish_reason == "stop"
    assert two.text.startswith("The answer") and two.index == 1
    chunks = client.completions.create(
        model=model, prompt=ids, max_tokens=60, stop="crayons", stream=True, echo=True
    )
    assert "".join(c.choices[0].text for c in chunks) == f"{prompt}Each player gets 168 / 8 = 21 "


def test_a_stop_that_is_a_special_token_ends_a_text(client, model):
    """No text has it, since special tokens are left out."""
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    how: dict = {"stop": "<|im_end|>", "extra_body": {"ignore_eos": True}}
    [got] = client.completions.create(model=model, prompt=prompt, max_tokens=60, **how).choices
    assert (got.text, got.finish_reason) == (ANSWER, "stop")
    chats = client.chat.completions
    [got] = chats.create(model=model, messages=MESSAGES, max_tokens=60, **how).choices
    assert (got.message.content, got.finish_reason) == (ANSWER, "stop")


def test_an_effort_of_none_changes_nothing_in_a_model_without_thoughts(client, model):
    asked: dict = {"messages": MESSAGES, "max_tokens": 1, "reasoning_effort": "none"}
    chat = client.chat.completions.create(model=model, **asked)
    assert chat.usage.completion_tokens == 1
    asked = {"input": QUESTION, "max_output_tokens": 1, "reasoning": {"effort": "none"}}
    assert client.responses.create(model=model, **asked).usage.output_tokens == 1


def test_a_seed_repeats_its_answers_and_several_answers_differ(client, model):
    def texts(**how) -> list[str]:
        drawn = client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=9, max_tokens=24, n=3, **how
        )
        assert [choice.index for choice in drawn.choices] == [0, 1, 2]
        return [choice.message.content for choice in drawn.choices]

    assert texts(seed=5) == texts(seed=5) != texts(seed=-(10**30))
    assert len(set(texts(seed=5))) == 3
    how = {"model": model, "temperature": 9, "max_tokens": 24, "n": 2, "seed": 5}
    both = client.completions.create(prompt=["2 + 3 =", QUESTION], **how).choices
    alone = client.completions.create(prompt=QUESTION, **how).choices
    assert [x.text for x in both[2:]] == [x.text for x in alone]
    streamed = Counter(
        choice.index
        for chunk in client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=9, max_tokens=6, n=2, stream=True
        )
        for choice in chunk.choices
        if choice.finish_reason == "length"
    )
    assert streamed == {0: 1, 1: 1}
    cold = dict(model=model, messages=MESSAGES, temperature=0, top_p=0.9)
    answer = client.chat.completions.create(
        **cold, extra_body={"top_k": 20, "min_p": 0.1, "priority": -3}
    )
    assert answer.choices[0].message.content == ANSWER


def test_responses_whole_and_streamed(client, model):
    whole = client.responses.create(model=model, input=QUESTION, metadata={"run": "7"})
    assert whole.output_text == ANSWER and whole.status == "completed"
    assert whole.output[0].id.startswith("msg_") and whole.metadata == {"run": "7"}
    events = list(client.responses.create(model=model, input=MESSAGES, stream=True, store=False))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER and len(deltas) > 1
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    final = events[-1].response
    assert final.output_text == ANSWER and final.usage == whole.usage
    cut = client.responses.create(model=model, input=QUESTION, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    turns = [
        *MESSAGES,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "?"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Again."}]},
    ]
    assert client.responses.create(model=model, input=turns, max_output_tokens=2).output_text


SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["answer", "sure"],
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"enum": ["yes", "no"]},
    },
}  # fmt: skip


def test_answers_of_a_given_form_are_those_of_plain_decoding(client, model, server):
    """In every way to ask for one; with drafts and without the same text, whole or streamed."""

    def chat(**how) -> str:
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=160, extra_body=how
        ).choices[0]
        assert answer.finish_reason == "stop"
        return answer.message.content

    def both(**how) -> str:
        text = chat(**how)
        assert chat(speculation=False, **how) == text
        return text

    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    text = both(response_format=form)
    value = json.loads(text)
    assert set(value) == {"answer", "sure"} and type(value["answer"]) is int
    assert chat(guided_json=SCHEMA) == chat(structured_outputs={"json": json.dumps(SCHEMA)}) == text
    assert chat(guided_regex="[0-9]{3} crayons") in [f"{i:03} crayons" for i in range(1000)]
    assert chat(guided_choice=["168", "Emma"]) in ("168", "Emma")
    assert chat(guided_grammar='start: "21" | "22" "!"') in ("21", "22!")
    drawn = both(guided_regex="[a-z]{4}", temperature=1, seed=3)
    assert len(drawn) == 4 and drawn.islower()
    chunks = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=160, stream=True, response_format=form
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    other = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    got = client.responses.create(model=model, input=QUESTION, text=other)
    assert got.output_text == text and got.usage.output_tokens_details.reasoning_tokens == 0
    cut = httpx.post(
        server.url + TEXT,
        json={"prompt": "x", "response_format": {"type": "json_object"}, "max_tokens": 2},
    ).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["text"].startswith("{")


def test_logprobs_of_tokens_prompts_and_chunks(client, model):
    """In OpenAI's forms and vLLM's; a text's are the same as an answer and as an echoed prompt."""
    how = dict(model=model, messages=MESSAGES, logprobs=True, top_logprobs=2)
    content = client.chat.completions.create(**how).choices[0].logprobs.content
    said = b"".join(bytes(entry.bytes) for entry in content[:-1]).decode()
    assert said == ANSWER and content[-1].token == "<|im_end|>"
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)  # greedy
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content)
    streamed = client.chat.completions.create(**how, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [entry for part in parts if part for entry in part.content] == content
    silent = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1)
    assert silent.choices[0].logprobs is None
    warm = dict(how, max_tokens=1, temperature=0.5, seed=1)
    raw, processed = (
        client.chat.completions.create(**warm, extra_body={"logprobs_mode": mode})
        for mode in ("raw", "processed")
    )
    of = lambda answer: answer.choices[0].logprobs.content[0].top_logprobs  # noqa: E731
    gaps = [one.logprob - two.logprob for one, two in (of(raw), of(processed))]
    assert gaps[1] == pytest.approx(2 * gaps[0], rel=1e-3)

    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    new = client.completions.create(model=model, prompt=prompt, max_tokens=60, logprobs=0)
    numbers = new.choices[0].logprobs
    assert numbers.token_logprobs == [entry.logprob for entry in content]
    assert numbers.text_offset[1] == len(numbers.tokens[0])
    [choice] = client.completions.create(
        model=model, prompt=prompt + ANSWER, max_tokens=1, logprobs=1, echo=True,
        extra_body={"prompt_logprobs": 2},
    ).choices  # fmt: skip
    echoed = choice.logprobs
    assert echoed.tokens[:3] == ["<|im_start|>", "user", "\n"] and echoed.token_logprobs[0] is None
    assert echoed.top_logprobs[0] is None
    count = len(content) - 1
    assert echoed.tokens[-count - 1 : -1] == numbers.tokens[:-1]
    assert echoed.token_logprobs[-count - 1 : -1] == numbers.token_logprobs[:-1]
    assert all(len(top) <= 2 for top in echoed.top_logprobs[1:])  # the likeliest, and the token
    chunks = client.completions.create(
        model=model, prompt=[prompt + ANSWER, prompt], max_tokens=1, logprobs=1, echo=True,
        n=2, best_of=2, stream=True,
    )  # fmt: skip
    parts = [(each.index, each.text, each.logprobs) for c in chunks for each in c.choices]
    for own in (0, 1):  # samples of the first prompt
        [(_, text, of_prompt), (_, new_text, of_answer)] = [p for p in parts if p[0] == own]
        assert text + new_text == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(of_prompt, name) + getattr(of_answer, name) == getattr(echoed, name)
    scored = client.completions.create(
        model=model, prompt=prompt + ANSWER, max_tokens=0, logprobs=1, echo=True
    )
    assert choice.text.startswith(scored.choices[0].text)
    assert scored.choices[0].logprobs.tokens == echoed.tokens[:-1]
    assert scored.choices[0].logprobs.token_logprobs == echoed.token_logprobs[:-1]
    assert scored.usage.completion_tokens == 0
    first, *rest = choice.prompt_logprobs
    assert first is None and len(rest) == len(echoed.tokens) - 2
    assert all(len(place) in (2, 3) for place in rest)
    assert {entry["rank"] for entry in rest[-1].values()} >= {1, 2}
    for own, extra in ((0, {"prompt_logprobs": 0}), (None, {})):
        [choice] = client.completions.create(
            model=model, prompt=prompt, max_tokens=1, logprobs=2, echo=True, extra_body=extra
        ).choices
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs[1:])
        places = getattr(choice, "prompt_logprobs", None)
        assert places is None if own is None else all(len(place) == 1 for place in places[1:])


def test_a_prompt_that_fills_the_context_is_scored(client, model):
    """Of 512 tokens; its last token's numbers are those that a text has which goes on after it."""
    ids = [5 + i * i % 4000 for i in range(512)]
    how: dict = dict(model=model, max_tokens=0, logprobs=2, echo=True)
    whole = client.completions.create(prompt=ids, extra_body={"prompt_logprobs": 0}, **how)
    [choice] = whole.choices
    assert whole.usage.prompt_tokens == 512 and whole.usage.completion_tokens == 0
    assert len(choice.prompt_logprobs) == len(choice.logprobs.tokens) == 512
    assert [*choice.prompt_logprobs[-1]] == [str(ids[-1])]
    first = client.completions.create(prompt=ids[:510], **(how | {"max_tokens": 1})).choices[0]
    short = client.completions.create(prompt=ids[:510], **how).choices[0]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        numbers = getattr(short.logprobs, name)
        assert numbers == getattr(choice.logprobs, name)[:510]
        assert numbers == getattr(first.logprobs, name)[:510]
    options = {"include_usage": True}
    echoed, end, used = client.completions.create(
        prompt=ids[:510], stream=True, stream_options=options, **how
    )
    assert echoed.choices[0].logprobs == short.logprobs and echoed.choices[0].text == short.text
    assert (end.choices[0].text, end.choices[0].finish_reason) == ("", "length")
    assert (used.usage.prompt_tokens, used.usage.completion_tokens) == (510, 0)
    one = client.completions.create(prompt=ids[:1], **how).choices[0]
    assert one.logprobs.token_logprobs == [None] and one.text == short.text[:1]
    silent = client.completions.create(model=model, prompt=ids, max_tokens=0, echo=True)
    assert silent.choices[0].text == choice.text and silent.choices[0].logprobs is None
    refused = httpx.post(f"{client.base_url}completions", json=how | {"prompt": [*ids, 5]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


def test_offsets_index_the_text_with_its_special_tokens_and_characters_of_several(client, model):
    prompt = "<|im_start|>user\nh🎉i<|im_end|>\n"
    how: dict = dict(model=model, prompt=prompt, logprobs=0, echo=True)
    for new in (0, 9):
        extra = {"ignore_eos": True, "logit_bias": {"1": 30}}  # of which an answer's text has none
        [choice] = client.completions.create(max_tokens=new, extra_body=extra, **how).choices
        assert choice.text == prompt
        numbers, known = choice.logprobs, len(prompt)
        assert numbers.tokens[-new:] == ["<|im_start|>"] * new or not new
        assert numbers.text_offset[len(numbers.tokens) - new :] == [known] * new
        places = [*zip(numbers.tokens, numbers.text_offset, strict=True)]
        whole = [(token, at) for token, at in places[: len(places) - new] if token[:6] != "bytes:"]
        assert len(whole) > 6 and [choice.text[at : at + len(x)] for x, at in whole] == [
            token for token, _ in whole
        ]
        assert {at for token, at in places if token[:6] == "bytes:"} == {prompt.index("🎉")}
    streamed = client.completions.create(
        model=model, prompt=prompt, max_tokens=1, echo=True, stream=True
    )
    assert next(iter(streamed)).choices[0].text == prompt


def test_penalties_bias_and_a_least_length_reach_the_engine(client, model):
    def answer(most: int = 40, **how) -> str:
        got = client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=most, extra_body=how
        )
        return got.choices[0].message.content

    def tokens(text: str) -> list[int]:
        return [*load_tokenizer(EMBEDDED_PAIR / "target")(text)["input_ids"]]

    assert answer() == ANSWER == answer(presence_penalty=0, min_tokens=0, logit_bias={})
    assert not answer(4, logit_bias={str(tokens("Each")[0]): -100}).startswith("Each")
    long = answer(min_tokens=30)
    assert long.startswith(ANSWER) and len(tokens(long)) > 25
    words = dict(stop=["168 /"], min_tokens=len(tokens("Each player gets 168 /")))
    assert answer(**words) == ANSWER and answer(stop=["168 /"]) == "Each player gets "
    ends = [
        client.chat.completions.create(
            model=model, messages=MESSAGES, stop=["cray", "168 /"], logprobs=True, n=2,
            extra_body={"speculation": drafts},
        )
        for drafts in (True, False)
    ]  # fmt: skip
    for one, other in zip(ends[0].choices, ends[1].choices, strict=True):
        assert one.message.content == other.message.content == "Each player gets "
        assert one.logprobs.content == other.logprobs.content
    assert ends[0].usage.completion_tokens == ends[1].usage.completion_tokens < 40
    assert all(e.usage.prompt_tokens_details.cached_tokens < e.usage.prompt_tokens for e in ends)
    for name, value in (("repetition", 5.0), ("frequency", 60.0), ("presence", 60.0)):
        assert not ANSWER.startswith(answer(20, **{f"{name}_penalty": value})), name


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("route", "changes", "param", "code"),
    [
        (CHAT, {"messages": []}, "messages", "invalid_type"),
        (CHAT, {"messages": ...}, "messages", "invalid_type"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        (CHAT, {"messages": [{"role": 1}]}, "messages[0].role", "invalid_type"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "invalid_type"),
        (CHAT, {"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role", None),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        *(
            (
                CHAT,
                {"messages": [{"role": "assistant", "content": x, "function_call": {"name": "f"}}]},
                "messages[0].function_call",
                "unsupported_parameter",
            )
            for x in ("x", None)
        ),
        (CHAT, {"max_tokens": "9"}, "max_tokens", "invalid_type"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        (CHAT, {"max_tokens": 9999}, "messages", "context_length_exceeded"),
        (CHAT, {"temperature": -1}, "temperature", "invalid_type"),
        (CHAT, {"temperature": 1e-9}, "temperature", "invalid_value"),
        (CHAT, {"temperature": 0, "top_p": 2}, "top_p", "invalid_value"),
        (CHAT, {"stop": [""]}, "stop[0]", "invalid_type"),
        (CHAT, {"stop_token_ids": [4096]}, "stop_token_ids", "invalid_value"),
        (CHAT, {"stop_token_ids": list(range(99))}, "stop_token_ids", "invalid_value"),
        (CHAT, {"n": 1000}, "n", "invalid_value"),
        (TEXT, {"prompt": ["x"] * 129}, "prompt", "invalid_value"),
        (CHAT, {"stream_options": {}}, "stream_options", "invalid_value"),
        (TEXT, {"stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
        (CHAT, {"priority": 2**31}, "priority", "invalid_type"),
        (CHAT, {"model": "gpt"}, "model", "model_not_found"),
        (CHAT, {"response_format": {"type": "odd"}}, "response_format.type", None),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "q"}}}},
            "response_format.json_schema.schema",
            "invalid_grammar",
        ),
        (CHAT, {"guided_regex": "[0-9"}, "guided_regex", "invalid_grammar"),
        (TEXT, {"guided_choice": []}, "guided_choice", "invalid_type"),
        (TEXT, {"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        (
            TEXT,
            {"structured_outputs": {"grammar": "root ::= ("}},
            "structured_outputs.grammar",
            None,
        ),
        (TEXT, {"guided_json": "no JSON"}, "guided_json", "invalid_value"),
        (TEXT, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        (TEXT, {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "invalid_value"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"logit_bias": {"4096": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        (CHAT, {"min_tokens": 5}, "min_tokens", "invalid_value"),
        (CHAT, {"logprobs_mode": ""}, "logprobs_mode", "invalid_value"),
        (TEXT, {"draft_rule": "best"}, "draft_rule", "invalid_value"),
        (RESPONSES, {"draft_rule": 1}, "draft_rule", "invalid_type"),
        (TEXT, {"cache_salt": ""}, "cache_salt", "invalid_type"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_type"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
        *(
            (route, {name: value}, name, "unsupported_parameter")  # vLLM's, which honours them
            for route in (CHAT, TEXT)
            for name, value in (
                ("bad_words", ["x"]),
                ("allowed_token_ids", [5]),
                ("truncate_prompt_tokens", 9),
                ("use_beam_search", True),
                ("length_penalty", 0.5),
                ("include_stop_str_in_output", True),
                ("skip_special_tokens", False),
                ("return_tokens_as_token_ids", True),
            )
        ),
        (CHAT, {"tools": [WEATHER]}, "tools", "unsupported_parameter"),
        (CHAT, {"tools": [{}]}, "tools[0]", "invalid_value"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        (CHAT, {"store": True}, "store", "unsupported_parameter"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        *(
            (CHAT, {"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}", None)
            for name in ("tools", "messages", "conversation", "padding", "return_dict", "tokenizer")
        ),
        (TEXT, {"logprobs": 21}, "logprobs", "invalid_type"),
        (TEXT, {"prompt": []}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [[]]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": ""}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [1, "x"]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [4096]}, "prompt", "invalid_value"),
        (TEXT, {"prompt": [-1]}, "prompt[0]", "invalid_type"),
        (TEXT, {"suffix": "x"}, "suffix", "unsupported_parameter"),
        (TEXT, {"best_of": 2}, "best_of", "unsupported_parameter"),
        (TEXT, {"best_of": 1, "n": 2}, "best_of", "unsupported_parameter"),
        (RESPONSES, {"store": True}, "store", "unsupported_parameter"),
        (RESPONSES, {"previous_response_id": "r"}, "previous_response_id", None),
        (RESPONSES, {"input": [{"type": "odd"}]}, "input[0].type", "unsupported_parameter"),
        (RESPONSES, {"conversation": "c"}, "conversation", "unsupported_parameter"),
        (RESPONSES, {"background": True}, "background", "unsupported_parameter"),
        (RESPONSES, {"text": {"format": {"type": "odd"}}}, "text.format.type", None),
        (RESPONSES, {"text": {"format": 1}}, "text.format", "invalid_value"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", None),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
        (RESPONSES, {"top_logprobs": 1}, "top_logprobs", "unsupported_parameter"),
        (RESPONSES, {"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "x", "parameters": 5}]},
            "tools[0].parameters",
            "invalid_value",
        ),
        ("/tokenize", {"prompt": ...}, "prompt", "invalid_value"),
        ("/detokenize", {"tokens": [5000]}, "tokens", "invalid_value"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(server, route, changes, param, code):
    bodies = {
        CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "x"}, RESPONSES: {"input": "x"},
        "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]},
    }  # fmt: skip
    body = {"max_tokens": 1, "unknown field": 1} if route in (CHAT, TEXT) else {}
    body |= bodies[route] | changes
    body = {name: value for name, value in body.items() if value is not ...}
    answer = httpx.post(server.url + route, json=body)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"] and error["type"]
    assert code is None or error["code"] == code


def test_a_value_that_changes_nothing_is_taken():
    """As clients of vLLM send its defaults."""
    body = (
        b'{"messages": [{"role": "user", "content": "x"}], "bad_words": [], "length_penalty": 1.0,'
        b'"use_beam_search": false, "include_stop_str_in_output": false,'
        b'"skip_special_tokens": true, "return_tokens_as_token_ids": false}'
    )
    assert read(body, Chat).skip_special_tokens


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"temperature": -1}', "temperature -1: Expected `float` >= 0.0"),
        ('{"max_tokens": "9"}', 'max_tokens "9": Expected `int | null`, got `str`'),
        ('{"stop": ["a", ""]}', 'stop[1] "": Expected `str` of length >= 1'),
        ('{"logit_bias": {"3": "x"}}', "logit_bias[...]: Expected `float`, got `str`"),
        (f'{{"n": "{"x" * 40}"}}', "n: Expected `int | null`, got `str`"),
        ('{"n": "9", "x": ' + "[" * 100_000, "n: Expected `int | null`, got `str`"),
        ('{"messages": [5], "messages": 1}', "messages[0]: Expected `object`, got `int`"),
        ("{}", "Object missing required field `messages`"),
        ('{"messages": [{}]}', "messages[0].role: Object missing required field `role`"),
    ],
)
def test_a_wrong_value_is_shown(body, message):
    with pytest.raises(ApiError, match=f"^{re.escape(message)}$"):
        read(body.encode(), Chat)


def test_what_is_not_json_or_too_long_or_not_there(server):
    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"messages": "\\ud800"}'):
        answer = httpx.post(server.url + CHAT, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["type"]
    assert httpx.post(server.url + CHAT, content=b" " * 2**23).status_code == 413
    assert httpx.get(server.url + "/v1/nothing").status_code == 404
    twice = httpx.get(server.url + "//v1/models")  # of a base URL with a slash at its end
    assert twice.json()["error"]["message"] == "GET //v1/models: Not Found"
    assert httpx.get(server.url + CHAT).status_code == 405
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/health/ready").status_code == 200
    assert "jflash" in httpx.get(server.url + "/version").json()["version"]
    headers = httpx.post(
        server.url + CHAT, json={"messages": MESSAGES}, headers={"Origin": "http://evil.example"}
    ).headers
    assert "access-control-allow-origin" not in headers


def test_metrics_count_drafts_and_the_log_has_no_text(server, client, model):
    before = {
        name: server.metric(f"{name}_total")
        for name in ("generation_tokens", "prompt_tokens", "spec_decode_num_drafts")
    }
    used = client.chat.completions.create(model=model, messages=MESSAGES).usage
    after = {name: server.metric(f"{name}_total") for name in before}
    assert after["generation_tokens"] - before["generation_tokens"] == used.completion_tokens
    assert after["prompt_tokens"] - before["prompt_tokens"] == used.prompt_tokens
    assert server.metric("request_prefill_time_seconds_count") > 0
    assert server.metric("request_inference_time_seconds_sum") > 0
    kept = server.metric("spec_decode_num_accepted_tokens_total")
    assert kept == server.metric("spec_decode_num_accepted_tokens_per_pos_total") > 0
    assert kept < server.metric("spec_decode_num_draft_tokens_total")
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    log = server.log.read_text()
    sizes = "4 requests at once of at most 512 tokens; 32 pages, 2048 tokens in all, "
    ready = r"[\d.]+ GB; compiles\ncompiled [1-9]\d* programs in "
    assert re.search(re.escape(f"{model}: {sizes}") + ready, log)
    assert f" POST {CHAT} 200 " in log and f" new {used.completion_tokens} " in log
    assert "crayons" not in log and json.dumps(QUESTION) not in log


def test_the_page_asks_nobody_outside(server):
    answer = httpx.get(server.url + "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("  // ", "").replace("{  // ", "")


def test_a_prompt_that_came_before_is_counted_as_cached_and_has_its_text(client, model):
    ids = [*range(3, 203)]
    one, two = [client.completions.create(model=model, prompt=ids) for _ in range(2)]
    assert one.usage.prompt_tokens_details.cached_tokens == 0
    assert 128 <= two.usage.prompt_tokens_details.cached_tokens < 200
    salted = client.completions.create(model=model, prompt=ids, extra_body={"cache_salt": "x"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert two.choices[0].text == one.choices[0].text == salted.choices[0].text
