"""What transformers does with a recorded drafter as an assistant of Muse-Glimmer, into
tests/golden/muse_assistant.json. Needs torch, not JAX.

python tests/reference/record_assistant.py
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerForConditionalGeneration,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

HERE = Path(__file__).parent
PAIR = HERE / "cases" / "pair15"
KEPT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KEPT += ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "block_size")
KEPT += ("max_position_embeddings",)
WINDOW, NEW = 24, 60  # most texts exceed the window
RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def assistant() -> MuseGlimmerAssistantModel:
    raw = json.loads((PAIR / "drafter" / "config.json").read_text())
    config = MuseGlimmerAssistantConfig(
        **{key: raw[key] for key in KEPT}, **raw["dflash_config"], sliding_window=WINDOW,
        pad_token_id=None,
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    tensors = load_file(PAIR / "drafter" / "model.safetensors")
    for old, new in RENAMED.items():
        tensors = {name.replace(old, new): x.float() for name, x in tensors.items()}
    model.load_state_dict(tensors)
    return model


def generated(model, target, prompt: list[int]) -> dict:
    """A whole generation, and the tokens that each step committed."""
    begun, plain = [], DFlashTokenCandidateGenerator.get_candidates

    def watched(self, input_ids, **given):
        begun.append(input_ids.shape[1])
        return plain(self, input_ids, **given)

    DFlashTokenCandidateGenerator.get_candidates = watched
    ids = torch.tensor([prompt])
    out = target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=model, max_new_tokens=NEW,
        do_sample=False, speculation_type="dflash", eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    DFlashTokenCandidateGenerator.get_candidates = plain
    lengths = [b - a for a, b in zip(begun[1:], [*begun[2:], out.shape[1]], strict=True)]
    return {
        "prompt_ids": prompt, "output_ids": out[0, len(prompt) :].tolist(),
        "acceptance_lengths": lengths,
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    target = MuseGlimmerForConditionalGeneration.from_pretrained(
        PAIR / "target", dtype=torch.float32
    )
    model, cases = assistant(), json.loads((PAIR / "record.json").read_text())["cases"]
    prompts = [case["prompt_ids"] for case in cases if 15 <= len(case["prompt_ids"]) <= 40][:3]
    config = {"architectures": ["MuseGlimmerAssistantModel"]} | model.config.to_diff_dict()
    record = {
        "config": config,
        "cases": [generated(model, target, prompt) for prompt in prompts],
    }
    path = HERE.parent / "golden" / "muse_assistant.json"
    path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
