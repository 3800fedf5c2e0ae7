"""scripts/bench_loading.py: the memory of the host while a checkpoint is loaded."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jflash.bench.loading import BLOCK, write_random
from jflash.bench.shapes import model_shape
from jflash.cli import main
from jflash.io import load_target
from jflash.models.params import leaf_paths
from tests.support.refusals import one_line

SIZE = 2**27


# In a process of its own: memory that earlier tests left may be freed while it measures.
MEASURED = """
import sys, time
import numpy as np
from jflash.bench.loading import LOOK_EVERY, Peak
file, size = sys.argv[1], int(sys.argv[2])
with Peak() as peak:
    assert not np.memmap(file, np.uint8, "r").any()
    time.sleep(50 * LOOK_EVERY)
    of_file = peak.most - peak.begin
    array = np.ones(size, np.uint8)
    time.sleep(50 * LOOK_EVERY)
    del array
print(of_file, peak.most - peak.begin)
"""


def test_a_peak_is_seen_and_what_a_file_backs_is_not(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(SIZE))
    command = [sys.executable, "-c", MEASURED, str(file), str(SIZE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    of_file, of_all = map(int, printed.split())
    assert of_file < SIZE / 2 < 0.9 * SIZE < of_all < 1.5 * SIZE


def test_random_weights_are_a_checkpoint(tmp_path):
    """The draws of a block come again after it, and none is 0 or not a number."""
    config = model_shape("tiny-moe").target
    write_random(tmp_path, config)
    target, params = load_target(tmp_path, "bfloat16")
    assert target.config.experts == config.experts
    size = sum(leaf.size for leaf in leaf_paths(config).values())
    assert (tmp_path / "model.safetensors").stat().st_size > 2 * size
    embedding = np.asarray(params["embedding"], np.float32)
    assert 0.015 < embedding.std() < 0.025 and np.isfinite(embedding).all()


@pytest.mark.long
def test_each_form_is_loaded_by_a_process(tmp_path, capfd):
    file = tmp_path / "result.json"
    argv = ["--shape", "tiny", "--layers", "2", "--folder", str(tmp_path), "--json", str(file)]
    assert main.run("bench-loading", argv) == 0
    result = json.loads(file.read_text())
    assert [load["form"] for load in result["loads"]] == ["safetensors", "orbax"]
    assert (result["shape"], result["layers"]) == ("tiny", 2)
    for load in result["loads"]:
        assert 0 < load["largest_array_bytes"] < load["weights_bytes"] < BLOCK
        held = load["peak_bytes"] - load["weights_bytes"]
        assert load["held_before_bytes"] < load["peak_bytes"]
        assert load["peak_beside_weights_bytes"] == held
    assert "orbax: 0.00 GiB of weights" in capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--shape huge", "no shape is called 'huge'"),
        ("--shape tiny --layers 9", "--layers 9: tiny has 3"),
        ("--forms gguf", "--forms gguf: of safetensors,orbax"),
        ("--experts-over devices", "--experts-over devices needs --tensor-parallel of 2 or more"),
        ("--shape tiny --tensor-parallel 2 --experts-over devices", "tiny has no experts"),
        ("--folder nowhere", "--folder nowhere: no such folder"),
        ("--shape llama-3.1-8b", "only models of Qwen3's shape"),
    ],
)
def test_refusals(options, named, capsys):
    assert main.run("bench-loading", options.split()) == 2
    one_line(capsys, named)
