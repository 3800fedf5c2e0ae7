"""Records how AutoAWQ and AutoGPTQ pack a weight, and what their own modules make of it again.

    python tests/reference/record_packed.py --awq DIR --gptq DIR --out tests/golden/packed

DIR is an unpacked wheel, of autoawq 0.2.7.post3 and of auto-gptq 0.7.1 for Python 3.11. Their
modules for a CPU are imported by themselves: the packages as a whole want old versions of
transformers, and GPUs. Needs torch and transformers. A file holds a module's tensors, and `weight`
[O, I] in float16: what the library unpacks them to.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

O, I, GROUP = 64, 96, 16
GPTQ = {"gptq": (4, GROUP, False), "gptq-act-order": (4, GROUP, True), "gptq-int8": (8, I, False)}


def bare(folder: Path, *names: str) -> None:
    """Packages whose modules can be imported, and whose own files are not run."""
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package


def drawn(bits: int, group: int, act_order: bool):
    """A linear layer that lies on the grid, its scales and zeros [groups, O], and the groups."""
    groups = torch.arange(I) // group
    groups = groups[torch.randperm(I)] if act_order else groups
    count = -(-I // group)
    codes = torch.randint(0, 1 << bits, (I, O))
    zeros = torch.randint(1, 1 << bits, (count, O))
    scales = (0.01 + 0.01 * torch.rand(count, O)).half().float()
    linear = torch.nn.Linear(I, O, bias=False)
    linear.weight.data = ((codes - zeros[groups]).float() * scales[groups]).T.contiguous()
    return linear, scales, zeros, groups.int()


def keep(file: Path, module: torch.nn.Module, weight: torch.Tensor) -> None:
    tensors = {name: x for name, x in module.named_buffers() if x is not None}
    both = tensors | {"weight": weight.T}
    save_file({name: x.contiguous() for name, x in both.items()}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("awq", "gptq", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    bare(args.awq, "awq", "awq.utils", "awq.modules", "awq.modules.linear")
    bare(args.gptq, "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    linear, scales, zeros, _ = drawn(4, GROUP, False)
    module = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales, zeros=zeros)
    weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, GROUP)
    keep(args.out / "awq.safetensors", module, weight)
    for name, (bits, group, act_order) in GPTQ.items():
        linear, scales, zeros, groups = drawn(bits, group, act_order)
        module = QuantLinear(bits, group, I, O, bias=False)
        module.pack(linear, scales.T.contiguous(), zeros.T.contiguous(), groups)
        module.scales = module.scales.half()
        with torch.no_grad():  # its forward is a product with the weight that it unpacks
            weight = module(torch.eye(I, dtype=torch.float16))
        keep(args.out / f"{name}.safetensors", module, weight)


if __name__ == "__main__":
    main()
