"""An engine behind the server's routes in their own process, loaded by clients of another."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from jflash.bench.serving.speed import figures
from jflash.records.decoding import GREEDY
from jflash.server.front import Front
from jflash.server.run import listen
from jflash.server.settings import Settings
from jflash.server.start import Rules
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars
from jflash.system.sources import same_paths

NAME = "measured"
PATIENCE = 60.0  # seconds until the server answers
CORES = 4  # for a process of clients: one process for 32 clients was as busy as the server's


def settings_of(engine: Engine, tokenizer: Any, stop_ids: Sequence[int]) -> Settings:
    """What `jflash serve` needs beside an engine, for greedy requests."""
    template = getattr(tokenizer, "chat_template", None)
    return Settings(
        tokenizer=tokenizer,
        name=NAME,
        version="jflash",
        template=template if isinstance(template, str) else "",
        stop_ids=tuple(stop_ids),
        sampling=GREEDY,
        reasoning=False,
        created=int(time.time()),
        max_accept=engine.pair.models.max_accept,
        max_body=2**20,
        slots=engine.max_batch,
        max_queue=1024,
        request_timeout=600.0,
    )


@contextmanager
def served(engine: Engine, settings: Settings) -> Iterator[str]:
    """The address of a server over this process's engine, as `jflash serve` has it."""
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    vocabulary = engine.pair.models.target.config.vocab_size
    grammars = Grammars(settings.tokenizer, vocabulary, settings.stop_ids)
    with Front(listener, Rules([], [], 1.0, 600.0)) as front:
        serving = threading.Thread(target=front.serve, args=(engine, grammars, settings, lambda: 0))
        serving.start()
        try:
            _wait_for(url)
            yield url
        finally:
            front.end()
            serving.join()


def _wait_for(url: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            urlopen(f"{url}/health").close()
            return
        except OSError:
            if time.monotonic() > end:
                raise ValueError(f"the server did not answer within {PATIENCE:g} s") from None
            time.sleep(0.1)


def streamed(
    engine: Engine, url: str, questions: Sequence[str], new: int, clients: int, salt: str
) -> dict[str, Any]:
    """The figures of so many clients that read a stream for each question. Prefixes are found by
    requests of the same salt alone."""
    bodies = [
        {
            "messages": [{"role": "user", "content": question}], "max_tokens": new,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        for question in questions
    ]  # fmt: skip
    processes = max(1, min(clients, (os.cpu_count() or 1) // CORES))
    load = {"url": url, "clients": clients, "processes": processes, "bodies": bodies}
    before = engine.stats()
    command = [sys.executable, "-P", "-m", "jflash.bench.serving.http_clients"]
    paths = os.environ | same_paths()
    done = subprocess.run(
        command, input=json.dumps(load), stdout=subprocess.PIPE, text=True, env=paths
    )
    if done.returncode:
        raise ValueError("the clients ended with an error, which is above")
    seen = json.loads(done.stdout)
    row = figures(before, engine.stats(), seen["seconds"]) | seen
    return row | {"clients": clients, "tokens_per_second": row["new_tokens"] / row["seconds"]}
