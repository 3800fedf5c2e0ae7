"""Several hosts of one run: each does its share of the work, and host 0 has all results in order.

The hosts meet at the coordination service of `jax.distributed`, which host 0 runs. A model that
decodes lies on the devices of one host, so no such program spans hosts: they exchange text, and
each text goes to host 0. A training's program spans all of them. Every host beats once a second,
and ends when another one is silent for SILENCE seconds, ends with an error, or no longer reaches
host 0. This file knows no model and no option.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src.distributed import global_state  # JAX has no public way to its client

BEAT, SILENCE = 1.0, 15.0  # seconds
HEARTBEAT = 20  # seconds without JAX's heartbeats, which go on where Python stands still
MEET, PART = 300, 30  # seconds in which all hosts must come, and go
LEAVE = 5  # seconds in which a host that ends with an error still has host 0's service
ABORT = 3  # seconds in which JAX aborts where the service is gone
LOST = 1  # exit code of the hosts that remain
BEATS, ERRORS, RESULTS, END = "jflash/beat/", "jflash/error/", "jflash/result/", "jflash/end"
PLACES, SETTINGS = "jflash/place/", "jflash/settings/"
ADDRESS = "JAX_COORDINATOR_ADDRESS"
UNMET = "one is lost, or two have the same --host-index, or not all the same --num-hosts"
# Hosts compile the same programs at different times, so none may wait for another's measurements.
OWN_AUTOTUNING = "--xla_gpu_shard_autotuning=false"


class Hosts:
    """This host among those of a run. One host has the whole share, and exchanges nothing."""

    def __init__(self, index: int = 0, count: int = 1, client: Any = None) -> None:
        self.index, self.count, self._client = index, count, client
        self._watching, self._ended = True, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._heard = dict.fromkeys(range(count), time.monotonic())

    def share(self, items: int) -> range:
        """The numbers of this host's items: hosts take turns."""
        return range(self.index, items, self.count)

    def gathered(self, own: dict[int, str], items: int) -> list[str] | None:
        """The texts of all items in order, on host 0; None elsewhere.

        From here on host 0 needs no other host, and may write without being ended.
        """
        if self.index:
            for number, text in own.items():
                self._client.key_value_set(f"{RESULTS}{number}", text)
            return None
        texts = [
            own[number] if number in own else self._awaited(f"{RESULTS}{number}")
            for number in range(items)
        ]
        self._watching = False
        return texts

    def meet(self, place: str) -> None:
        """Returns when all hosts have come here."""
        if self.count > 1:
            self._client.key_value_set(f"{PLACES}{place}/{self.index}", "")
            for index in range(self.count):
                self._awaited(f"{PLACES}{place}/{index}")

    def agree(self, settings: Mapping[str, Any]) -> None:
        """On host 0 ValueError, by name, if another host has other settings: its share would be
        other work, or some of the work nobody's."""
        if self.count == 1:
            return
        own = json.dumps(settings, default=str)
        if self.index:
            self._client.key_value_set(f"{SETTINGS}{self.index}", own)
            return
        first = json.loads(own)
        for index in range(1, self.count):
            other = json.loads(self._awaited(f"{SETTINGS}{index}"))
            for name in (*first, *other):
                if other.get(name) != first.get(name):
                    raise ValueError(
                        f"host {index} has {name} {other.get(name)!r}, host 0 has "
                        f"{first.get(name)!r}: run the same command on all hosts"
                    )

    def _awaited(self, key: str) -> str:
        """The value of a key, as soon as a host has set it. Ctrl-C ends the wait."""
        while True:
            try:
                return self._client.blocking_key_value_get(key, 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self._unanswered()

    def begin(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        """Beats, and ends this process when another host is lost, until `_ended` is set."""
        beats: dict[str, str] = {}
        for beat in itertools.count():
            try:
                self._client.key_value_set(f"{BEATS}{self.index}", str(beat), allow_overwrite=True)
                now = dict(self._client.key_value_dir_get(BEATS))
                failed = self._client.key_value_dir_get(ERRORS)
            except jax.errors.JaxRuntimeError:
                if not self._ended.is_set():
                    self._unanswered()
                return
            for key, value in now.items():
                if beats.get(key) != value:
                    self._heard[int(_last(key))] = time.monotonic()
            beats, host = now, self._suspect()
            if self._watching and failed:
                time.sleep(0 if self.index else LEAVE)
                self._lost(int(_last(failed[0][0])), "it ended with an error")
            if self._watching and time.monotonic() - self._heard[host] > SILENCE:
                self._lost(host, f"it was silent for {SILENCE:.0f} s")
            if self._ended.wait(BEAT):
                return

    def _suspect(self) -> int:
        """The host that was silent for longest; host 0 if all were heard lately.

        Its service is gone at once where its process is, and so are the beats of all others.
        """
        host = min(self._heard, key=self._heard.__getitem__)
        lately = time.monotonic() - self._heard[host] < SILENCE / 2
        return 0 if self.index and lately else host

    def _unanswered(self) -> NoReturn:
        """Ends this process because the service does not answer.

        JAX's client sees it too, prints an error and aborts, which _on_abort turns into the last
        line. Only where that does not come is the line printed here: it would not be the last.
        """
        time.sleep(ABORT)
        self.gone()

    def gone(self) -> NoReturn:
        self._lost(self._suspect())

    def _lost(self, host: int, why: str = "it does not answer") -> NoReturn:
        _end(f"\nhost {host} of {self.count} is lost: {why}; host {self.index} ends\n")

    def finish(self) -> None:
        """Waits until host 0 has done all, and parts from the others."""
        if self.index:
            self._awaited(END)
        else:
            self._client.key_value_set(END, "")
        self._stop()
        try:
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError:
            self._unanswered()

    def await_loss(self) -> None:
        """Ends this process if another host is lost, after the seconds that show it at most.

        A program that spans hosts fails on all as soon as one is gone, before its silence tells.
        """
        self._ended.wait(SILENCE + LEAVE)

    def fail(self) -> None:
        """Lets the other hosts know that this one ends with an error.

        JAX would wait for them when this process exits, so it must not know the service any more.
        """
        self._stop()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{ERRORS}{self.index}", "", allow_overwrite=True)
        if not self.index:  # the service ends with this process: the others read the error first
            time.sleep(3 * BEAT)
        for end in (global_state.client, global_state.service):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(end))  # their destructors would wait too
        global_state.client = global_state.service = None
        # The others may be gone before this process is: it then ends at once, by C's _exit.
        _LIBC.signal(int(signal.SIGABRT), _LIBC._exit)

    def _stop(self) -> None:
        self._ended.set()
        self._thread.join()


@contextlib.contextmanager
def joined(coordinator: str | None, count: int | None, index: int | None) -> Iterator[Hosts]:
    """The hosts of a run for the block, from before JAX touches a device.

    None is what JAX knows from Slurm, Kubernetes or ADDRESS. Without a count and ADDRESS there is
    one host. ValueError if the hosts do not meet.
    """
    if count == 1 or (count is None and ADDRESS not in os.environ):
        yield Hosts()
        return
    met: list[Hosts] = []
    _on_abort(met, index)
    _initialize(coordinator, count, index)
    hosts = Hosts(global_state.process_id, global_state.num_processes, global_state.client)
    met.append(hosts)
    hosts.begin()
    try:
        # A host that still waits for JAX's answer would not miss host 0, and wait for all of MEET.
        hosts.meet("begin")
        yield hosts
        hosts.finish()
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            hosts.await_loss()
        hosts.fail()
        raise


def _initialize(coordinator: str | None, count: int | None, index: int | None) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags or flags.startswith("-"):  # else it names a file
        os.environ["XLA_FLAGS"] = f"{OWN_AUTOTUNING} {flags}".strip()
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    named = None not in (coordinator, count, index)
    if coordinator is not None and index == 0:
        _check_port(coordinator)
    try:
        jax.distributed.initialize(
            coordinator, count, index,
            local_device_ids=[],  # all of the host: Slurm's default is one
            cluster_detection_method="deactivate" if named else None,
            initialization_timeout=MEET, heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=PART,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        advice = "" if named else "; give --coordinator, --num-hosts and --host-index"
        raise ValueError(f"the hosts of this run did not meet: {error}{advice}") from None


def _check_port(coordinator: str) -> None:
    """ValueError if host 0 cannot listen at the port: JAX's service would end by a fault of memory
    (jaxlib 0.11.2)."""
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier run's may linger
        try:
            own.bind(("", int(coordinator.rpartition(":")[2])))
        except OSError as error:
            why = f"host 0 cannot listen at this port: {error.strerror}"
            raise ValueError(f"--coordinator {coordinator}: {why}") from None


_one, _kept = threading.Lock(), []  # C's handlers
_LIBC = ctypes.CDLL(None)


def _end(line: str) -> NoReturn:
    """Ends this process with a last line, even while its main thread waits for a device."""
    _one.acquire()  # for good: only one line is the last
    os.write(2, line.encode())
    os._exit(LOST)


def _on_abort(met: list[Hosts], index: int | None) -> None:
    """Makes the lost host's line the last one where JAX aborts this process.

    JAX's client does so as soon as host 0's service is gone, from another thread and before
    `_watch` can know, and where the service turns this host away. Python's signal handlers would
    come too late, so this is C's.
    """
    begin = time.monotonic()

    def aborted(_: int) -> None:
        if met:
            met[0].gone()
        if time.monotonic() - begin < MEET:
            own = "this host" if index is None else f"host {index}"
            _end(f"\nthe hosts did not meet: {UNMET}; {own} ends\n")
        if index == 0:  # it has the service itself
            _end(f"\nthe other hosts did not come within {MEET} seconds; host 0 ends\n")
        _end("\nhost 0 is lost: it does not answer\n")

    _kept.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted))
    _LIBC.signal(int(signal.SIGABRT), _kept[-1])


def _last(key: str) -> str:
    return key.rpartition("/")[2]
