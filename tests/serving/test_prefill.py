"""The programs of a prompt branch on nothing, for a host waits for what a GPU branches on; and of
the last layer they compute no more than somebody reads."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jflash.compiled.shape import Shape
from jflash.generate import Pair
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.pair import Models, Params
from jflash.records.kernels import XLA
from jflash.records.specs import MoeSpec
from jflash.serving.calls import prefill
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.packing import (
    CONTROL,
    FRESH,
    Row,
    mask_words,
    no_pass,
    pass_of,
    row_of,
    row_size,
)
from jflash.serving.calls.slots import empty_state, table_columns
from jflash.serving.calls.steps import of_all_kinds
from jflash.serving.request import Request
from jflash.speculative import apply
from tests.support.attention_checks import ON_GPU
from tests.support.pairs import (
    HYBRID,
    SANDWICH,
    drafter_config,
    one_arithmetic,
    prompts,
    random_pair,
    random_params,
    target_config,
)

BRANCHES = ("stablehlo.case", "stablehlo.if")
SIZE = 32
MOE = MoeSpec(
    num_experts=6, experts_per_token=2, intermediate_size=24, renormalise=True, shared_size=20
)
KINDS = {
    "a window, a gate, sandwich norms, experts beside": {
        **SANDWICH, "num_layers": 1, "sights": SANDWICH["sights"][:1],
    },
    "sinks, a soft cap, experts, a shared one": {
        "moe": MOE, "num_layers": 1, "sights": ({"softcap": 5.0, "sinks": True},),
    },
    "a delta net before it, a drafter": HYBRID,
}  # fmt: skip


def pair_of(taps: tuple[int, ...], **target) -> tuple[Models, Params]:
    """Greedy, by the operations of one arithmetic; a target of one layer is alone."""
    config, drafter = target_config(**target), drafter_config(num_layers=1, target_layer_ids=taps)
    models, params = Models(Target(config)), Params(random_params(config, 0))
    if config.num_layers > 1:
        models = Models(Target(config), Drafter(drafter), drafter.block_size)
        params = params._replace(drafter=random_params(drafter, 1))
    pair = one_arithmetic(Pair(models, params))
    return pair.models, pair.params


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


def passes(models: Models, layout: Layout, texts: list[list[int]], offset: int, prompts: int):
    """Passes from `offset` to the ends of texts in slots 1 …, or over so many tokens; then none."""
    columns, halves = layout.columns, table_columns(models, layout) // layout.columns
    pages = np.arange(len(texts) * columns, dtype=np.int32)[::-1].reshape(-1, columns)
    tables = np.tile(pages, (1, halves))
    given = []
    for slot, (text, table) in enumerate(zip(texts, tables, strict=True), 1):
        row = row_of(Row(slot, Request(prompt_ids=text, max_tokens=9), 0, text), layout, 7)
        end = min(len(text), offset + SIZE)
        given.append(pass_of([slot, offset, end, FRESH * (offset == 0)], table[None], row))
    none = np.full((1, columns * halves), layout.pages, np.int32)
    given += [no_pass(i, none, layout.shape) for i in range(prompts - len(texts))]
    return np.concatenate(given)


def bits_of(logits):
    """A number that every bit of a row of logits changes, in a token's place."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    return jnp.sum(bits * (2 * jnp.arange(logits.shape[-1]) + 1), axis=-1)


@pytest.mark.skipif(ON_GPU, reason="these are a CPU's operations")
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_over_newest_rows_alone_changes_no_bit(kind, monkeypatch):
    """Of several prompts' second chunks, beside a pass over nothing, or of one: the logits, keys,
    values and context are those of chunks that compute every row.

    Ends lie within a page and at its border, and a window has left the first tokens behind.
    """
    monkeypatch.setattr(prefill, "greedy", bits_of)
    models, params = pair_of((0,), **KINDS[kind])
    assert prefill.reads_newest_alone(models)
    layout = Layout(Shape.of(3, 128, 16, SIZE), 8, 2)
    chunk, whole = (
        jax.jit(functools.partial(program, layout.shape, models, SIZE))
        for program in (prefill.chunk, prefill.whole)
    )
    logits = jax.jit(lambda x: apply(models.target, params.target, x, "cpu", method="logits"))
    several = not models.target.config.deltas
    texts = [prompts(1, seed=n, low=n, high=n + 1)[0] for n in (45, 64)[: 1 + several]]
    state = empty_state(models, layout)
    for one in passes(models, layout, texts, 0, len(texts)):
        state, _ = chunk(params, state, one[None])
    last = passes(models, layout, texts, SIZE, len(texts) + several)
    found, first = whole(params, state, last)
    for i in range(len(texts)):
        state, computed = chunk(params, state, last[i : i + 1])
        assert int(first.token[i, 0]) == int(bits_of(logits(computed.newest))[0, 0])
    for name in ("target_cache", "drafter_cache"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(state, name))


def rows_seen(models: Models, params: Params) -> list[int]:
    """The rows of a prompt that each layer's MLP sees."""
    layout, seen = Layout(Shape.of(2, 256, 16, SIZE), 8, 2), []

    def note(call, args, kwargs, context):
        if context.method_name == "unsummed" and context.module.name == "mlp":
            seen.append(args[0].shape[1])
        return call(*args, **kwargs)

    given = jax.ShapeDtypeStruct((1, CONTROL + layout.columns + row_size(layout.shape)), jnp.int32)
    state = jax.eval_shape(lambda: empty_state(models, layout))
    with nn.intercept_methods(note):
        whole = functools.partial(prefill.whole, layout.shape, models, SIZE)
        jax.eval_shape(whole, params, state, given)
    return seen


@pytest.mark.parametrize(
    ("taps", "target", "rows"),
    [
        ((0,), {}, [SIZE, 1]),
        ((0,), {"moe": MOE}, [SIZE, 1]),
        ((0,), {"num_layers": 1}, [1]),  # without a drafter
        ((1,), {}, [SIZE, SIZE]),  # a feature has every row
        ((0,), {**HYBRID, "deltas": (1,)}, [SIZE, SIZE]),
    ],
)
def test_what_nobody_reads_of_the_last_layer_is_not_computed(taps, target, rows):
    models, params = pair_of(taps, **target)
    assert rows_seen(models, params) == rows
    assert rows_seen(replace(models, kernels=XLA), params) == [SIZE] * len(rows)
