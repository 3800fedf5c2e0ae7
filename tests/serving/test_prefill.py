"""The programs of a prompt branch on nothing, for a host waits for what a GPU branches on."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jflash.programs import Shape
from jflash.serving import prefill
from jflash.serving.packing import CONTROL, mask_words, row_size
from jflash.serving.programs import of_all_kinds
from jflash.serving.slots import Layout, empty_state, table_columns
from tests.support.pairs import random_pair

BRANCHES = ("stablehlo.case", "stablehlo.if")


@pytest.fixture(scope="module")
def lowered():
    """The text of a program, by its name."""
    pair = random_pair()
    models, layout = pair.models, Layout(Shape.of(2, 256, 16, 32), 8, 2)
    state = jax.eval_shape(lambda: empty_state(models, layout))
    ints = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    drawn, greedy = of_all_kinds(models, 2), replace(models, sampled=False)
    newest = jax.ShapeDtypeStruct((1, 1, models.target.config.hidden_size), models.dtype)
    first = (pair.params, state.sequences, newest, ints(2), ints(mask_words(models)))
    numbers = CONTROL + table_columns(models, layout) + row_size(layout.shape)
    chunk = functools.partial(prefill.chunk, layout.shape, drawn, 32)
    whole = functools.partial(prefill.whole, layout.shape, greedy, 32)
    programs = {
        "chunk": (chunk, pair.params, state, ints(1, numbers)),
        "whole": (whole, pair.params, state, ints(1, numbers)),
        "whole of several": (whole, pair.params, state, ints(3, numbers)),
        "first of greedy texts": (functools.partial(prefill.first, greedy), *first),
        "first of all texts": (functools.partial(prefill.first, drawn), *first),
    }  # fmt: skip
    return {
        name: jax.jit(function).lower(*given).as_text()
        for name, (function, *given) in programs.items()
    }


def test_no_branch(lowered):
    branching = [name for name, text in lowered.items() if any(b in text for b in BRANCHES)]
    # Filters, penalties and the form of logprobs are branches that a drawn text may need.
    assert branching == ["first of all texts"]
