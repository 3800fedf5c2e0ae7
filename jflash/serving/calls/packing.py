"""What goes up and comes down: a request as one array of numbers, and a call's report as another.

The host uploads and reads one array a call.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.compiled.shape import Shape
from jflash.pair import Models
from jflash.rows import SURVEYED, Survey
from jflash.serving.calls.layout import Layout
from jflash.serving.request import BIASED, Request, Top
from jflash.state import Sequences, State
from jflash.tokens.logprobs import read

HEAD = 17  # numbers of a row before its stop ids and tokens
CONTROL = 4  # numbers of a pass over a prompt before its table: slot, offset, end and flags
STEPS, FRESH = 1, 2  # flags: the slot steps after the pass; its states begin empty


class Row(NamedTuple):
    """A slot's new content: a request and the tokens of its text so far."""

    slot: int
    request: Request
    seed: int
    tokens: list[int]
    bias: Mapping[int, float] = {}


def row_of(row: Row, layout: Layout, max_accept: int) -> Int[np.ndarray, " _"]:
    """A row as one array of numbers, which a pass takes apart."""
    request, sampling = row.request, row.request.sampling
    limit = len(request.prompt_ids) + request.max_tokens
    accept = max_accept if request.speculate else 0
    out = np.zeros(row_size(layout.shape), np.int32)
    out[:5] = row.slot, len(row.tokens), limit, accept, min(sampling.top_k, 2**31 - 1)
    out[5:7] = np.array([row.seed, request.index], np.uint32).view(np.int32)
    floats = [sampling.temperature, sampling.top_p, sampling.min_p]
    floats += [request.repetition_penalty, request.frequency_penalty, request.presence_penalty]
    out[7:13] = np.array(floats, np.float32).view(np.int32)
    out[13:15] = len(request.prompt_ids), len(request.prompt_ids) + request.min_tokens
    out[15] = max(request.top_logprobs, request.prompt_logprobs or 0)
    out[16] = (request.logprobs_mode == "processed") + 2 * request.best_drafts
    stops = out[HEAD : HEAD + layout.shape.stop_slots]
    stops[:] = -1
    stops[: len(request.stop_ids)] = request.stop_ids
    first = HEAD + layout.shape.stop_slots
    out[first : first + len(row.tokens)] = row.tokens
    ids, bias = np.full(BIASED, -1, np.int32), np.zeros(BIASED, np.float32)
    ids[: len(row.bias)] = list(row.bias)
    bias[: len(row.bias)] = list(row.bias.values())
    out[-2 * BIASED :] = np.concatenate([ids, bias.view(np.int32)])
    return out


def row_size(shape: Shape) -> int:
    """Numbers of a packed row."""
    return HEAD + shape.stop_slots + shape.capacity + 2 * BIASED


def pass_of(
    control: list[int], table: Int[np.ndarray, "1 _"], row: Int[np.ndarray, " _"]
) -> Int[np.ndarray, "1 _"]:
    """A pass over a prompt as one array: its control, its table of pages and the slot's row."""
    return np.concatenate([np.asarray(control, np.int32), table[0], row])[None]


def no_pass(slot: int, table: Int[np.ndarray, "1 _"], shape: Shape) -> Int[np.ndarray, "1 _"]:
    """A pass over nothing beside others, which changes nothing: `slot` is past all slots, and
    `table` names no page."""
    return pass_of([slot, 0, 1, 0], table, np.zeros(row_size(shape), np.int32))


def mask_words(models: Models) -> int:
    """32-bit words of a mask over the target's vocabulary."""
    return -(-models.target.config.vocab_size // 32)


class Report(NamedTuple):
    """The host's view of a call; see `all_taken` and `surveyed`.

    `tops` has the ids and the bits of the most probable tokens, where a program knows them.
    """

    numbers: Int[Array, "B _"]
    tops: Int[Array, "B _ _"] | None


def report_of(
    before: Sequences, state: State, slots: Int[Array, " B"], width: int, steps: int
) -> Report:
    """What `steps` steps of blocks of `width` rows added to the sequences of these slots; see
    `run`."""
    s = state.sequences

    def cut(x: Array, first: Array, count: int) -> Array:
        index = first[:, None] + jnp.arange(count)
        return jnp.take_along_axis(x, jnp.minimum(index, x.shape[1] - 1), axis=1)

    ends = jnp.stack([s.steps - before.steps, s.done.astype(jnp.int32), slots], axis=1)
    numbers, tops = [cut(s.tokens, before.length, width * steps)], None
    if s.logprobs is not None:
        chosen, tops = read(s.logprobs.scores, before.length, width * steps)
        numbers.append(chosen)
    else:
        numbers.append(jnp.zeros_like(numbers[0]))
    numbers += [cut(s.acceptance_lengths, before.steps, steps), ends]
    if state.survey is not None:
        counts, batch = state.survey.counts, len(s.length)
        numbers.append(jnp.pad(counts, (0, -len(counts) % batch)).reshape(batch, -1))
    return Report(jnp.concatenate(numbers, axis=1), tops)


def surveyed(numbers: Int[np.ndarray, "B _"], width: int, steps: int) -> Survey:
    """The survey of all calls so far, from the report of one of models with rows."""
    counts = numbers[:, _own(width, steps) :].reshape(-1)[:SURVEYED]
    assert len(counts) == SURVEYED, "models with rows keep a survey"
    return Survey(counts)


def _own(width: int, steps: int) -> int:
    """The numbers of a slot's row that are about this slot; the last is the slot."""
    return 2 * width * steps + steps + 3


class Taken(NamedTuple):
    """A slot's part of a report: the tokens of each step, and whether the text has ended."""

    steps: list[list[int]]
    logprobs: list[list[float]] | None
    done: bool
    tops: list[list[Top]] | None = None


def all_taken(report: Report, width: int, steps: int, scored: bool) -> dict[int, Taken]:
    """What a `run`'s report has of each slot that stepped, with the logprobs if `scored`, and with
    the most probable tokens if they were read."""
    numbers, most = np.asarray(report.numbers), width * steps
    tops = None if report.tops is None else np.asarray(report.tops)
    # One conversion for all slots, which is less of the host's time than one for each.
    texts, ends = numbers[:, :most].tolist(), numbers[:, 2 * most : _own(width, steps)].tolist()
    logprobs = floats(numbers[:, most : 2 * most]).tolist() if scored else None
    found = dict[int, Taken]()
    for i, (text, (*lengths, count, done, slot)) in enumerate(zip(texts, ends, strict=True)):
        stops = list(itertools.accumulate(lengths[:count]))
        cuts = list(zip([0, *stops], stops, strict=False))
        likely = None if tops is None else [tops_of(tops[i, a:b]) for a, b in cuts]
        of_each = None if logprobs is None else [logprobs[i][a:b] for a, b in cuts]
        found[slot] = Taken([text[a:b] for a, b in cuts], of_each, bool(done), likely)
    return found


def floats(bits: Int[np.ndarray, "*lead"]) -> Float[np.ndarray, "*lead"]:
    """The numbers whose bits these are."""
    return np.ascontiguousarray(bits).view(np.float32)


def tops_of(rows: Int[np.ndarray, "_ _"]) -> list[Top]:
    """The most probable tokens of each place."""
    ids, top = np.split(rows, 2, axis=1)
    pairs = zip(ids.tolist(), floats(top).tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]
