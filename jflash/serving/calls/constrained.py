"""A step in which some texts have a grammar, in two programs; texts without one take part.

The masks of a block depend on its drafts, which the device makes. So such a text is drafted for at
the end of one step, and the drafts wait on the device for the next: `look` verifies them while the
host computes the masks, and `decide` chooses among what these allow. Between two such steps the
device is at work for the other texts. This file knows masks as bits, and no grammar.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jflash.compiled.stored import compiling
from jflash.devices.mesh import EVERYWHERE, local, param_specs, shared, spread
from jflash.memory import tree_bytes
from jflash.pair import Models, Params
from jflash.serving.calls.layout import Layout, settled
from jflash.serving.calls.packing import Report, mask_words, report_of
from jflash.serving.calls.slots import empty_state, state_specs, table_columns, with_table
from jflash.serving.calls.some_slots import putting, slots_of, taken
from jflash.serving.calls.steps import of_all_kinds
from jflash.speculative import Seen, commit, draft, judge
from jflash.speculative import look as verify_rows
from jflash.state import State
from jflash.temporaries import FLOAT32
from jflash.tokens.drafts import Proposal


class Constrained(NamedTuple):
    """Executables of one layout; `state` and `drafted` are donated. A call serves as many slots as
    step at once, `slots` as `some_slots.places` gives them, and `who` is a `Who` of these.

    empty() -> drafted, of all slots
    look(params, state, table, slots, who, drafted) -> (state, drafted, seen)
    decide(params, state, table, slots, who, drafted, seen, allowed)
        -> (state, drafted, drafts, report)
    """

    empty: Any
    look: Any
    decide: Any


class Who[T](NamedTuple):
    """The sequences that each part of a step serves; the state of others does not change."""

    steps: T
    drafted: T  # of those, who has drafts that were made before
    drafts: T  # gets drafts for its next such step


def look(
    models: Models,
    params: Params,
    state: State,
    table: Int[Array, "n _"],
    slots: Int[Array, " n"],
    who: Bool[Array, "3 n"],
    drafted: Proposal,
) -> tuple[State, Proposal, Seen]:
    """Drafts for those that have none, and the target's pass over all."""
    (steps, given, _), (at, _) = Who(*who), slots_of(slots)
    everyone, put = state.sequences, putting(at, len(state.sequences.length))
    s, before = taken(everyone, at), taken(drafted, at)
    state = state._replace(sequences=s._replace(done=s.done | ~steps))
    state = with_table(state, table, at)
    fresh, state = draft(models, params, state)
    now = jax.tree.map(functools.partial(_where, given), before, fresh)
    seen, state = verify_rows(models, params, state, now)
    after = jax.tree.map(put, everyone, state.sequences._replace(done=s.done))
    state = with_table(state._replace(sequences=after), None)
    return state, jax.tree.map(put, drafted, now), seen


def decide(
    models: Models,
    params: Params,
    state: State,
    table: Int[Array, "n _"],
    slots: Int[Array, " n"],
    who: Bool[Array, "3 n"],
    drafted: Proposal,
    seen: Seen,
    allowed: Int[Array, "n W _"],
) -> tuple[State, Proposal, Int[Array, "n T"], Report]:
    """Chooses, accepts, commits and drafts; the drafts come as an array too that is not donated.

    `allowed` has ones for texts without a grammar. The report is that of a call of one step.
    """
    (steps, _, drafts), (at, _) = Who(*who), slots_of(slots)
    everyone, put = state.sequences, putting(at, len(state.sequences.length))
    s, before = taken(everyone, at), taken(drafted, at)
    state = state._replace(sequences=s._replace(done=s.done | ~steps))
    state = with_table(state, table, at)
    verdict, state = judge(models, params, state, before, seen, allowed)
    state = commit(models, params, state, verdict)
    report = report_of(s, state, at, models.block_size, 1)
    done = jnp.where(steps, state.sequences.done, s.done)
    following, state = draft(models, params, state.with_sequences(done=done | ~drafts))
    after = jax.tree.map(put, everyone, state.sequences._replace(done=done))
    state = with_table(state._replace(sequences=after), None)
    return state, jax.tree.map(put, drafted, following), following.tokens, report


