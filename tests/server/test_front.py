"""The process that speaks HTTP, beside a small engine: one of the two fails, hangs or is killed."""

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from jflash.io import load_tokenizer
from jflash.records.decoding import Sampling
from jflash.server.front import Front
from jflash.server.run import LOOK_EVERY, listen, watch
from jflash.server.settings import Settings
from jflash.server.start import Rules
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars
from jflash.serving.stats import Stats
from jflash.system.embedded import EMBEDDED_PAIR
from tests.support.letters import END, letters_tokenizer
from tests.support.pairs import one_arithmetic, random_pair
from tests.support.reciting import NOTHING, Reciting, service_of

TEXT = "/v1/completions"
LONG = {"prompt": [1, 2, 3], "max_tokens": 150, "ignore_eos": True, "stream": True}
STARTED, ENDED = 120.0, 60.0  # seconds
HANG = 1.0


class Served:
    """A server of two processes: this one has the engine."""

    def __init__(self, shutdown: float) -> None:
        pair = one_arithmetic(random_pair())
        self.engine = Engine(pair, max_batch=2, max_context=160, kinds=("drawn",))
        tokenizer = load_tokenizer(EMBEDDED_PAIR / "target")
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.front = Front(listener, Rules(["key"], [], shutdown, HANG))
        settings = Settings(
            tokenizer=tokenizer, name="small", version="jflash", template="", stop_ids=(2,),
            sampling=Sampling(), reasoning=False, created=0, max_accept=3, max_body=1000,
            slots=2, max_queue=4, request_timeout=60.0,
        )  # fmt: skip
        self.well: bool | None = None

        def serve() -> None:
            grammars = Grammars(tokenizer, 4096, [2])
            self.well = self.front.serve(self.engine, grammars, settings, lambda: 0)

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    @property
    def process(self) -> subprocess.Popen:
        return self.front._process

    def health(self) -> httpx.Response:
        """Of a server that may still start."""
        end = time.monotonic() + STARTED
        while True:
            try:
                return httpx.get(f"{self.url}/health")
            except httpx.TransportError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.1)

    def stream(self) -> Any:
        head = {"Authorization": "Bearer key"}
        return httpx.stream("POST", self.url + TEXT, json=LONG, headers=head, timeout=ENDED)


@pytest.fixture
def served(request) -> Iterator[Served]:
    """A mark may give the seconds of its shutdown."""
    found = Served(getattr(request, "param", 5.0))
    with found.front:
        try:
            assert found.health().status_code == 200
            yield found
        finally:
            found.process.kill()
            found.thread.join(ENDED)
    with contextlib.suppress(RuntimeError):
        found.engine.close()


def test_a_device_that_hangs_ends_streams_health_and_both_processes(served):
    let_go, round_ = threading.Event(), served.engine._loop.round

    def hangs(*given: Any) -> None:
        if served.engine.stats().new_tokens > 9:
            let_go.wait(ENDED)
        round_(*given)

    served.engine._loop.round = hangs
    try:
        with served.stream() as answer:
            lines = [line for line in answer.iter_lines() if line]
        error = json.loads(lines[-2][6:])["error"]
        assert (error["code"], len(lines) > 3) == ("engine_failed", True)
        health = served.health()
        assert health.status_code == 503
        assert "has not answered for 1 seconds" in health.json()["error"]["message"]
        assert served.process.wait(ENDED) == 1
    finally:
        let_go.set()
    served.thread.join(ENDED)
    assert served.well is False


