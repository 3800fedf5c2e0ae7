"""What one request may cost the event loop before it is refused, and what it is refused for."""

import asyncio
import random
import threading
import time
from codecs import BOM_UTF8
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest
from starlette.testclient import TestClient

from jflash.io.incremental import Incremental, held_back
from jflash.server import app, chat, completions, conversation
from jflash.server import service as services
from jflash.server.forms import Form
from jflash.server.requests import LONGEST_STOP, MOST_ANSWERS, MOST_STOPS
from jflash.server.service import MANY, SHORT
from jflash.serving.pipe.answering import COMPILERS, answer
from jflash.serving.pipe.remote import Asked, Left
from jflash.serving.request import Full, Request
from jflash.serving.stats import Stats
from tests.support.letters import END, letters_tokenizer
from tests.support.reciting import NOTHING, Reciting, client_of, service_of

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def client():
    return client_of(Reciting(letters_tokenizer()), END)


def error_of(answered: Any, status: int = 400) -> dict[str, Any]:
    assert answered.status_code == status, answered.text
    return answered.json()["error"]


def test_what_is_held_back_is_the_longest_beginning_of_a_stop():
    draw = random.Random(3)
    letters = lambda most: "".join(draw.choices("ab", k=draw.randint(0, most)))  # noqa: E731
    seen = set[int]()
    for _ in range(3000):
        text, stops = letters(12), [letters(9) + "b" for _ in range(draw.randint(1, 3))]
        begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert held_back(text, stops) == max(begun, default=0)
        seen.add(held_back(text, stops))
    assert len(seen) > 6


def test_a_stop_is_looked_at_no_further_than_the_text_goes():
    class Stop(str):
        """Counts the characters that are cut out of it."""

        cut = 0

        def __getitem__(self, key: Any) -> str:
            Stop.cut += len(str.__getitem__(self, key))
            return str.__getitem__(self, key)

    text = Incremental(lambda ids: "".join(map(chr, ids)), [Stop("x" * LONGEST_STOP)])
    for letter in "a" * 100:
        assert text.push([ord(letter)], False) == letter
    assert Stop.cut <= 200


@pytest.mark.parametrize(
    ("stop", "why"),
    [("x" * (LONGEST_STOP + 1), f"a text of {LONGEST_STOP + 1} characters"),
     (["a"] * (MOST_STOPS + 1), f"{MOST_STOPS + 1} texts")],
)  # fmt: skip
def test_stops_that_are_too_long_or_too_many(client, stop, why):
    error = error_of(client.post(TEXT, json={"prompt": "ab", "stop": stop}))
    assert error["param"] == "stop" and why in error["message"]


def test_a_form_that_takes_too_long_to_compile_is_refused_in_seconds():
    """Its text is short, and each pattern more takes llguidance twice as long."""
    engine = Reciting(letters_tokenizer())
    service = services.service_of(service_of(engine, END), engine)
    client = TestClient(app.make_app(service))
    patterns = [{"type": "string", "pattern": f"a{i}|b?c?{i}"} for i in range(40)]
    asked = {"prompt": "ab", "guided_json": {"allOf": patterns}}
    error = error_of(client.post(TEXT, json=asked))
    assert error["param"] == "guided_json" and error["code"] == "invalid_grammar"
    assert "more than 2 seconds" in error["message"]
    engine.text = "ab"
    asked = {"prompt": "ab", "guided_regex": "[ab]+"}
    assert client.post(TEXT, json=asked).status_code == 200


def test_the_mark_before_utf_8_is_no_part_of_a_body(client):
    """Windows' editors put it there, and curl sends a file as it is."""
    body = b'{"prompt": "ab", "model": "none"}'
    assert error_of(client.post(TEXT, content=BOM_UTF8 + body), 404)["param"] == "model"


