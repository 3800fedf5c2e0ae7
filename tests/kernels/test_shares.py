"""The order in which a walk's shares leave their sums and take others', with threads for CTAs.

A CPU has no shared memory of other CTAs, so the kernel itself runs on GPUs alone. Here its own loop
of rounds runs once a thread, over plain arrays: who waits for whom is what is checked.
"""

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.block_attention import mosaic_shares as op
from pallas_kernels.block_attention.mosaic_layouts import across
from pallas_kernels.block_attention.mosaic_task import ROWS, Task, Tiles
from pallas_kernels.block_attention.pieces import LOWEST, merge

COLUMNS = 16
SLOW = 0.02  # seconds that the last share takes to take something


class Ready:
    """A barrier at which each share arrives for all, as often as it waits."""

    def __init__(self, shares: int) -> None:
        self.changed, self.shares, self.arrived = threading.Condition(), shares, 0
        self.waited = [0] * shares

    def arrive(self) -> None:
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def wait(self, share: int) -> None:
        self.waited[share] += 1
        whole = self.waited[share] * self.shares
        with self.changed:
            assert self.changed.wait_for(lambda: self.arrived >= whole, timeout=20), "for ever"


class Memory:
    """A share's array. Its places are names, by which another share takes what lies there."""

    def __init__(self, name: str) -> None:
        self.kept: dict[Any, Any] = {}
        self.at = Places(name)

    def __setitem__(self, index, value) -> None:
        self.kept[_key(index)] = np.asarray(value)


class Places:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index):
        return self.name, _key(index)


def _key(index) -> tuple[int, ...]:
    return tuple(int(i) for i in (index if isinstance(index, tuple) else (index,)))


def pieces_of(count: int) -> list[tuple[Any, Any, Any]]:
    random = np.random.default_rng(count)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    scales = [jnp.asarray(random.integers(-20, 20, ROWS), jnp.float32) for _ in range(count)]
    return [(draw(ROWS, COLUMNS), scale, jnp.abs(draw(ROWS))) for scale in scales]


NOTHING = jnp.zeros((ROWS, COLUMNS)), jnp.full(ROWS, LOWEST), jnp.zeros(ROWS)


def merged_by_threads(monkeypatch, shares: int, pieces: list, turns: int = 2) -> list[Any]:
    """What each share ends with."""
    own, ready = threading.local(), Ready(shares)
    mails = [op.Mailbox(Memory("sums"), Memory("rows"), ready) for _ in range(shares)]

    def loop(first, last, body, carry):
        for i in range(int(first), int(last)):
            carry = body(jnp.int32(i), carry)
        return carry

    def taken(place, shape, sender: int):
        name, index = place
        time.sleep(SLOW if own.share == shares - 1 else 0)
        array = getattr(mails[sender], name).kept[index]
        assert array.shape == shape
        return jnp.asarray(array)

    def sums_of(share: int, n):
        number = int(n) * shares + share
        return pieces[number] if number < len(pieces) else NOTHING

    jax_loop = SimpleNamespace(
        axis_index=lambda _: jnp.int32(own.share), div=lax.div, fori_loop=loop,
        rem=lambda n, _: lax.rem(n, turns),
    )  # fmt: skip
    gpu = SimpleNamespace(
        barrier_arrive=lambda barrier: barrier.arrive(),
        barrier_wait=lambda barrier: barrier.wait(own.share),
        commit_smem=lambda: None,
        layout_cast=lambda x, _: x,
        broadcasted_iota=lambda *sizes, layout: lax.broadcasted_iota(*sizes),
    )  # fmt: skip
    when = SimpleNamespace(when=lambda there: lambda body: body() if there else None)
    for name, other in {"lax": jax_loop, "plgpu": gpu, "pl": when, "_taken": taken}.items():
        monkeypatch.setattr(op, name, other)
    tiles = Tiles(chunk=256, block=64, stages=1, walk=True, ordered=True, shares=shares)
    task = Task(
        B=1, T=1, S=256, K=1, G=1, H=COLUMNS, tiles=tiles,
        causal=True, scale=1.0, window=None, softcap=None, ring=False,
    )  # fmt: skip
    ends: list[Any] = [None] * shares

    def run(share: int) -> None:
        own.share = share
        give = partial(sums_of, share)
        ends[share] = op.rounds(task, jnp.int32(len(pieces)), give, NOTHING, mails[share])

    threads = [threading.Thread(target=run, args=(share,)) for share in range(shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    arrived, waits = ready.arrived, set(ready.waited)
    assert waits == {arrived // shares} and arrived % shares == 0  # none arrives after the end
    return ends


def differing(shares: int, pieces: list, ends: list[Any]) -> int:
    """Numbers that are not those of one walk over all pieces."""
    want = NOTHING
    for piece in pieces:
        want = merge(want, piece, across)
    each, wrong = COLUMNS // shares, 0
    for share, (sums, scale, weight) in enumerate(ends):
        part = want[0][:, share * each : (share + 1) * each]
        for got, whole in ((sums, part), (scale, want[1]), (weight, want[2])):
            wrong += int(jnp.sum(got != whole))
    return wrong


@pytest.mark.parametrize(
    "shares,count", [(2, 0), (2, 1), (2, 2), (2, 5), (2, 7), (4, 3), (4, 9), (8, 17)]
)
def test_shares_merge_what_one_walk_does(monkeypatch, shares: int, count: int):
    pieces = pieces_of(count)
    assert differing(shares, pieces, merged_by_threads(monkeypatch, shares, pieces)) == 0


def test_a_place_that_is_written_too_soon_is_caught(monkeypatch):
    """The planted violation: one place for all rounds, while the last share still takes from it."""
    pieces = pieces_of(6)
    assert differing(2, pieces, merged_by_threads(monkeypatch, 2, pieces, turns=1)) > 0
