"""`python -P trial.py PIPE`: tries grammars, each in a child that ends when it takes too long.

llguidance looks at its limits between two steps of its work, and one step may take it minutes. This
file runs by itself, and imports nothing slow; `tried.py` asks it.
"""

import os
import resource
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

SECONDS = 2  # of a core, for one grammar
STACK = 2**29  # bytes, as for those that are compiled


class Vocabulary(NamedTuple):
    """What a tokenizer of llguidance is made of."""

    text: str  # tokenizer.json
    size: int
    stop_ids: tuple[int, ...]


def main() -> None:
    from llguidance import LLTokenizer

    pipe = Connection(int(sys.argv[1]))
    text, size, stop_ids = pipe.recv()
    tokens = LLTokenizer(text, n_vocab=size, eos_token=list(stop_ids))
    while True:
        try:
            source: str = pipe.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            _try(tokens, source)
        pipe.send(os.WIFSIGNALED(os.waitpid(child, 0)[1]))


def _try(tokens: Any, source: str) -> None:
    """Ends this process: by a signal if the grammar takes too much."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_begin, args=(tokens, source))
    thread.start()
    thread.join()
    os._exit(0)


def _begin(tokens: Any, source: str) -> None:
    """Compiles a grammar, and makes the mask of the first token."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, source, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    main()
