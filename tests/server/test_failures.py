"""A device that fails or hangs ends every stream and the server; keys, limits, other pages."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from functools import partial
from typing import Any

import httpx
import pytest

from jflash.io import load_tokenizer
from jflash.records.decoding import Sampling
from jflash.server import app as app_module
from jflash.server import wire
from jflash.server.app import make_app
from jflash.server.metrics import Metrics
from jflash.server.run import HEADER_BYTES, listen, open_to_clients, serve
from jflash.server.service import Service
from jflash.serving.decoder import Local
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars
from jflash.serving.handle import Handle
from jflash.serving.request import Request
from jflash.system.embedded import EMBEDDED_PAIR
from tests.support.letters import END, END_OF_THOUGHTS, TEMPLATE, letters_tokenizer
from tests.support.pairs import one_arithmetic, random_pair
from tests.support.reciting import Reciting, service_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": [1, 2, 3], "max_tokens": 150, "stream": True}


class Running:
    """A server in a thread, over an engine of a small random pair."""

    def __init__(self, *, hang: float = 60.0, keys: list[str] | None = None, **service: Any):
        pair = one_arithmetic(random_pair())
        self.engine = Engine(pair, max_batch=2, max_context=160, max_queue=4, kinds=("drawn",))
        values: dict[str, Any] = {
            "tokenizer": load_tokenizer(EMBEDDED_PAIR / "target"), "name": "small",
            "version": "jflash", "template": "", "stop_ids": (), "sampling": Sampling(),
            "grammars": Grammars(load_tokenizer(EMBEDDED_PAIR / "target"), 4096, [2]),
            "reasoning": False, "created": 0, "max_body": 1000, "slots": 2, "max_queue": 4,
            "max_accept": 3,
            "request_timeout": 60.0, "metrics": Metrics("small", 3, self.engine.stats),
        }  # fmt: skip
        self.service = Service(engine=Local(self.engine), **(values | service))
        app = make_app(self.service, api_keys=keys or (), origins=["https://page.example"])
        listener = listen("127.0.0.1", 0)
        open_to_clients(listener)  # whoever comes before the server waits
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.well: bool | None = None

        def run() -> None:
            self.well = serve(app, self.service, listener, shutdown_timeout=5.0, hang_timeout=hang)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.service.failures.append("the test ends")
        self.thread.join(20)
        with contextlib.suppress(RuntimeError):
            self.engine.close()


@contextlib.contextmanager
def running(**how: Any):
    server = Running(**how)
    try:
        yield server
    finally:
        server.end()


def read(url: str, began: threading.Event) -> list[str]:
    """The lines of a stream to its end."""
    with httpx.stream("POST", url + TEXT, json=BODY, timeout=30) as answer:
        lines = []
        for line in answer.iter_lines():
            began.set()
            lines += [line] if line else []
        return lines


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_broken_device_ends_streams_health_and_the_server(how):
    with running(hang=1.0) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        began, let_go, lines = threading.Event(), threading.Event(), list[str]()

        def broken(*_: Any) -> Any:
            if how == "fails":
                raise RuntimeError("the device is lost")
            let_go.wait(30)
            raise RuntimeError("it hung long enough")

        reader = threading.Thread(target=lambda: lines.extend(read(server.url, began)))
        reader.start()
        assert began.wait(30)
        [handle] = server.service.live
        handle.give = broken  # in the engine's thread, where the device's errors come up
        reader.join(20)
        assert json.loads(lines[-2][6:])["error"]["code"] == "engine_failed", lines[-2]
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        why = "the device is lost" if how == "fails" else "has not answered for 1 seconds"
        assert why in health.json()["error"]["message"]
        server.thread.join(20)
        assert server.well is False
        let_go.set()


WAYS = {
    name: {
        "type": "object", "additionalProperties": False, "required": ["x"],
        "properties": {"x": {"enum": values}},
    }
    for name, values in (("one", [1, 22]), ("two", ["a"]))
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": way}}
    for name, way in WAYS.items()
]


def test_forced_calls_and_forms_after_thoughts():
    """By random weights: only the grammar makes the calls and the form."""
    tokenizer = letters_tokenizer()
    with running(
        tokenizer=tokenizer, template=TEMPLATE, stop_ids=(END,), max_body=9000,
        grammars=Grammars(tokenizer, 67, [END]),
    ) as server:  # fmt: skip
        body = {
            "messages": [{"role": "user", "content": "abc"}], "max_tokens": 120, "tools": TOOLS,
            "parallel_tool_calls": False,
            "logit_bias": {str(END_OF_THOUGHTS): 20, "10": -99, "11": -99},  # no white space
        }  # fmt: skip

        def chat(**how: Any) -> dict[str, Any]:
            answer = httpx.post(server.url + CHAT, json=body | how, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()

        named = {"type": "function", "function": {"name": "two"}}
        thinks = {"chat_template_kwargs": {"enable_thinking": True}}
        for how in ({"tool_choice": "required"}, {"tool_choice": named} | thinks):
            whole = chat(**how)
            [choice] = whole["choices"]
            [call] = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
            asked = body | how | {"stream": True}
            lines = httpx.post(server.url + CHAT, json=asked, timeout=60).text.splitlines()
            deltas = [json.loads(x[6:])["choices"][0]["delta"] for x in lines if '"delta"' in x]
            parts = [x["tool_calls"][0]["function"] for x in deltas if "tool_calls" in x]
            assert parts[0] == call["function"] | {"arguments": ""}
            assert "".join(x["arguments"] for x in parts) == call["function"]["arguments"]
            value = json.loads(call["function"]["arguments"])["x"]
            assert value in WAYS[call["function"]["name"]]["properties"]["x"]["enum"]
            thoughts = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert (thoughts > 0) == ("chat_template_kwargs" in how)
        assert call["function"]["name"] == "two"
        form = {"guided_regex": "[0-9]{4}", "tools": None}
        message = chat(**form, **thinks)["choices"][0]["message"]
        assert re.fullmatch("[0-9]{4}", message["content"]), message
        refused = httpx.post(server.url + CHAT, json=body | {"tool_choice": named | {"type": "x"}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"
        both = httpx.post(server.url + CHAT, json=body | {**form, "tools": TOOLS, **how})
        assert both.status_code == 400 and both.json()["error"]["param"] == "guided_regex"


def test_a_client_that_goes_while_its_request_is_taken_keeps_no_slot():
    engine, cancelled = Reciting(letters_tokenizer()), []
    service = service_of(engine, END)

    async def main() -> None:
        async def submit(request: Request) -> Handle:
            waits.cancel()
            return Handle(request, cancelled.append)

        engine.submit = submit
        asked = Request(prompt_ids=[1], max_tokens=2)
        waits = asyncio.create_task(service.submit([asked], "prompt"))
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(main())
    assert len(cancelled) == 1 and not service.pending and not service.live


def test_keys_limits_and_pages_of_others(monkeypatch):
    with running(keys=["right", "also right"]) as server:
        url, body = server.url + TEXT, {"prompt": [1], "max_tokens": 1}
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            refused = httpx.post(url, json=body, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"]
            assert httpx.get(server.url + "/metrics", headers=headers).status_code == 401
        right = {"Authorization": "Bearer right"}
        other = {"Authorization": "bearer also right"}
        assert httpx.post(url, json=body, headers=right).status_code == 200
        assert httpx.post(url, json=body, headers=other).status_code == 200
        page = {"Origin": "https://page.example"}
        allowed = httpx.post(url, json=body, headers=right | page).headers
        assert allowed["access-control-allow-origin"] == page["Origin"]
        asks = page | {"Access-Control-Request-Method": "POST"}
        assert httpx.options(url, headers=asks).status_code == 200  # browsers ask without a key
        assert httpx.post(url, content=b" " * 1001, headers=right).status_code == 413
        address = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(address) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (HEADER_BYTES + 1000))
            assert client.recv(100).startswith(b"HTTP/1.1 400"), "a head without an end"
        asked = json.dumps(body)
        for asks in ("Upgrade", "Upgrade, close"):  # as Java's client asks for HTTP/2 at first
            head = [f"POST {TEXT} HTTP/1.1", "Host: x", "Upgrade: h2c", f"Connection: {asks}"]
            head += ["Authorization: Bearer right", f"Content-Length: {len(asked)}"]
            with socket.create_connection(address) as client:
                client.sendall("\r\n".join([*head, "", asked]).encode())
                assert client.recv(100).startswith(b"HTTP/1.1 200"), "a body after that head"
        monkeypatch.setattr(wire, "BODY_SECONDS", 0.2)
        with socket.create_connection(address) as client:
            head = "\r\n".join([f"POST {TEXT} HTTP/1.1", "Host: x", "Content-Length: 9"])
            client.sendall(f"{head}\r\nAuthorization: Bearer right\r\n\r\n{{".encode())
            answer = b"".join(iter(partial(client.recv, 4096), b""))  # until it is closed
            assert answer.startswith(b"HTTP/1.1 408"), "a body without an end"
            assert b"connection: close" in answer.lower()


def test_a_client_that_writes_all_of_a_body_that_is_too_long_reads_why():
    """Its connection is not closed under it, and takes its next request."""
    with running() as server:
        client = http.client.HTTPConnection(*server.url.removeprefix("http://").split(":"))
        with contextlib.closing(client):
            for body, status, code in (
                (b" " * 2**23, 413, "body_too_large"),
                (b"{}", 400, "invalid_type"),
            ):
                client.request("POST", TEXT, body)
                answer = client.getresponse()
                assert answer.status == status
                assert json.loads(answer.read())["error"]["code"] == code


def test_a_page_may_read_an_internal_error(monkeypatch, caplog):
    def broken(*_: Any) -> str:
        raise RuntimeError("planted")

    monkeypatch.setattr(app_module, "prompt_text", broken)
    page = {"Origin": "https://page.example"}
    with running() as server, caplog.at_level("ERROR"):
        asked = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(server.url + "/tokenize", json=asked, headers=page)
        assert answer.status_code == 500 and "made a mistake" in answer.json()["error"]["message"]
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
        assert httpx.get(server.url + "/health").status_code == 200
    assert "planted" in caplog.text  # its traceback, once
    assert caplog.text.count("RuntimeError: planted") == 1


def test_a_request_that_takes_too_long_ends_and_frees_its_slot():
    with running(request_timeout=0.05) as server:
        late = {"prompt": [1], "max_tokens": 150}
        refused = httpx.post(server.url + TEXT, json=late)
        assert refused.status_code == 408 and refused.json()["error"]["code"] == "timeout"
        lines = httpx.post(server.url + TEXT, json=late | {"stream": True}).text.splitlines()
        *_, error, last = [line for line in lines if line]
        assert json.loads(error[6:])["error"]["code"] == "timeout" and last == "data: [DONE]"
        end = time.monotonic() + 10
        while server.engine.stats().running:
            assert time.monotonic() < end
            time.sleep(0.01)
