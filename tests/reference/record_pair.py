"""What the reference does with a pair of checkpoints on given prompts (token ids), as JSON.

python tests/reference/record_pair.py --target DIR --drafter DIR --prompts FILE --out FILE
Needs torch, transformers and dflash; FILE holds a list of {"prompt_ids": [...]}. A target may be a
.gguf file. --logits FILE.npy: the target's logits over the first prompt, too.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import dflash.model
import numpy as np
import torch
from transformers import AutoModelForCausalLM

dflash.model._cuda_time = time.perf_counter  # return_stats asks for CUDA's clock


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--logits", type=Path)
    args = parser.parse_args()
    where: dict[str, str] = {"pretrained_model_name_or_path": str(args.target)}
    if args.target.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(args.target.parent)}
        where["gguf_file"] = args.target.name
    target = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    drafter = dflash.model.DFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32)
    cases = []
    for prompt in json.loads(args.prompts.read_text()):
        ids = prompt["prompt_ids"]
        run = dflash.model.dflash_generate(
            drafter.eval(), target, torch.tensor([ids]), args.max_new_tokens,
            [target.config.eos_token_id], return_stats=True,
        )  # fmt: skip
        new = run.output_ids[0, len(ids) :].tolist()
        cases.append(
            {"prompt_ids": ids, "output_ids": new, "acceptance_lengths": run.acceptance_lengths}
        )
    record = {
        "versions": {name: version(name) for name in ("dflash", "torch", "transformers")},
        "max_new_tokens": args.max_new_tokens,
        "cases": cases,
    }
    args.out.write_text(json.dumps(record) + "\n")
    if args.logits:
        with torch.no_grad():
            logits = target(torch.tensor([cases[0]["prompt_ids"]])).logits[0]
        np.save(args.logits, logits.numpy())


if __name__ == "__main__":
    main()
