"""Steps of a real pair: how many drafts each accepted, and the drafter's confidence at each place.

A recording holds whole answers, those of most tokens a step, so many that their mean is the wanted
one. It is a small JSON file; jflash.bench.serving.replay plays it back.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jflash.compiled.programs import compile_programs
from jflash.compiled.shape import Shape, capacity_for, make_request, new_state
from jflash.generate import Pair
from jflash.pair import Params
from jflash.records.decoding import Decoding
from jflash.speculative import commit, draft, verify
from jflash.state import State

AT_ONCE = 32  # answers that are recorded at once
Steps = list[list[int | float]]  # the accepted drafts of each step, then its confidences


class Recording(NamedTuple):
    """The steps of a pair in their order: plain numbers, so that they can name a program.

    N recorded steps of D drafts.
    """

    accepted: tuple[int, ...]  # N
    confidences: tuple[tuple[float, ...], ...]  # N × D

    @property
    def width(self) -> int:
        return len(self.confidences[0]) + 1

    @property
    def tokens_a_step(self) -> float:
        return 1 + sum(self.accepted) / len(self.accepted)


def read_recording(file: Path) -> Recording:
    """ValueError, naming the file, for one that is no recording."""
    try:
        steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
        found = Recording(
            tuple(int(step[0]) for step in steps),
            tuple(tuple(float(x) for x in step[1:]) for step in steps),
        )
        widths = {len(row) for row in found.confidences}
        if len(widths) != 1 or not all(0 <= x < found.width for x in found.accepted):
            raise ValueError("its steps are of several widths, or accept more than they draft")
        return found
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} is no recording of steps: {error}") from None


def recorded(
    pair: Pair, prompts: Sequence[Sequence[int]], decoding: Decoding, at_once: int = AT_ONCE
) -> list[Steps]:
    """The steps of each answer, so many decoded at once by one program.

    A step that its block has no room for is left out.
    """
    models, batch = pair.models, min(at_once, len(prompts))
    longest, width = max(map(len, prompts)), models.block_size
    stops = len(decoding.stop_token_ids)
    capacity = capacity_for(longest, decoding.max_new_tokens, width, 128)
    shape = Shape.of(batch, capacity, stops, 128)
    prefill = compile_programs(models, pair.params, shape).prefill
    surveyed = replace(models, rows=batch * width)  # whole blocks, with confidences

    @jax.jit
    def step(params: Params, state: State) -> tuple[State, Any]:
        before = state.sequences
        proposal, state = draft(surveyed, params, state)
        verdict, state = verify(surveyed, params, state, proposal)
        whole = ~before.done & (before.limit - before.length >= width)
        seen = whole, verdict.accepted, proposal.confidence
        return commit(surveyed, params, state, verdict), seen

    found: list[Steps] = [[] for _ in prompts]
    for begin in range(0, len(prompts), batch):
        state = new_state(models, shape)
        for i, prompt in enumerate(prompts[begin : begin + batch]):
            key = jax.random.key(0)
            request = make_request(shape, list(prompt), decoding, models.max_accept, key)
            state = prefill(pair.params, state, jnp.int32(i), request)
        while not bool(state.sequences.done.all()):
            state, seen = step(pair.params, state)
            for i, (whole, accepted, sure) in enumerate(zip(*jax.device_get(seen), strict=True)):
                if whole:
                    how_sure = [round(float(x), 3) for x in sure]
                    found[begin + i].append([int(accepted), *how_sure])
    return found


def of_mean(answers: Sequence[Steps], tokens_a_step: float) -> list[Steps]:
    """The most of the answers, best first, whose steps together commit so many tokens each."""

    def mean(some: Sequence[Steps]) -> float:
        steps = [step for answer in some for step in answer]
        return 1 + sum(step[0] for step in steps) / max(1, len(steps))

    best = sorted((a for a in answers if a), key=lambda answer: -mean([answer]))
    enough = [i for i in range(1, len(best) + 1) if mean(best[:i]) >= tokens_a_step]
    if not enough:
        raise ValueError(f"no answer commits {tokens_a_step} tokens a step: give more questions")
    count = max(enough)
    return best[:count]
