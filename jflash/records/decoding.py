"""The options of a request. These records name no array and import no JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

HOTTEST = 1e9  # float32 holds logits / temperature, of masked logits too
COLDEST = 1e-4  # below it float32 could not tell logits / temperature apart; 0 is greedy
DRAFT_RULES = ("greedy", "sampled")  # the drafter's best tokens; drawn from its distribution


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request draws its tokens; the filters apply in this order. ValueError if impossible.

    top_k 0, top_p 1 and min_p 0 filter nothing, and temperature 0 (greedy) allows no other values.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, real(name, getattr(self, name)))
        object.__setattr__(self, "top_k", whole("top_k", self.top_k))
        t, k = self.temperature, self.top_k
        for wrong, why in [
            (
                not (t == 0 or COLDEST <= t <= HOTTEST),
                f"temperature {t}: 0 (greedy) or a number within {COLDEST} … {HOTTEST:g}",
            ),
            (k < 0, f"top_k {k}: a whole number from 1 up, 0 to keep all"),
            (not 0 < self.top_p <= 1, f"top_p {self.top_p}: above 0, at most 1 (which keeps all)"),
            (not 0 <= self.min_p <= 1, f"min_p {self.min_p}: within 0 (which keeps all) … 1"),
        ]:
            if wrong:
                raise ValueError(why)
        if t == 0:
            for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} {getattr(self, name)} needs a temperature above 0")


def whole(name: str, value: Any) -> int:
    """A whole number, of NumPy too, as Python's own; ValueError, naming it, for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} {value!r} must be a whole number")
    return int(value)


def real(name: str, value: Any) -> float:
    """A number, of NumPy too, as Python's own; ValueError, naming it, for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} {value!r} must be a number")
    return value if isinstance(value, int) else float(value)


def are_whole(value: Any) -> bool:
    """Whether it is a list, as JSON has it, of whole numbers from 0 up that int32 holds, as tokens
    and their counts are."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


GREEDY = Sampling()
StopWhen = Callable[[list[int]], int | None]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The options of a request; every driver takes them as this record.

    The new tokens end with the first of `stop_token_ids`, or after `max_new_tokens`, or after as
    many as `stop_when(new_ids)` returns, at least one of those that it is given; the host asks it
    every few steps. Draws depend on `seed`, the sequence's index and nothing else. `oracle` accepts
    no draft: the same executable then commits the target's tokens one by one.
    """

    max_new_tokens: int = 256
    stop_token_ids: Sequence[int] = ()
    sampling: Sampling = GREEDY
    seed: int = 0
    oracle: bool = False
    stop_when: StopWhen | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))  # to be hashed
        except TypeError:
            why = "must be a list of token ids"
            raise ValueError(f"stop_token_ids {self.stop_token_ids!r:.80} {why}") from None
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling {self.sampling!r:.80} must be of the type Sampling")
        if self.stop_when is not None and not callable(self.stop_when):
            raise ValueError(f"stop_when {self.stop_when!r:.80} must be a function")