def _where(chosen: Bool[Array, " B"], a: Array, b: Array) -> Array:
    return jnp.where(chosen.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def undrafted(models: Models, batch: int) -> Proposal:
    """Drafts that no sequence uses, in the shapes of all that wait for a step."""
    models = of_all_kinds(models, batch)
    drafts, vocabulary = models.block_size - 1, models.target.config.vocab_size
    none = models.drafter is None or not drafts
    return Proposal(
        jnp.zeros((batch, drafts), jnp.int32),
        jnp.zeros((batch, drafts, vocabulary)) if models.draws_drafts and not none else None,
        jnp.zeros((batch, drafts)) if models.ranks_rows or none else None,
    )


def kept_bytes(models: Models, layout: Layout) -> int:
    """The bytes that lie on the device between the programs: the drafts, `Seen` and the masks."""
    drafted = tree_bytes(jax.eval_shape(lambda: undrafted(models, layout.slots)))
    c, batch = models.target.config, layout.shape.batch
    rows = batch * models.block_size
    hidden = rows * c.hidden_size * jnp.dtype(models.dtype).itemsize * (1 + len(models.taps))
    logits = rows * (c.vocab_size + mask_words(models)) * FLOAT32
    return drafted + hidden + logits + batch * FLOAT32  # the rows' widths


def compile_constrained(models: Models, params: Params, layout: Layout) -> Constrained:
    """The executables; a second call returns the same ones without compiling."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.typeof(x), params))
    return _compile(models, tuple(leaves), tree, settled(models, layout))


@functools.lru_cache(maxsize=16)
def _compile(models: Models, leaves: tuple, tree: Any, layout: Layout) -> Constrained:
    params = jax.tree.unflatten(tree, leaves)
    with ThreadPoolExecutor(2) as pool:
        both = [compiling(pool.submit, f, models, params, layout) for f in (_lower_look, _lower)]
        make = functools.partial(undrafted, models, layout.slots)
        empty = jax.jit(shared(models.mesh, make, (), EVERYWHERE)).lower().compile()
    return Constrained(empty, *(program.result() for program in both))


def _lower_look(models: Models, params: Params, layout: Layout) -> jax.stages.Lowered:
    return _jitted(look, 2, models, params, layout, 1).lower(*_given(models, params, layout))


def _lower(models: Models, params: Params, layout: Layout) -> jax.stages.Lowered:
    """Of `decide`."""
    given, batch = _given(models, params, layout), layout.shape.batch
    _, _, seen = _jitted(look, 2, models, params, layout, 1).eval_shape(*given)
    seen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), seen)
    sizes = (batch, models.block_size, mask_words(models))
    allowed = jax.ShapeDtypeStruct(sizes, jnp.int32)
    return _jitted(decide, 3, models, params, layout, 3).lower(*given, seen, allowed)


def _given(models: Models, params: Params, layout: Layout) -> tuple:
    """What both programs take first."""
    batch = layout.shape.batch
    state = jax.eval_shape(lambda: empty_state(models, layout))
    table = jax.ShapeDtypeStruct((batch, table_columns(models, layout)), jnp.int32)
    drafted = jax.eval_shape(lambda: undrafted(models, layout.slots))
    slots, who = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((3, batch), bool)
    return params, state, table, slots, who, drafted


def _jitted(
    function: Any, results: int, models: Models, params: Params, layout: Layout, others: int
) -> Any:
    """A program over all devices: it takes `others` arrays after params, state, table, slots and
    who."""
    weights, where = param_specs(models, params), state_specs(models, layout)
    takes = (weights, where, *[EVERYWHERE] * (3 + others))
    gives = (where, *[EVERYWHERE] * results)
    bound = functools.partial(function, local(of_all_kinds(models, layout.shape.batch)))
    return spread(models.mesh, bound, takes, gives, (1, 5))
