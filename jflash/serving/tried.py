"""Grammars that are tried in another process first, since clients may give any."""

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jflash.serving.grammar import KEPT, Grammar, Grammars, Kind, source_of
from jflash.serving.trial import SECONDS, Vocabulary
from jflash.system.sources import same_paths

TRIAL = Path(__file__).with_name("trial.py")
_turn = threading.Lock()


class TriedGrammars(Grammars):
    """Compiles no grammar that takes a core more than SECONDS: ValueError instead."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, vocabulary, stop_ids)
        text = tokenizer.backend_tokenizer.to_str()
        self._of_trials = Vocabulary(text, self._known, tuple(stop_ids))

    def _read(self, kind: Kind, text: str) -> Grammar:
        if _is_slow(self._of_trials, source_of(kind, text)):
            why = f"compiling it takes more than {SECONDS} seconds of a core"
            raise ValueError(f"{why}: give a simpler one")
        return super()._read(kind, text)


@functools.lru_cache(maxsize=KEPT)
def _is_slow(vocabulary: Vocabulary, source: str) -> bool:
    with _turn:
        pipe = _process(vocabulary)
        try:
            pipe.send(source)
            return pipe.recv()
        except (EOFError, OSError):
            _process.cache_clear()  # the next one gets a new process
            raise RuntimeError("the process that tries grammars has ended") from None


@functools.cache
def _process(vocabulary: Vocabulary) -> Connection:
    """The pipe to the process of a vocabulary, which starts with the first grammar."""
    here, there = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", str(TRIAL), str(there.fileno())],
        env=os.environ | same_paths(), pass_fds=(there.fileno(),),
    )  # fmt: skip
    there.close()
    atexit.register(_end, process, here)
    here.send(vocabulary)
    return here


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    pipe.close()
    with contextlib.suppress(OSError):
        process.wait()
