"""The process that speaks HTTP, as the process with the engine sees it.

Text, JSON and HTTP take as long as the engine's own work, and one thread of a process runs Python
at a time: so they have a process of their own, `jflash.server.process`, which starts while the
engine still loads.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

from jflash.server.run import open_to_clients
from jflash.server.settings import Settings
from jflash.server.start import Rules, Start
from jflash.serving.engine import Engine
from jflash.serving.grammar import Grammars
from jflash.serving.pipe.answering import answer
from jflash.serving.pipe.remote import News, Sizes
from jflash.system.sources import same_paths


class Front:
    """The process, which ends at the latest with this context manager."""

    def __init__(self, listener: socket.socket, rules: Rules) -> None:
        self._listener, self._rules, self._begun = listener, rules, False
        self._pipe, end = Pipe()
        handles = end.fileno(), listener.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jflash.server.process", *map(str, handles)],
            env=os.environ | same_paths() | {"JAX_PLATFORMS": "cpu"},
            pass_fds=handles,
            start_new_session=True,  # a terminal's signals reach it through `end` alone
        )
        end.close()

    def __enter__(self) -> "Front":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._pipe.close()  # the process ends without its engine
        if not self._begun:
            self._process.kill()
        self._process.wait()

    def serve(
        self, engine: Engine, grammars: Grammars, settings: Settings, compiled: Callable[[], int]
    ) -> bool:
        """Serves until SIGTERM or SIGINT, `end`, or a failure; False after a failure. ValueError
        if another server has taken the port."""
        open_to_clients(self._listener)
        sizes = Sizes(engine.max_context, engine.pair.models.target.config.vocab_size)
        first = News([], [], engine.stats(), compiled())
        with _signals_go_to(self._process.send_signal):
            self._begun = True
            self._pipe.send(Start(settings, sizes, self._rules, first))
            self._listener.close()
            answer(engine, grammars, self._pipe, compiled)
            return self._process.wait() == 0

    def end(self) -> None:
        """Ends the server as SIGTERM does: what runs may go on for the shutdown's timeout."""
        self._process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def _signals_go_to(send: Callable[[int], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: send(number)) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
