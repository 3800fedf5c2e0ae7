"""An engine behind the server's routes, loaded by clients of another process."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jflash.bench.serving_speed import figures
from jflash.decoding import GREEDY
from jflash.server.app import make_app
from jflash.server.metrics import Metrics
from jflash.server.run import listen, server_of
from jflash.server.service import Service
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars

ROOT = Path(__file__).parents[2]  # the clients are of the same tree
NAME = "measured"


def service_of(engine: Engine, tokenizer: Any, stop_ids: Sequence[int]) -> Service:
    """What `jflash serve` makes of an engine, for greedy requests."""
    models = engine.pair.models
    template = getattr(tokenizer, "chat_template", None)
    return Service(
        engine=engine,
        grammars=Grammars(tokenizer, models.target.config.vocab_size, stop_ids),
        tokenizer=tokenizer,
        name=NAME,
        version="jflash",
        template=template if isinstance(template, str) else "",
        stop_ids=tuple(stop_ids),
        sampling=GREEDY,
        reasoning=False,
        created=int(time.time()),
        metrics=Metrics(NAME, models.max_accept, engine.stats),
        max_body=2**20,
        max_queue=1024,
        request_timeout=600.0,
    )


@contextmanager
def served(service: Service) -> Iterator[str]:
    """The address of a server of this process."""
    listener = listen("127.0.0.1", 0)
    server = server_of(make_app(service, api_keys=[], origins=[]), 1.0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def streamed(
    service: Service, url: str, questions: Sequence[str], new: int, clients: int
) -> dict[str, Any]:
    """The figures of so many clients that read a stream for each question."""
    bodies = [
        {
            "messages": [{"role": "user", "content": question}], "max_tokens": new,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }
        for question in questions
    ]  # fmt: skip
    task = json.dumps({"url": url, "clients": clients, "bodies": bodies})
    before = service.engine.stats()
    command = [sys.executable, "-m", "jflash.bench.http_clients"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=task, stdout=subprocess.PIPE, text=True, env=paths)
    if done.returncode:
        raise ValueError("the clients ended with an error, which is above")
    seen = json.loads(done.stdout)
    row = figures(before, service.engine.stats(), seen["seconds"]) | seen
    return row | {"clients": clients, "tokens_per_second": row["new_tokens"] / row["seconds"]}
