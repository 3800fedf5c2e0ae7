"""Quantised weights against compressed-tensors and transformers, bit for bit, on tiny tensors."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jflash.io.quantised.scheme import scheme_of
from jflash.io.quantised.tensors import Header, find_weights
from jflash.io.read_ahead import find_tensors, read
from tests.support.quantised_files import CASES
from tests.support.reference import PYTHON, needs, run_reference

RECORD = Path(__file__).parents[1] / "reference" / "quantised_record.py"
SHAPE = (96, 64)
# The others need libraries that run on GPUs alone.
JUDGED = [name for name in CASES if name.startswith(("ct-", "fp8-", "fbgemm", "modelopt"))]


def read_weight(file: Path, config: dict) -> np.ndarray:
    """Ours, from one module's tensors."""
    places = {f"m.{name}": place for name, place in find_tensors(file).items()}
    dtypes = {np.dtype(np.uint8): "F8_E4M3", np.dtype(np.int8): "I8"}
    headers = {n: Header(p.shape, dtypes.get(p.dtype, "")) for n, p in places.items()}
    weight = find_weights(scheme_of(config), {"m.weight": SHAPE}, headers)["m.weight"]
    return np.concatenate([read(piece) for piece in weight.pieces(places)])


@needs(PYTHON)
def test_numbers_equal_those_of_the_formats_libraries(tmp_path):
    """They round compressed integers to the scales' dtype, where ours are exact in float32."""
    for name in JUDGED:
        tensors, _ = CASES[name].make(SHAPE, np.random.default_rng(3))
        save_file({k: np.asarray(v) for k, v in tensors.items()}, tmp_path / f"{name}.safetensors")
    configs = {name: CASES[name].config for name in JUDGED}
    (tmp_path / "cases.json").write_text(json.dumps(configs), encoding="utf-8")
    run_reference(RECORD, tmp_path)
    theirs = np.load(tmp_path / "out.npz")
    for name in JUDGED:
        ours = read_weight(tmp_path / f"{name}.safetensors", configs[name])
        if str(theirs[f"{name}.dtype"]) == "torch.bfloat16":
            ours = ours.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(ours, theirs[name], err_msg=name)
