"""Quantised weights against compressed-tensors and transformers, bit for bit, on tiny tensors."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jflash.io.quantised.scheme import scheme_of
from jflash.io.quantised.tensors import Header, find_weights
from jflash.io.read_ahead import find_tensors, read
from tests.support.quantised_files import CASES
from tests.support.reference import PYTHON, needs, run_reference

RECORD = Path(__file__).parents[1] / "reference" / "quantised_record.py"
SHAPE = (96, 64)
# AutoAWQ and AutoGPTQ pack and unpack on a CPU too: tests/reference/record_packed.py.
PACKED = Path(__file__).parents[1] / "golden" / "packed"
JUDGED = [name for name in CASES if name.startswith(("ct-", "fp8-", "fbgemm", "modelopt"))]


def read_weight(file: Path, config: dict, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """Ours, from one module's tensors."""
    places = {f"m.{name}": place for name, place in find_tensors(file).items()}
    dtypes = {np.dtype(np.uint8): "F8_E4M3", np.dtype(np.int8): "I8"}
    headers = {n: Header(p.shape, dtypes.get(p.dtype, "")) for n, p in places.items()}
    weight = find_weights(scheme_of(config), {"m.weight": shape}, headers)["m.weight"]
    return np.concatenate([read(piece) for piece in weight.pieces(places)])


def of_gptq(**changes) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16} | changes


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("awq", {"quant_method": "awq", "bits": 4, "group_size": 16}),
        ("gptq", of_gptq()),
        ("gptq-act-order", of_gptq(desc_act=True)),
        ("gptq-int8", of_gptq(bits=8, group_size=-1)),
    ],
)
def test_what_autoawq_and_autogptq_packed_is_what_they_unpack(name, config, tmp_path):
    """Files that the libraries wrote; they round to float16, where ours is exact in float32."""
    tensors = load_file(PACKED / f"{name}.safetensors")
    theirs = tensors.pop("weight")
    assert theirs.dtype == np.float16 and len(np.unique(theirs)) > 500
    save_file(tensors, tmp_path / "m.safetensors")
    ours = read_weight(tmp_path / "m.safetensors", config, theirs.shape)
    np.testing.assert_array_equal(ours.astype(np.float16), theirs)


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
