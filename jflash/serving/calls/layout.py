"""An engine's static sizes, and which of them pay for a pair of models.

Nothing here touches a device.
"""

import math
from typing import Literal, NamedTuple

import jax

from jflash.compiled.shape import Shape
from jflash.devices.mesh import local
from jflash.models.params import decoding_params
from jflash.pair import Models
from pallas_kernels.block_attention import PAGE

Kind = Literal["greedy", "drawn"]
KINDS: tuple[Kind, ...] = ("greedy", "drawn")
MOST_WEIGHTS = 10**9  # more are no small model
# More leave ended slots idle for longer, and fewer let the device wait where a step is short: four
# and six gave 83,011 and 81,794 tokens/s with SmolLM2 at batch 32 (one H200,
# benchmarks/h200-smollm2-serving-host-4.json and -six-steps.json).
STEPS_PER_CALL, STEPS_OF_SMALL = 2, 4
PART_AHEAD, MOST_AHEAD = 4, 8  # of `settled`: one request of so many, and at most


class Layout(NamedTuple):
    """The static sizes; `shape.batch` requests step at once, and `shape.capacity` is PAGE times the
    columns of a table."""

    shape: Shape
    pages: int | None  # None: enough for the longest request in every slot
    steps: int  # of a call
    kinds: tuple[Kind, ...] = KINDS  # of requests that it serves
    states: int = 0  # copies of a slot's recurrent states that prefixes keep
    prompts: int | None = None  # that a pass computes at most; None: as many as pay
    counts: tuple[int, ...] | None = None  # of slots that a call may serve; None: those that pay
    ahead: int | None = None  # requests whose prompts wait computed; None: as many as pay

    @property
    def columns(self) -> int:
        return self.shape.capacity // PAGE

    @property
    def slots(self) -> int:
        """Of the requests that step, and of those whose prompts are computed ahead."""
        assert self.ahead is not None, "see `settled`"
        return self.shape.batch + self.ahead

    @property
    def page_count(self) -> int:
        """Of the pools."""
        return self.slots * self.columns if self.pages is None else self.pages


def settled(models: Models, layout: Layout) -> Layout:
    """The layout with its pages, and with its number of requests whose prompts are computed ahead,
    before a text of those that step has ended.

    They have slots, and as soon as the device finds that a text has ended, the next one steps in
    its place: the host sees an end one call later. And so prompts need not come one by one, as
    texts end. Unless the layout says otherwise none is ahead where `takes_some` is false, nor of a
    small target: where the host is the slower one, a fuller call gained nothing.
    """
    if layout.ahead is None:
        ahead = min(MOST_AHEAD, layout.shape.batch // PART_AHEAD)
        pays = takes_some(models) and not small(models)
        layout = layout._replace(ahead=ahead if pays else 0)
    return layout._replace(pages=layout.page_count)


def takes_some(models: Models) -> bool:
    """Whether calls that step some of the slots pay, and change no text. On a CPU programs take
    long to compile."""
    return models.kernels.attention == "canonical" and refusal_of_some(models) is None


def steps_of_call(models: Models, steps: int | None = None) -> int:
    """The steps of a call: those given, or as many as keep the device at work.

    ValueError for more than a sequence can take, for whose tokens a call would only keep room.
    """
    if steps is not None:
        positions = min(config.max_position_embeddings for config in models.configs)
        if steps > positions:
            raise ValueError(
                f"steps_per_call {steps}: a sequence has no more steps than the model's "
                f"{positions} positions"
            )
        return steps
    dispatched = models.kernels.attention == "canonical"  # a CPU computes them at once
    return STEPS_OF_SMALL if dispatched and small(models) else STEPS_PER_CALL


def small(models: Models) -> bool:
    """Whether a device's part of the target has so few weights that the host is the slower one."""
    return weights(models) <= MOST_WEIGHTS


def weights(models: Models) -> int:
    """The number of those that decoding reads of a device's part of the target."""
    leaves = jax.tree.leaves(decoding_params(local(models).target.config))
    return sum(math.prod(leaf.stored) for leaf in leaves)


def windows(models: Models) -> list[int]:
    """Those of the layers that have one."""
    every = (mixer.window for config in models.configs for mixer in config.mixers)
    return [window for window in every if window is not None]


def recurrent(models: Models) -> bool:
    """Whether a layer has a state that every row changes."""
    return any(config.deltas for config in models.configs)


def refusal_of_some(models: Models) -> str | None:
    """Why all slots step together, if they must."""
    return None if models.one_arithmetic else "a prompt's bits may depend on the others"
