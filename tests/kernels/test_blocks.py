"""The order in which devices write to each other's places and read them, with threads for CTAs.

A CPU has no memory of other GPUs, so kernels that push run on GPUs alone. Here what they write and
wait for runs over plain arrays, once a thread, with slow ones among them: who waits for whom is
what is checked.
"""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from pallas_kernels.gather import blocks as op
from pallas_kernels.gather.blocks import ALL, BLOCK, KEEPERS, WAVES, Blocks, Cut

ROWS, ROUND = 3, 2**32
SLOW = 0.004  # seconds


class Kernel(NamedTuple):
    """A gather: tiles that each device makes, and the CTAs that make them."""

    tiles: int
    ctas: int
    width: int = BLOCK

    @property
    def cut(self) -> Cut:
        left = (self.tiles - first for first in range(0, self.tiles, self.ctas))
        waves = tuple(min(self.ctas, count) for count in left)
        return Cut(ROWS, self.tiles * self.width, self.ctas * self.width, waves)

    @property
    def blocks(self) -> int:
        return self.tiles * self.width // BLOCK


# 2, 1, 11 and 3 waves; of the last a block has tiles of both.
KERNELS = [Kernel(4, 2), Kernel(3, 3), Kernel(11, 1), Kernel(5, 2), Kernel(4, 3, BLOCK // 2)]
GATHERS = 10


class Array:
    """A device's; `at` names a place, for which another device's may stand."""

    def __init__(self, device: int, values: np.ndarray) -> None:
        self.device, self.values, self.shape, self.at = device, values, values.shape, _At(self)

    def __getitem__(self, index: Any) -> int:
        return int(self.values[index])

    def __setitem__(self, index: Any, value: int) -> None:
        self.values[index] = value % ROUND


class Landing(Array):
    turns = 2  # places


class _At:
    def __init__(self, array: Array) -> None:
        self.array = array

    def __getitem__(self, index: tuple[Any, ...]) -> "Place":
        return Place(self.array, index)


class Place(NamedTuple):
    array: Array
    index: tuple[Any, ...]

    def where(self) -> tuple[Any, ...]:
        first, *rest = self.index
        if isinstance(self.array, Landing):
            first %= self.array.turns
        some = [slice(i.start, i.start + i.size) if isinstance(i, _Some) else i for i in rest]
        return first, *some


class _Some(NamedTuple):
    start: int
    size: int


class Devices:
    """Devices whose kernels run one after the other, each in as many threads as it has CTAs."""

    def __init__(self, count: int, first: int, seed: int, patience: float = 10) -> None:
        self.count, self.random, self.patience = count, random.Random(seed), patience
        self.own, self.changed = threading.local(), threading.Condition()
        self.wrong = list[str]()
        rows = max(kernel.blocks for kernel in KERNELS) * count * ROWS
        self.blocks = []
        for device in range(count):
            landing = Landing(device, np.zeros((2, rows, BLOCK), np.int64))
            sent = Array(device, np.full((count, WAVES), first * ALL % ROUND, np.int64))
            turn = Array(device, np.full(KEEPERS, first % ROUND, np.int64))
            parts: Any = landing, sent, turn
            self.blocks.append(Blocks(*parts))

    def fakes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def peer_of(place: Place, peer: int) -> Place:
            mine = self.blocks[place.array.device]
            field = next(name for name in mine._fields if getattr(mine, name) is place.array)
            return Place(getattr(self.blocks[int(peer)], field), place.index)

        def copy(tile: np.ndarray, place: Place, commit_group: bool = True) -> None:
            del commit_group
            self.own.on_their_way.append((tile, place))

        def arrive(_: int) -> None:  # as late as may be
            self.rest()
            for tile, place in self.own.on_their_way:
                place.array.values[place.where()] = tile
            self.own.on_their_way.clear()

        def add(places: list[Place], value: int) -> None:
            for place in places:
                self.rest()
                with self.changed:
                    place.array[place.where()] = place.array[place.where()] + value
                    self.changed.notify_all()

        def wait(place: Place, value: int, most: int) -> None:
            seen = lambda: (place.array[place.where()] - value) % ROUND <= most  # noqa: E731
            with self.changed:
                assert self.changed.wait_for(seen, self.patience), "for ever"

        def loop(first: int, last: int) -> Any:
            return lambda body: [body(i) for i in range(first, last)]

        def when(there: Any) -> Any:
            return lambda body: body() if there else None

        numbers = SimpleNamespace(
            minimum=min, where=lambda a, b, c: b if a else c, int32=int, zeros=None, bfloat16=None
        )
        integers = SimpleNamespace(
            axis_index=lambda _: self.own.device, div=lambda a, b: a // b, rem=lambda a, b: a % b
        )
        gpu = SimpleNamespace(remote_ref=peer_of, copy_smem_to_gmem=copy, wait_smem_to_gmem=arrive)
        some = SimpleNamespace(ds=_Some, loop=loop, when=when)
        names = {"jnp": numbers, "lax": integers, "plgpu": gpu, "pl": some}
        both: dict[str, Any] = {"add": add, "add_soon": add}
        names["counts"] = SimpleNamespace(**both, wait=wait, order=self.rest, together=self.rest)
        for name, other in names.items():
            monkeypatch.setattr(op, name, other)

    def rest(self) -> None:
        time.sleep(self.random.choice((0, 0, 0, SLOW)))

    def run(self) -> None:
        streams = [threading.Thread(target=self._stream, args=(d,)) for d in range(self.count)]
        for each in streams:
            each.start()
        for each in streams:
            each.join()

    def _stream(self, device: int) -> None:
        for number in range(GATHERS):
            kernel = KERNELS[number % len(KERNELS)]
            roles = (self._sends, self._reads)
            threads = [
                threading.Thread(target=self._role, args=(role, device, cta, number, kernel))
                for role in roles
                for cta in range(kernel.ctas)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self.wrong:
                return

    def _role(self, role: Any, device: int, cta: int, number: int, kernel: Kernel) -> None:
        self.own.device, self.own.on_their_way = device, []
        try:
            role(self.blocks[device], cta, number, kernel)
        except AssertionError as found:
            self.wrong.append(str(found).partition("\n")[0])

    def _sends(self, blocks: Blocks, cta: int, number: int, kernel: Kernel) -> None:
        turn = op.Turn.of(blocks, 2 * cta, 2 * kernel.ctas)
        sender = op.Sender.of(turn, kernel.cut, cta == 0, "devices")
        time.sleep(2 * SLOW * (cta == kernel.ctas - 1))  # the last is late
        for i, tile in enumerate(range(cta, kernel.tiles, kernel.ctas)):
            block, column = divmod(tile * kernel.width, BLOCK)
            whole = block_of(number, self.own.device, block)
            sender.send(whole[:, column : column + kernel.width], 0, tile * kernel.width)
            sender.sent(i)
        sender.end()

    def _reads(self, blocks: Blocks, cta: int, number: int, kernel: Kernel) -> None:
        """All columns of all devices, in two pieces."""
        receiver = op.Receiver(op.Turn.of(blocks, 2 * cta + 1, 2 * kernel.ctas), kernel.cut)
        every = range(self.count * kernel.blocks)
        for piece in (every[cta + 1 :], every[: cta + 1]):
            for step, block in enumerate(piece):
                receiver.wait(step, block * BLOCK)
                time.sleep(SLOW * (self.own.device == 0))  # others overtake it
                place = receiver.place(_Some(0, ROWS), block * BLOCK)
                there = place.array.values[place.where()]
                right = block_of(number, *divmod(block, kernel.blocks))
                assert (there == right).all(), "other numbers"
        receiver.turn.end()


def block_of(number: int, device: int, block: int) -> np.ndarray:
    """Rows of a block of columns, as no other gather, device or block has them."""
    first = ((number + 1) * 100 + device) * 100 + block
    return first * 1000 + np.arange(ROWS * BLOCK).reshape(ROWS, BLOCK)


@pytest.mark.parametrize("first", [0, -3])
@pytest.mark.parametrize("devices", [2, 3])
def test_every_device_reads_what_all_have_sent(monkeypatch, devices: int, first: int):
    """Gathers of few and of more waves than are counted, also where numbers go round."""
    machine = Devices(devices, first, seed=devices)
    machine.fakes(monkeypatch)
    machine.run()
    assert machine.wrong == []
    for blocks in machine.blocks:
        assert (blocks.turn.values == (first + GATHERS) % ROUND).all()
        assert (blocks.sent.values == (first + GATHERS) * ALL % ROUND).all()


def wait_for_the_last(receiver: op.Receiver, _: int, k: int) -> None:
    """Of the waves that made a block, which is no later than those before it of other CTAs."""
    owner, local = divmod(k, receiver.cut.columns)
    wave = receiver.cut.wave(local + BLOCK - 1)
    count = receiver.turn.blocks.sent.at[owner, wave]
    op.counts.wait(count, receiver.turn.value * ALL, most=ALL)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ((Landing, "turns", 1), "other numbers"),
        ((op.Receiver, "wait", lambda *_: None), "other numbers"),
        ((op.Receiver, "wait", wait_for_the_last), "other numbers"),
        ((op.Sender, "end", lambda sender: sender.turn.end()), "for ever"),
    ],
    ids=["one place", "no wait", "one wave of a block", "waves that there are not"],
)
def test_a_fault_is_caught(monkeypatch, fault: tuple[Any, str, Any], found: str):
    monkeypatch.setattr(*fault)
    for seed in range(20):
        machine = Devices(2, 0, seed, patience=1)
        machine.fakes(monkeypatch)
        machine.run()
        if found in machine.wrong:
            return
    pytest.fail("not caught")
