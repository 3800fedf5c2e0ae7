"""An engine's static sizes, and which of them pay for a pair of models.

Nothing here touches a device.
"""

import math
from typing import Literal, NamedTuple

import jax

from jflash.compiled.shape import LARGE_CHUNK, PREFILL_CHUNK, Shape, chunk_sizes
from jflash.devices.mesh import local
from jflash.models.params import decoding_params
from jflash.pair import Models
from pallas_kernels.block_attention import PAGE

Kind = Literal["greedy", "drawn"]
KINDS: tuple[Kind, ...] = ("greedy", "drawn")
PROMPTS, MOST_WEIGHTS = 4, 10**9  # of `several_prompts`; more are no small model
# Tokens of a prompt that a pass of a target of so few weights computes: four prompts' 1,024 rows
# take 2,048 N operations, 1.2 ms of an H200 at N = 4·10⁸ by arithmetic. SmolLM2, with 1.3·10⁸, was
# timed.
LONG_PASS, FEW_WEIGHTS = 256, 4 * 10**8
# Tokens of a pass over a target with experts, of which a few hundred rows read nearly all that many
# do: 2,048 tokens at once took 9.6 ms in place of 16.4 with eight layers of Qwen3-Coder-30B-A3B
# and 17.7 in place of 24.8 with Qwen3.5-35B-A3B's; Qwen3-8B gained nothing (one H200, 2026-11-29).
WIDE_CHUNK = 2048
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
    long to compile, and several GPUs were not timed."""
    one_gpu = models.kernels.attention == "canonical" and models.mesh is None
    return one_gpu and refusal_of_some(models) is None


def pass_sizes(models: Models, shape: Shape) -> tuple[int, ...]:
    """Tokens of a prompt that one pass may compute, ascending: `chunk_sizes`, and a page where no
    size changes a bit. A prompt that came before has its full pages, so no more is left of it.

    A very small target computes a few hundred rows in less time than the host needs to dispatch
    them, so what counts is how few passes there are: the smallest one holds most prompts.
    """
    sizes = chunk_sizes(models, shape)
    if not (models.one_arithmetic and models.kernels.attention == "canonical"):
        return sizes
    if shape.chunk % LONG_PASS == 0 and takes_long(models):
        return tuple(sorted({LONG_PASS, shape.chunk}))
    return (PAGE, *sizes) if sizes[0] > PAGE else sizes


def takes_long(models: Models) -> bool:
    """Whether the shortest pass of an engine holds LONG_PASS tokens, if its chunk does. Recurrent
    layers keep states at the ends of short passes."""
    alone = models.mesh is None and refusal_of_some(models) is None and not recurrent(models)
    return alone and models.kernels.attention == "canonical" and weights(models) <= FEW_WEIGHTS


def engine_chunk(models: Models, capacity: int) -> int:
    """The most tokens of a prompt that a pass of an engine computes, unless it is told."""
    largest = Shape.of(1, capacity, chunk=LARGE_CHUNK)
    if len(chunk_sizes(models, largest)) == 1:
        return PREFILL_CHUNK
    wide = [WIDE_CHUNK] * bool(models.target.config.experts)
    sizes = *wide, LARGE_CHUNK, *[LONG_PASS] * takes_long(models)
    return next((size for size in sizes if size <= capacity), PREFILL_CHUNK)


def burst_of(models: Models, shape: Shape, tokens: int) -> int:
    """The smallest passes that `tokens` of prompts allow between two calls, or one chunk does. One
    of LONG_PASS tokens counts as a page's, for what it takes is a dispatch."""
    smallest = pass_sizes(models, shape)[0]
    counted = min(smallest, PAGE) if takes_long(models) else smallest
    return max(tokens, shape.chunk) // counted


class Several(NamedTuple):
    """A pass over the last chunks of several prompts, which runs where `least` of them wait."""

    prompts: int
    tokens: int  # of each, at most
    least: int = 2

    def takes(self, size: int) -> bool:
        """Whether it computes a prompt's pass of so many tokens, and not half of it for nothing."""
        return size <= self.tokens <= 2 * size


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


def several_prompts(models: Models, layout: Layout) -> tuple[Several, ...]:
    """The passes over several prompts.

    A pass has a fixed number, so where fewer wait it computes rows for nothing: 128 of a model of N
    weights take 256 N operations, 0.5 ms of an H200 at 10⁹. What it saves is a program's dispatch
    for each prompt but one, 1.5 ms or more of the host, and as many turns of reading the weights.
    With fewer weights it pays for two prompts, of the size that most have; with more where most of
    its rows are theirs, and two large chunks fill the turns of a GPU better than one. A CPU waits
    for no dispatch. Rows for nothing would change states, which have no padding: there as many
    wait as the pass takes.
    """
    several = _that_pay(models, layout)
    if recurrent(models):
        several = tuple(each._replace(least=each.prompts) for each in several)
    return several


def _that_pay(models: Models, layout: Layout) -> tuple[Several, ...]:
    smallest, *larger = chunk_sizes(models, layout.shape)
    smallest = max(smallest, pass_sizes(models, layout.shape)[0])
    if layout.prompts is not None:
        return (Several(layout.prompts, smallest),) if layout.prompts > 1 else ()
    if refusal_of_some(models) or models.kernels.attention != "canonical":
        return ()
    if small(models):
        return (Several(PROMPTS, smallest),)
    pairs = [Several(2, size) for size in larger if size <= LARGE_CHUNK]
    return Several(PROMPTS, smallest, PROMPTS - 1), *pairs


def recurrent(models: Models) -> bool:
    """Whether a layer has a state that every row changes."""
    return any(config.deltas for config in models.configs)


def pass_rows(models: Models, layout: Layout) -> int:
    """The most rows of prompts that a program computes."""
    several = (each.prompts * each.tokens for each in several_prompts(models, layout))
    return max(layout.shape.chunk, *several, 0)


def refusal_of_some(models: Models) -> str | None:
    """Why all slots step together, if they must."""
    return None if models.one_arithmetic else "a prompt's bits may depend on the others"