@pytest.mark.parametrize("prompt", [["a"] * 800, [[1]] * 800])
def test_too_many_prompts_are_refused_before_any_is_read(client, monkeypatch, prompt):
    def read(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("a prompt was tokenised")

    monkeypatch.setattr(services, "token_ids", read)
    error = error_of(client.post(TEXT, json={"prompt": prompt}))
    assert error["param"] == "prompt" and f"at most {MOST_ANSWERS}" in error["message"]


@pytest.mark.parametrize("more", [{}, {"max_tokens": 0}, {"max_tokens": 0, "logprobs": 1}])
@pytest.mark.parametrize(
    ("prompt", "why"),
    [("", "is empty"), ([[]], "is empty"), ([[3], []], "is empty"), ([5, 999999], "999999")],
)
def test_a_scored_prompt_is_checked_as_one_that_is_continued(client, prompt, why, more):
    error = error_of(client.post(TEXT, json={"prompt": prompt, "echo": True} | more))
    assert error["param"] == "prompt" and why in error["message"]


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("tokens", [MANY - 40, MANY + 1])
def test_numbers_of_a_long_prompt_are_written_beside_the_event_loop(monkeypatch, route, tokens):
    engine, where = Reciting(letters_tokenizer()), list[threading.Thread]()
    engine.max_context, engine.text = 2 * MANY, "ab"
    loops = list[threading.Thread]()
    beside = services.Service.beside

    async def noted(self: Any, *given: Any) -> Any:
        loops.append(threading.current_thread())
        return await beside(self, *given)

    module = completions if route == "completions" else chat
    monkeypatch.setattr(services.Service, "beside", noted)
    note = lambda *_: where.append(threading.current_thread())  # noqa: E731
    monkeypatch.setattr(module, "prompt_logprobs", note)
    asked = {"max_tokens": 2, "prompt_logprobs": 1}
    if route == "chat":
        asked["messages"] = [{"role": "user", "content": "a" * tokens}]
        answered = client_of(engine, END).post("/v1/chat/completions", json=asked)
    else:
        answered = client_of(engine, END).post(TEXT, json=asked | {"prompt": [1] * tokens})
    assert answered.status_code == 200, answered.text
    assert len(where) == 1 and (where[0] in loops) == (tokens < MANY)


@pytest.mark.parametrize("count", [MANY, MANY + 1])
@pytest.mark.parametrize(
    ("route", "name", "each", "work"),
    [
        ("/v1/chat/completions", "messages", {"role": "user", "content": "a"}, "through_template"),
        ("/v1/responses", "input", {"role": "user", "content": "a"}, "through_template"),
        ("/tokenize", "messages", {"role": "user", "content": "a"}, "through_template"),
        ("/detokenize", "tokens", 30, "json_response"),
    ],
)
def test_many_messages_and_tokens_are_written_beside_the_event_loop(
    monkeypatch, route, name, each, work, count
):
    engine, where = Reciting(letters_tokenizer()), list[threading.Thread]()
    engine.max_context, engine.text = 2 * MANY, "ab"
    service, loops = service_of(engine, END), list[threading.Thread]()
    module = conversation if work == "through_template" else app
    does, check = getattr(module, work), services.Service.check_model

    def noted(*given: Any, **names: Any) -> Any:
        where.append(threading.current_thread())
        return does(*given, **names)

    def checked(*given: Any) -> None:
        loops.append(threading.current_thread())
        check(*given)

    monkeypatch.setattr(module, work, noted)
    monkeypatch.setattr(services.Service, "check_model", checked)
    client = TestClient(app.make_app(replace(service, max_body=10**5)))
    answered = client.post(route, json={name: [each] * count})
    assert answered.status_code == 200, answered.text
    assert len(where) == 1 and (where[0] in loops) == (count <= MANY)


def test_a_long_prompt_waits_for_no_grammar():
    engine, compiler = Reciting(letters_tokenizer()), Compiler()
    engine.max_context = 5000
    given: Any = compiler
    service = replace(service_of(engine, END), grammars=given)

    async def both() -> None:
        form = Form("regex", "a", "guided_regex")
        waiting = [asyncio.create_task(service.grammar(form, thinks=False)) for _ in range(40)]
        await asyncio.sleep(0)
        prompt = service.prompt("a" * (SHORT + 1), True, "prompt")
        try:
            assert len(await asyncio.wait_for(prompt, 5)) == SHORT + 1
        finally:
            compiler.go_on.set()
            await asyncio.gather(*waiting)

    asyncio.run(both())


class Engine:
    """One whose queue has so much room, and that queues nothing."""

    def __init__(self, room: int) -> None:
        self.room = room

    def before_waiting(self, do: Any) -> None: ...

    def stats(self) -> Stats:
        known: Any = NOTHING
        return Stats(**known)

    def submit(self, request: Request) -> None:
        raise Full("nothing is queued")


class Compiler:
    """Stands for grammars: each waits until it may end."""

    def __init__(self) -> None:
        self.begun, self.go_on = list[str](), threading.Event()

    def compile(self, kind: str, text: str, opens: Any) -> None:
        self.begun.append(text)
        assert self.go_on.wait(30)


def asked(number: int) -> Asked:
    return Asked(number, Request(prompt_ids=[1]), ("regex", str(number), None))


@pytest.fixture
def behind():
    """Starts the far end of a pipe over an engine with room; its compiler and the near end."""
    ends = list[tuple[Any, threading.Thread, Compiler]]()

    def start(room: int) -> tuple[Any, Compiler]:
        compiler, (here, there) = Compiler(), Pipe()
        given: Any = Engine(room), compiler, there, lambda: 0
        thread = threading.Thread(target=answer, args=given)
        thread.start()
        ends.append((here, thread, compiler))
        return here, compiler

    yield start
    for here, thread, compiler in ends:
        compiler.go_on.set()
        here.close()
        thread.join(30)
        assert not thread.is_alive()


def refusals(here: Any, count: int) -> dict[int, Exception]:
    found, end = dict[int, Exception](), time.monotonic() + 30
    while len(found) < count:
        assert here.poll(end - time.monotonic()), "no news"
        found |= dict(here.recv().taken)
    return found


def test_a_full_queue_is_told_before_a_grammar_is_compiled(behind):
    here, compiler = behind(room=3)
    for number in range(9):
        here.send(asked(number))
    found = refusals(here, 6)
    assert {*found} == {3, 4, 5, 6, 7, 8}
    assert all(isinstance(why, Full) for why in found.values())
    assert len(compiler.begun) <= COMPILERS


def test_nothing_is_compiled_for_who_has_left(behind):
    here, compiler = behind(room=9)
    for number in range(5):
        here.send(asked(number))
    for number in range(COMPILERS, 5):
        here.send(Left(number))
    here.send(Asked(5, Request(prompt_ids=[1]), None))
    assert {*refusals(here, 1)} == {5}  # so the far end has read all before it
    compiler.go_on.set()
    assert {*refusals(here, 5)} == {*range(5)}
    assert {*compiler.begun} == {*map(str, range(COMPILERS))}


def test_an_end_waits_for_no_grammar_that_has_not_begun(behind):
    before = {*threading.enumerate()}  # pools of other files, whose threads may never end
    here, compiler = behind(room=9)
    for number in range(9):
        here.send(asked(number))
    end = time.monotonic() + 30
    while len(compiler.begun) < COMPILERS and time.monotonic() < end:
        time.sleep(0.01)
    here.close()
    time.sleep(0.2)  # the far end sees it
    compiler.go_on.set()
    threads = [x for x in threading.enumerate() if x.name.startswith("ThreadPoolExecutor")]
    for thread in {*threads} - before:
        thread.join(30)
        assert not thread.is_alive()
    assert len(compiler.begun) == COMPILERS
