"""The passes over prompts that an engine has: how many tokens, and of how many prompts at once.

Nothing here touches a device.
"""

from typing import NamedTuple

from jflash.compiled.shape import LARGE_CHUNK, PREFILL_CHUNK, Shape, chunk_sizes
from jflash.pair import Models
from jflash.serving.calls.layout import (
    Layout,
    recurrent,
    refusal_of_some,
    small,
    weights,
    windows,
)
from pallas_kernels.block_attention import PAGE

PROMPTS = 4  # of `several_prompts`
# Tokens of a prompt that a pass of a target of so few weights computes: four prompts' 1,024 rows
# take 2,048 N operations, 1.2 ms of an H200 at N = 4·10⁸ by arithmetic. SmolLM2, with 1.3·10⁸, was
# timed.
LONG_PASS, FEW_WEIGHTS = 256, 4 * 10**8
# Tokens of a pass over a target with experts, of which a few hundred rows read nearly all that many
# do: 2,048 tokens at once took 9.6 ms in place of 16.4 with eight layers of Qwen3-Coder-30B-A3B
# and 17.7 in place of 24.8 with Qwen3.5-35B-A3B's; Qwen3-8B gained nothing (one H200, 2026-11-29).
WIDE_CHUNK = 2048


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


def copying_sizes(models: Models, shape: Shape) -> tuple[int, ...]:
    """The sizes of passes at whose ends recurrent states are copied. A wider pass stops where these
    would, or the text of one that it holds alone would leave no state for others."""
    sizes = pass_sizes(models, shape)
    return tuple(size for size in sizes if size <= LARGE_CHUNK) or sizes


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
    wide = [WIDE_CHUNK] * takes_wide(models)
    sizes = *wide, LARGE_CHUNK, *[LONG_PASS] * takes_long(models)
    return next((size for size in sizes if size <= capacity), PREFILL_CHUNK)


def takes_wide(models: Models) -> bool:
    """Whether a pass of WIDE_CHUNK tokens pays and costs no pages. Where layers have windows each
    slot has room for a pass beside its window."""
    return bool(models.target.config.experts) and not windows(models)


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


def pass_rows(models: Models, layout: Layout) -> int:
    """The most rows of prompts that a program computes."""
    several = (each.prompts * each.tokens for each in several_prompts(models, layout))
    return max(layout.shape.chunk, *several, 0)
