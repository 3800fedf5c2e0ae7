"""A tiny gpt-oss whose experts are in MXFP4, and what transformers makes of it.

python tests/reference/record_mxfp4.py --seed N --out DIR
Needs torch and transformers. DIR gets target/ and recorded.safetensors: the first layer's experts
as transformers dequantises them (bfloat16), prompt_ids and logits (float32).
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E, D, F = 4, 32, 32


def packed(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, and exponents around those of usual weights with a few far from them."""
    blocks = torch.randint(0, 256, (E, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, (E, outputs, inputs // 32), dtype=torch.uint8)
    scales[0, :4, 0] = torch.tensor([1, 90, 128, 130], dtype=torch.uint8)
    return blocks, scales


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = GptOssConfig(
        vocab_size=96, hidden_size=D, intermediate_size=F, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8, num_local_experts=E,
        num_experts_per_tok=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 1.0 if name.endswith(("bias", "sinks")) else 0.3)
    folder = args.out / "target"
    model.bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    recorded = {}
    for layer in range(2):
        for part, outputs, inputs in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            del tensors[name]
            blocks, scales = packed(outputs, inputs)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            if layer == 0:
                recorded[part] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    written = json.loads(file.read_text())
    written["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    }
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    read = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    ids = torch.randint(0, 96, (1, 20))
    recorded |= {"prompt_ids": ids[0], "logits": read.float()(ids).logits[0].contiguous()}
    save_file(recorded, args.out / "recorded.safetensors")


if __name__ == "__main__":
    main()
