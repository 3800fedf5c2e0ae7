"""What a step reads and writes: the sequences of a batch and the caches of both models.

Axes: B batch, S capacity, E stop ids. A sequence of committed length n holds its newest token at
index n - 1; that token has no keys and values in the target's cache yet.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Int, Key

from jflash.layers.cache import Cache, LayerState
from jflash.rows import Survey
from jflash.tokens.logprobs import Logprobs
from jflash.tokens.sampling import Filters
from jflash.tokens.shaping import Shaping
from pallas_kernels.gather import Places


class Sequences(NamedTuple):
    """What a step keeps of each sequence of a batch; one row of it, without B, is a request."""

    tokens: Int[Array, "*B S"]
    length: Int[Array, "*B"]  # committed tokens, prompt included
    limit: Int[Array, "*B"]  # the length at which a sequence ends
    stops: Int[Array, "*B E"]  # stop ids, filled up with -1
    done: Bool[Array, "*B"]
    max_accept: Int[Array, "*B"]  # drafts accepted at most; 0 makes the step the oracle
    key: Key[Array, "*B"]
    filters: Filters
    steps: Int[Array, "*B"]
    acceptance_lengths: Int[Array, "*B S"]  # tokens committed by each step
    shaping: Shaping | None = None  # for all requests or for none
    logprobs: Logprobs | None = None
    best_drafts: Bool[Array, "*B"] | None = None  # draft rule greedy for these


class State(NamedTuple):
    """Everything a step reads and writes. Donated: use only what the last call returned."""

    sequences: Sequences
    target_cache: tuple[LayerState, ...]
    drafter_cache: tuple[Cache, ...]
    survey: Survey | None = None  # with Models.rows
    places: Places | None = None  # where devices that share the models push their parts

    def with_sequences(self, **changes: Any) -> "State":
        """The state with other values of some fields of its sequences."""
        return self._replace(sequences=self.sequences._replace(**changes))