def test_an_idle_engine_that_hears_nothing_ends_the_server(served):
    """As after SIGSTOP: no news come, and the request stays in the pipe."""
    let_go, stats, submit = threading.Event(), served.engine.stats, served.engine.submit

    def stopped[T](do: Callable[..., T]) -> Callable[..., T]:
        return lambda *given: let_go.wait(ENDED) and do(*given)

    served.engine.stats, served.engine.submit = stopped(stats), stopped(submit)
    try:
        time.sleep(2 * HANG)  # nobody waits
        assert served.health().status_code == 200
        head = {"Authorization": "Bearer key"}
        refused = httpx.post(served.url + TEXT, json=LONG, headers=head, timeout=ENDED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        assert "has not answered for 1 seconds" in refused.json()["error"]["message"]
        assert served.process.wait(ENDED) == 1
    finally:
        let_go.set()
    served.thread.join(ENDED)
    assert served.well is False


def test_a_prompt_of_many_chunks_is_progress():
    """The watch's figures of a long prompt: only the computed tokens grow."""
    chunks, ended = iter(range(10**6)), list[bool]()
    engine = Reciting(letters_tokenizer())
    engine.stats = lambda: replace(Stats(**NOTHING), running=1, computed=next(chunks))
    service = service_of(engine, END)

    async def watched() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(watch(service, 2 * LOOK_EVERY, lambda: ended.append(True)), 2.5)

    asyncio.run(watched())
    assert not service.failures and not ended


def test_the_http_process_has_no_jax(served):
    """It turns text into tokens, which takes none of its 230 MB."""
    with served.stream() as answer:
        assert sum(line.startswith("data: ") for line in answer.iter_lines()) > 3
    mapped = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "tokenizers" in mapped and "jaxlib" not in mapped


def check_cancelled(engine, count: int = 1) -> None:
    """The requests free their slots soon."""
    end = time.monotonic() + ENDED
    while engine.stats().running:
        assert time.monotonic() < end, "a slot is stuck"
        time.sleep(0.05)
    assert engine.stats().ended == {"cancelled": count}


def test_whoever_kills_the_http_process_ends_the_server(served):
    """What runs is cancelled, and the exit code is that of a failure."""
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)), served.stream() as answer:
        for _ in answer.iter_lines():
            served.process.kill()
    served.thread.join(ENDED)
    assert served.well is False
    check_cancelled(served.engine)


def test_sigterm_lets_what_runs_finish(served):
    with served.stream() as answer:
        lines = answer.iter_lines()
        next(lines)
        served.front.end()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    served.thread.join(ENDED)
    assert served.well is True


@pytest.mark.parametrize("served", [1.0], indirect=True)
def test_what_outlasts_the_shutdowns_time_is_told_so(served, capfd, monkeypatch):
    """A stream ends with the error, a plain answer is one, and so is one that waits for its form;
    their slots come free, and the server has ended well."""
    round_, plain, head = served.engine._loop.round, dict(LONG), {"Authorization": "Bearer key"}
    del plain["stream"]
    form = plain | {"response_format": {"type": "json_object"}, "ignore_eos": False}
    compiling = threading.Event()

    def never_soon(*_: Any) -> None:
        compiling.set()
        time.sleep(4)
        raise ValueError("too late")

    monkeypatch.setattr(Grammars, "compile", never_soon)

    def slow(*given: Any) -> None:
        time.sleep(0.3)  # of each of the 30 rounds or more that its text takes
        round_(*given)

    served.engine._loop.round = slow
    with ThreadPoolExecutor(2) as pool, served.stream() as answer:
        lines = answer.iter_lines()
        next(lines)
        asked, waits = (
            pool.submit(httpx.post, served.url + TEXT, json=body, headers=head, timeout=ENDED)
            for body in (plain, form)
        )
        while served.engine.stats().running < 2:
            time.sleep(0.05)
        assert compiling.wait(ENDED)
        began = time.monotonic()
        served.front.end()
        *_, error, done = [line for line in lines if line]
        both = asked.result(), waits.result()
    assert 0.5 < time.monotonic() - began < 5
    assert json.loads(error[6:])["error"]["code"] == "shutting_down" and done == "data: [DONE]"
    for refused in both:
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    served.thread.join(ENDED)
    assert served.well is True
    check_cancelled(served.engine, 2)
    assert "Traceback" not in capfd.readouterr().err


def test_without_an_engine_the_process_ends():
    """As after a pair that could not be loaded."""
    with Front(listen("127.0.0.1", 0), Rules([], [], 5.0, 5.0)) as front:
        process = front._process
    assert process.returncode is not None
