"""A step whose tokens a grammar constrains, in three programs, with the host between them.

The masks of a block depend on its drafts, which the device makes. `propose` gives the drafts early,
`look` verifies them while the host computes the masks, and `decide` chooses among what the masks
allow. Sequences without a grammar take part with masks of ones, and keep their tokens. This file
knows masks as bits, and no grammar.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jflash.drafts import Proposal
from jflash.memory import FLOAT32
from jflash.mesh import EVERYWHERE, local, param_specs, spread
from jflash.pair import Models, Params
from jflash.serving.packing import Report, mask_words, report_of
from jflash.serving.programs import of_all_kinds
from jflash.serving.slots import Layout, empty_state, state_specs, table_columns, with_table
from jflash.speculative import Seen, commit, draft, judge
from jflash.speculative import look as verify_rows
from jflash.state import State
from jflash.tiles import settled


class Constrained(NamedTuple):
    """Executables of one layout; `state` is donated, as in `Programs`.

    propose(params, state, table, live) -> (state, Begun)
    look(params, state, table, begun) -> (state, seen)
    decide(params, state, table, begun, seen, allowed) -> (state, report)
    """

    propose: Any
    look: Any
    decide: Any


class Begun(NamedTuple):
    """A step after its drafts; the state's sequences are done but for the live ones."""

    proposal: Proposal
    done: Bool[Array, " B"]  # before the step
    live: Bool[Array, " B"]


def propose(
    models: Models, params: Params, state: State, table: Int[Array, "B _"], live: Bool[Array, " B"]
) -> tuple[State, Begun]:
    """Drafts of the live slots."""
    done = state.sequences.done
    state = with_table(state.with_sequences(done=done | ~live), table)
    proposal, state = draft(models, params, state)
    return with_table(state, None), Begun(proposal, done, live)


def look(
    models: Models, params: Params, state: State, table: Int[Array, "B _"], begun: Begun
) -> tuple[State, Seen]:
    """The target's pass over anchors and drafts."""
    seen, state = verify_rows(models, params, with_table(state, table), begun.proposal)
    return with_table(state, None), seen


def decide(
    models: Models,
    params: Params,
    state: State,
    table: Int[Array, "B _"],
    begun: Begun,
    seen: Seen,
    allowed: Int[Array, "B W _"],
) -> tuple[State, Report]:
    """Chooses, accepts and commits; the report is that of a call of one step."""
    before = state.sequences
    state = with_table(state, table)
    verdict, state = judge(models, params, state, begun.proposal, seen, allowed)
    state = commit(models, params, state, verdict)
    report = report_of(before, state, models.block_size, 1)
    done = jnp.where(begun.live, state.sequences.done, begun.done)
    state = with_table(state.with_sequences(done=done), None)
    return state, report


def kept_bytes(models: Models, batch: int) -> int:
    """The bytes that lie on the device between the programs: `Begun`, `Seen` and the masks."""
    models = of_all_kinds(models, batch)
    c, rows = models.target.config, batch * models.block_size
    drafts, size = batch * (models.block_size - 1), jnp.dtype(models.dtype).itemsize
    proposal = drafts * FLOAT32 * (1 + (models.rows is not None))
    proposal += drafts * c.vocab_size * FLOAT32 * models.draws_drafts  # what they were drawn from
    hidden = rows * c.hidden_size * size * (1 + len(models.taps))
    logits = rows * (c.vocab_size + mask_words(models)) * FLOAT32
    return proposal + hidden + logits + batch * (2 + FLOAT32)  # done, live and the rows' widths


def compile_constrained(models: Models, params: Params, layout: Layout) -> Constrained:
    """The three executables; a second call returns the same ones without compiling."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.typeof(x), params))
    return _compile(models, tuple(leaves), tree, layout)


@functools.lru_cache(maxsize=16)
def _compile(models: Models, leaves: tuple, tree: Any, layout: Layout) -> Constrained:
    params, batch = jax.tree.unflatten(tree, leaves), layout.shape.batch
    state = jax.eval_shape(lambda: empty_state(models, layout))
    draws = of_all_kinds(models, batch)
    table = jax.ShapeDtypeStruct((batch, table_columns(models, layout)), jnp.int32)
    live = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    words = (batch, models.block_size, mask_words(models))
    allowed = jax.ShapeDtypeStruct(words, jnp.int32)

    weights, where = param_specs(models, params), state_specs(models, layout)

    def compiled(function: Any, *given: Any) -> tuple[Any, Any]:
        takes = (weights, where, EVERYWHERE, *[EVERYWHERE] * len(given))

        def lower():
            bound = functools.partial(function, local(draws))
            jitted = spread(models.mesh, bound, takes, (where, EVERYWHERE), donate=(1,))
            return jitted.lower(params, state, table, *given)

        lowered = settled(lower)
        bare = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
        return lowered.compile(), jax.tree.map(bare, lowered.out_info[1])

    proposes, begun = compiled(propose, live)
    looks, seen = compiled(look, begun)
    return Constrained(proposes, looks, compiled(decide, begun, seen, allowed)[0])
