"""What an engine tells of itself: plain numbers."""

from dataclasses import dataclass

from jflash.serving.request import FinishReason

SIZES = (1, *(2**i for i in range(3, 15)))  # tokens of a round


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The engine's present state, and its counts since it began.

    At most the batch is `running`; others are `waiting`, also those whose prompts are computed.
    There are `pages` pages of PAGE tokens; no request holds `pages_available` of them, and
    `pages_kept` of these still hold prefixes. `live` adds up the requests of all `calls`. In
    `busy_seconds` at most the device computed, and in `seen_seconds` of them for certain: the
    others began while the host dispatched the program, or ended before it looked. The engine's
    thread worked for `host_seconds` in `rounds`; beside it, programs were dispatched in
    `dispatch_seconds`, among them `chunks` of prompts, with `computed` tokens. `rounds_by_tokens`
    counts the rounds by the tokens that they computed and gave, up to each of SIZES and above.
    """

    waiting: int
    running: int
    pages: int
    pages_available: int
    pages_kept: int
    ended: dict[FinishReason, int]
    prompt_tokens: int
    cached_tokens: int
    computed: int
    new_tokens: int
    drafted: int
    accepted: int
    preempted: int
    rounds: int
    chunks: int
    calls: int
    live: int
    prefill_seconds: float
    decode_seconds: float
    busy_seconds: float
    seen_seconds: float
    host_seconds: float
    dispatch_seconds: float
    rounds_by_tokens: tuple[int, ...]
    steps_by_rows: dict[int, int]  # if the rows of a step are chosen
    device_bytes: int | None  # in use on the first device; None on a CPU
