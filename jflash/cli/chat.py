"""chat: turns with a model, each answer shown as it is decoded.

A turn that does not fit, a bad line and Ctrl-C end an answer at most, never the conversation.
"""

import functools
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jflash.checks import check_request
from jflash.cli.command import Options
from jflash.cli.generate import answers_in_channels, configured, loaded, use_colour, with_sampling
from jflash.cli.interrupts import first_interrupt
from jflash.cli.jax_setup import note_idle_gpu
from jflash.cli.live_text import Piece, channel_pieces, paint, texts
from jflash.cli.options.pair import sampling
from jflash.cli.prompts import checked_text, template_options
from jflash.cli.results import tokens_per_second
from jflash.evals.report import number
from jflash.generate import Chunk, Generation, Pair, stream
from jflash.io import encode_prompt
from jflash.io.text import decode
from jflash.memory import check_decoding
from jflash.records.decoding import Decoding
from jflash.system.files import UTF_8

COMMANDS = "/reset forgets the conversation, /quit ends"
SHORTEST = 64  # tokens of a first prompt that must fit the device's memory


class Talk(NamedTuple):
    """A loaded pair, and the options of its answers."""

    pair: Pair
    encode: Callable[..., list[int]]  # of a line, and of the `history` before it
    pieces: Callable[[Iterable[Chunk]], Iterator[Piece]]  # of an answer
    decoding: Decoding


def run(options: Options) -> None:
    if sys.stdin is None:
        raise ValueError("standard input is closed: no turn can be read")
    talk = _load(options)
    live = sys.stdin.isatty()
    if live:
        print(f"{COMMANDS}; Ctrl-C stops an answer", file=sys.stderr)
    history: list[tuple[str, str]] = []
    for line in _lines(live):
        if line == "/quit":
            break
        if line == "/reset":
            history.clear()
        elif line.startswith("/"):
            print(f"no command {line.split()[0]!r}: {COMMANDS}", file=sys.stderr)
        elif line:
            _turn(talk, line, history, live)


def _load(options: Options) -> Talk:
    """Loads the pair; ValueError, before a weight is read, for one that cannot talk."""
    files = configured(options, batch=1)
    tokenizer = files.target.tokenizer()
    decoding = Decoding(
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=files.target.stop_ids(tokenizer),
        sampling=sampling(options),
        seed=options.seed,
    )
    files = with_sampling(files, [decoding], options.draft_rule)
    encode = functools.partial(encode_prompt, tokenizer, **template_options(options))
    check_request(files.models, encode("Hello"), decoding)
    note_idle_gpu()
    check_decoding(files.models, 1, SHORTEST, options.max_new_tokens)
    pair = loaded(files, progress=sys.stderr.isatty())
    jax.block_until_ready(pair.params)
    pieces = functools.partial(_whole, tokenizer=tokenizer)
    if answers_in_channels(options, tokenizer):
        pieces = functools.partial(channel_pieces, tokenizer=tokenizer)
    return Talk(pair, encode, pieces, decoding)


def _whole(chunks: Iterable[Chunk], tokenizer: Any) -> Iterator[Piece]:
    """The pieces of an answer without channels, whose thoughts the chat template leaves out."""
    return (Piece(text, text) for text in texts(chunks, functools.partial(decode, tokenizer)))


def _lines(live: bool) -> Iterator[str]:
    """The user's lines to the end of the input, without blanks around them."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # `checked_text` refuses a line that is no UTF-8
        encoding = None if live else UTF_8  # a terminal's is that of its locale
        sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")
    if live:
        import readline  # noqa: F401  (gives input() history and editing)
    while True:
        try:
            line = input("> ") if live else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not live:
                raise
            print("\n/quit or Ctrl-D ends", file=sys.stderr)
            continue
        if not live and not line:
            return
        yield line.strip()


def _turn(talk: Talk, line: str, history: list[tuple[str, str]], live: bool) -> None:
    """Asks, shows and remembers; a line on stderr for what does not fit."""
    try:
        ids = talk.encode(checked_text(line), history=history)
        check_request(talk.pair.models, ids, talk.decoding)
        new = talk.decoding.max_new_tokens
        check_decoding(talk.pair.models, 1, len(ids), new)
        text, statistics = _answer(talk, ids)
    except ValueError as error:
        print(f"{' '.join(str(error).split())} (/reset begins anew)", file=sys.stderr)
        return
    except KeyboardInterrupt:  # pressed twice, or before the answer began
        if not live:
            raise
        print("\nstopped", file=sys.stderr)
        return
    print(statistics, file=sys.stderr)
    history.append((line, text))


def _answer(talk: Talk, ids: list[int]) -> tuple[str, str]:
    """Streams to stdout until the answer ends or Ctrl-C is pressed; what of its text stays in the
    conversation, and its statistics."""
    sizes: list[int] = []  # tokens of the prefill and of each step
    begin, last = 0.0, None
    colour = use_colour()
    with first_interrupt("") as stopped:

        def chunks() -> Iterator[Chunk]:
            nonlocal begin, last
            for chunk in stream(talk.pair, ids, talk.decoding):
                begin = begin or time.perf_counter()
                sizes.append(len(chunk.token_ids))
                last = chunk.generation
                yield chunk
                if stopped():
                    return

        answer = ""
        for step, piece in enumerate(talk.pieces(chunks())):
            answer += piece.answer
            print(paint(piece.shown, step, colour) if colour else piece.shown, end="", flush=True)
    print(flush=True)
    return answer, _statistics(sizes, time.perf_counter() - begin, last)


def _statistics(sizes: list[int], seconds: float, generation: Generation | None) -> str:
    """τ and tokens a second in a line; a stopped answer has no generation, and counts so far."""
    steps, tokens = len(sizes) - 1, sum(sizes[1:])
    speed = tokens / seconds if steps else None
    if generation is not None:
        speed = tokens_per_second([generation])
    text = f"{sum(sizes)} tokens · τ {number(tokens / steps if steps else None)} · "
    return f"{text}{number(speed)} tokens/s" + (" · stopped" if generation is None else "")
