"""Devices train as one does: the same losses, and whole copies of what is trained.

Two hosts of a device each give the bits of one host of two.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jflash.training.steps import device_mesh

ROOT = Path(__file__).parents[2]
# A drafter's training with chunked logits and soft labels: all that a batch is cut up for.
PROGRAM = """
import json, sys, zlib
from jflash.system.hosts import joined
folder, index, *coordinator = sys.argv[1:]
hosts = joined(*coordinator or [None], 2 if coordinator else 1, int(index))
hosts.__enter__()
import jax, numpy as np
from jflash.training.data import random_rows
from jflash.training.drafter import make_lesson
from jflash.training.recipe import Objective
from jflash.training.recipe import TrainConfig
from jflash.training.trainer import train
from tests.support.pairs import random_pair

pair = random_pair()
rows = random_rows(12, 40, 60)
config = TrainConfig(steps=6, batch_size=4, learning_rate=1e-2, compute_dtype="float32",
                     steps_per_call=2, checkpoint_every=100)
lesson = make_lesson(pair.models.target, pair.models.drafter.config, rows, anchors=6,
                     training=config, objective=Objective(loss="tv", weights="dpace"))
trained = train(lesson.loss, lesson.start, pair.params.target, rows, config, folder,
                identity={})
leaves = jax.tree.leaves(trained.params)
assert len(leaves[0].sharding.device_set) == jax.device_count()
assert all(leaf.sharding.is_fully_replicated for leaf in leaves)
json.dump({"devices": jax.device_count(), "history": trained.history,
           "sums": [float(abs(leaf).sum()) for leaf in leaves],
           "bits": [zlib.crc32(np.asarray(leaf).tobytes()) for leaf in leaves]}, sys.stdout)
hosts.__exit__(None, None, None)
"""


def start(directory: Path, devices: int, index: int = 0, *coordinator: str) -> subprocess.Popen:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), str(index), *coordinator],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_devices_give_the_losses_of_one_and_two_hosts_the_bits_of_two_devices(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    runs = [start(tmp_path / str(n), n) for n in (1, 2)]
    runs += [start(tmp_path / "hosts", 1, index, address) for index in (0, 1)]
    outputs = [run.communicate(timeout=300) for run in runs]
    for run, (_, errors) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, errors[-3000:]
    one, two, first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert [each["devices"] for each in (one, two, first, second)] == [1, 2, 2, 2]
    assert "memory of each of 2 device(s)" in outputs[1][0]
    assert two["bits"] == first["bits"] == second["bits"] != one["bits"]
    assert two["history"] == first["history"] == second["history"]
    curves = [tmp_path / name / "curve.json" for name in ("2", "hosts")]
    assert curves[0].read_text() == curves[1].read_text()
    for a, b in zip(one["history"], two["history"], strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(one["sums"], two["sums"], rtol=1e-4)
    losses = [record["loss"] for record in one["history"]]
    assert len(losses) == 3 and losses[0] != losses[-1]


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setattr("jax.devices", lambda: [None] * 4)
    with pytest.raises(ValueError, match="batch of 6 rows does not divide by 4 devices"):
        device_mesh(6)
