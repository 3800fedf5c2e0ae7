"""A call's steps, as a function of arrays; each program of `programs` is this one, of some sizes.

The host uploads and reads one array a call.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash.pair import Models, Params
from jflash.records.kernels import AUTO
from jflash.serving.calls.packing import Report, report_of
from jflash.serving.calls.slots import with_table
from jflash.serving.calls.some_slots import first_of, putting, slots_of, taken
from jflash.speculative import speculative_step
from jflash.state import State

DRAWN = ("shaping", "logprobs", "best_drafts")  # of Sequences; greedy programs read none


def run(
    models: Models,
    steps: int,
    count: int,
    params: Params,
    state: State,
    table: Int[Array, "n _"],
    slots: Int[Array, " n"],
) -> tuple[State, Report]:
    """`steps` steps of the first `count` of these slots (see `some_slots.places`) that are live and
    not done; these are the slots' tables, and all others do not change.

    The report has, for each that steps: the new tokens (W · steps places), the bits of their
    logprobs, the number that each step committed, the number of steps, whether the slot is done,
    and the slot. Models that draw nothing change no logits and give no logprobs.
    """
    everyone, width = state.sequences, models.block_size
    kept = {} if models.sampled else {name: getattr(everyone, name) for name in DRAWN}
    everyone = everyone._replace(**dict.fromkeys(kept))
    (who, live), batch = slots_of(slots), len(everyone.length)
    if count < len(slots):
        chosen = first_of(live & ~everyone.done[who], count)
        who, live, table = who[chosen], live[chosen], table[chosen]
    all_step = count == batch
    s = everyone if all_step else taken(everyone, who)
    state = state._replace(sequences=s._replace(done=s.done | ~live))
    state = with_table(state, table, who)
    state = lax.fori_loop(0, steps, lambda _, x: speculative_step(models, params, x), state)
    report = report_of(s, state, who, width, steps)
    after = state.sequences._replace(done=jnp.where(live, state.sequences.done, s.done))
    after = after if all_step else jax.tree.map(putting(who, batch), everyone, after)
    return with_table(state._replace(sequences=after._replace(**kept)), None), report


def for_host(models: Models, function: Any) -> Any:
    """The function, of whose second result the host reads the first array always: on one GPU it
    comes into the host's memory with the program's end, where a copy that the host asks for comes
    0.2 ms after it."""
    one_gpu = models.kernels.attention == "canonical" and models.mesh is None
    return functools.partial(_into_host, function) if one_gpu else function


def _into_host(function: Any, *given: Any) -> tuple[Any, Any]:
    kept, result = function(*given)
    first = result._fields[0]
    return kept, result._replace(**{first: jax.device_put(result[0], jax.memory.Space.Host)})


def of_all_kinds(models: Models, slots: int) -> Models:
    """The models that serve requests of every kind. A changed logit depends on the drafts before
    it, so their steps verify whole blocks. Drafts are drawn as if none were ranked, unless the
    number of rows is a fixed one."""
    fixed = None if models.rows in (None, AUTO) else slots * models.block_size
    return replace(models, sampled=True, rows=fixed)
