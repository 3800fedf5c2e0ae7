"""Numbers that compressed-tensors and transformers make of quantised weights, for tests.

Arguments: a safetensors file of one module's tensors for each case, cases.json with each case's
quantization_config by its file, and the file to write: a weight in float32 by case.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import (
    IntQuantizationCompressor,
    NaiveQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

COMPRESSORS: dict[str, Any] = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": NaiveQuantizationCompressor,
}


def weight(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """The weight of a module's tensors."""
    if config["quant_method"] == "compressed-tensors":
        group = config["config_groups"]["group_0"]
        scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"])
        state = COMPRESSORS[config["format"]].decompress(tensors, scheme)
        return state["weight"]
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scale is not None
    return Fp8Dequantize(None)._dequantize_one(tensors["weight"], scale, torch.float32)


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    out = {}
    for name, config in cases.items():
        made = weight(load_file(folder / f"{name}.safetensors"), config)
        out[name], out[f"{name}.dtype"] = made.float().numpy(), str(made.dtype)
    np.savez(folder / "out.npz", **out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
