"""Two hosts decode what one does, and a lost one ends the other: two processes of this machine."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jflash.cli import main
from jflash.system.hosts import SILENCE, UNMET
from tests.support.small_checkpoints import make_pair

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "jflash.cli.main", "generate"]
# A host that meets the other one, and then dies, fails, or waits for it.
OTHER = """
import os, signal, sys
from jflash.system.hosts import joined
address, index, what = sys.argv[1:]
with joined(*(address, 2, int(index)) if address else (None, 2, None)) as hosts:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fail":
        raise ValueError("something is wrong here")
    hosts.gathered({}, 2)
"""
# What follows the meeting, where a program spans the hosts.
STEPS = """
    from jax.experimental.multihost_utils import process_allgather
    for step in range(1000):
        process_allgather(step)
        if what == "go" and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def slurm(index: int, job: int) -> dict[str, str]:
    """What `srun` sets for a task; the job decides on the port where host 0 listens."""
    return {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": str(index), "SLURM_LOCALID": "0",
    }  # fmt: skip


@pytest.fixture
def job() -> int:
    """A number of a job whose port is free, of the 4,096 that JAX has for jobs."""
    for number in random.sample(range(1, 4096), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", 61440 + number))
            return number
    raise AssertionError("no port is free")


def start(*argv: str, **variables: str) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {
        "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *argv], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def other(address: str, index: int, what: str, **variables: str) -> subprocess.Popen:
    return start("-c", OTHER, address, str(index), what, **variables)


def of_hosts(address: str, index: int) -> list[str]:
    return ["--coordinator", address, "--num-hosts", "2", "--host-index", str(index)]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> list[str]:
    """A pair and five prompts, drawn at a temperature: three batches for two hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    pair, source = make_pair(folder / "pair"), folder / "in.jsonl"
    lines = [{"prompt_ids": [1, 2 + n], "id": n} for n in range(5)]
    source.write_text("\n".join(map(json.dumps, lines)))
    return [
        *("--prompts", str(source), "--target", str(pair.target), "--drafter", str(pair.drafter)),
        *("--batch-size", "2", "--max-new-tokens", "12", "--temperature", "1", "--ignore-eos"),
    ]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_two_hosts_of_two_devices_write_what_one_device_does(address, work, tmp_path):
    one, two, none = tmp_path / "one.jsonl", tmp_path / "two.jsonl", tmp_path / "none.jsonl"
    each = ["--tensor-parallel", "2"]
    runs = [
        start(*COMMAND, *work, *each, "--output", str(output), *of_hosts(address, index))
        for index, output in enumerate((two, none))
    ]
    assert main.run("generate", [*work, "--output", str(one)]) == 0
    errors = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    want, got = lines_of(one), lines_of(two)
    assert [line["id"] for line in got] == [0, 1, 2, 3, 4]
    for name in ("token_ids", "acceptance_lengths", "text", "finish_reason", "prompt_tokens"):
        assert [line[name] for line in got] == [line[name] for line in want]
    assert len({tuple(line["token_ids"]) for line in got}) == 5
    # The batches were shared: the second one's seconds are not the first host's.
    assert "3/3" in errors[0] and "2/2" in errors[1]
    assert "5 prompts · 60 tokens" in errors[0] and "2 hosts" in errors[0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl"]


def test_hosts_with_other_options_end_with_the_first_that_differs(address, work, tmp_path):
    """Host 0 would wait without end for batches that host 1 does not have."""
    runs = [
        start(*COMMAND, *work, *more, "--output", str(tmp_path / "out"), *of_hosts(address, index))
        for index, more in enumerate(([], ["--batch-size", "4"]))
    ]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    why = "host 1 has batch_size 4, host 0 has 2: run the same command on all hosts"
    assert errors[0].splitlines()[-1] == f"jflash generate: {why}"
    assert errors[1].splitlines()[-1].startswith("host 0 of 2 is lost: it ended with an error")
    assert [run.returncode for run in runs] == [2, 1] and not list(tmp_path.iterdir())


def test_a_killed_host_ends_the_command_of_the_first(address, work, tmp_path):
    """Host 0 compiles, decodes or waits when host 1 dies; none of these may hold it."""
    argv = [*work, "--output", str(tmp_path / "out.jsonl"), *of_hosts(address, 0)]
    run, lost = start(*COMMAND, *argv), other(address, 1, "die")
    lost.communicate(timeout=120)
    begin = time.monotonic()
    errors = run.communicate(timeout=120)[1]
    assert time.monotonic() - begin < 30
    why = f"it was silent for {SILENCE:.0f} s"
    assert errors.splitlines()[-1] == f"host 1 of 2 is lost: {why}; host 0 ends", errors
    assert run.returncode == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "lost, what, why",
    [
        (0, "die", "host 0 of 2 is lost: it does not answer; host 1 ends"),
        (0, "fail", "host 0 of 2 is lost: it ended with an error; host 1 ends"),
    ],
)
def test_the_last_line_names_the_host_that_ended(address, lost, what, why):
    gone, left = other(address, lost, what), other(address, 1 - lost, "wait")
    ends_with(left, gone, what, why)


@pytest.mark.long
def test_a_program_over_the_hosts_that_fails_names_the_lost_one(address):
    """The exchange with the lost host is an error at once, with a trace that names nobody."""
    steps = OTHER.replace("    hosts.gathered({}, 2)\n", STEPS)
    left, gone = (start("-c", steps, address, str(i), what) for i, what in ((0, "wait"), (1, "go")))
    errors, _ = (process.communicate(timeout=120)[1] for process in (left, gone))
    why = f"host 1 of 2 is lost: it was silent for {SILENCE:.0f} s; host 0 ends"
    assert left.returncode == 1 and errors.splitlines()[-1] == why, errors
    assert "Traceback" not in errors


def test_hosts_meet_by_slurms_variables_and_a_lost_one_is_named(job):
    """Each learns its number, and where host 0 listens, from what `srun` sets."""
    left, gone = (other("", i, what, **slurm(i, job)) for i, what in enumerate(("wait", "fail")))
    ends_with(left, gone, "fail", "host 1 of 2 is lost: it ended with an error; host 0 ends")


def ends_with(left: subprocess.Popen, gone: subprocess.Popen, what: str, why: str) -> None:
    """The host that is left ends with this line, and the other with its own error."""
    errors, own = (process.communicate(timeout=120)[1] for process in (left, gone))
    assert left.returncode == 1 and errors.splitlines()[-1] == why, errors
    if what == "fail":  # its error is its last line, and it waits for no other host
        assert gone.returncode == 1, own
        assert own.splitlines()[-1] == "ValueError: something is wrong here", own


@pytest.mark.parametrize(
    "argv, why",
    [
        (["--num-hosts", "2"], "--num-hosts 2 without --prompts"),
        (["--host-index", "1"], "--host-index 1 without --num-hosts N"),
        (["--num-hosts", "2", "--host-index", "2"], "--host-index 2: within 0 … 1"),
        (["--num-hosts", "2", "--coordinator", "here"], "--coordinator here: give HOST:PORT"),
        (["--num-hosts", "2", "--coordinator", "http://a:80"], "http://a:80: give HOST:PORT"),
        (["--num-hosts", "2", "--coordinator", "::1:80"], "--coordinator ::1:80: give HOST:PORT"),
        (["--num-hosts", "0"], "--num-hosts 0: at least 1"),
    ],
)
def test_hosts_that_contradict_themselves_are_refused(argv, why, capsys):
    many = [] if "without --prompts" in why else ["--prompts", "in.jsonl", "--output", "out.jsonl"]
    assert main.run("generate", [*many, *argv]) == 2
    assert why in capsys.readouterr().err


def test_a_host_that_is_turned_away_does_not_say_that_none_came(address):
    """It counts three hosts, where host 0 has two."""
    first = other(address, 0, "wait")
    more = OTHER.replace("(address, 2, int(index))", "(address, 3, int(index))")
    third = start("-c", more, address, "2", "wait")
    errors = third.communicate(timeout=120)[1]
    first.kill()
    first.communicate(timeout=60)
    assert third.returncode == 1
    assert errors.splitlines()[-1] == f"the hosts did not meet: {UNMET}; host 2 ends"


def test_host_0_says_that_no_other_came(address):
    """It has the service itself, so it is not the one that is lost."""
    early = OTHER.replace(".hosts import joined", " import hosts")
    early = early.replace("with joined(", "hosts.MEET = 3\nwith hosts.joined(")
    alone = start("-c", early, address, "0", "wait")
    errors = alone.communicate(timeout=120)[1]
    assert alone.returncode == 1
    line = "the other hosts did not come within 3 seconds; host 0 ends"
    assert errors.splitlines()[-1] == line


def test_a_port_in_use_is_told_by_host_0():
    """JAX's service would end by a segmentation fault."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        alone = other(address, 0, "wait")
        errors = alone.communicate(timeout=120)[1]
    assert alone.returncode == 1
    why = "host 0 cannot listen at this port: Address already in use"
    assert errors.splitlines()[-1] == f"ValueError: --coordinator {address}: {why}"
