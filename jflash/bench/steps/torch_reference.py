"""Times the authors' PyTorch code (dflash 0.1.0) on a pair in Hugging Face layout.

A separate program for a Python that need not have JAX: run by path, it imports nothing of jflash.
`python -P torch_reference.py check` tests whether it can run here;
`python -P torch_reference.py time TASK.json RESULT.json` times. A task holds target and drafter
(folders), dtype, prompts (lists of ids), max_new_tokens, stop_token_ids (or null), repeats.
"""

import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

BAD_INPUT = 2
WARM_UP_TOKENS = 24

if __name__ == "__main__":  # an import of all of the package's modules works without these
    try:
        import dflash.model  # pyright: ignore[reportMissingImports]
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        install = "pip install 'transformers>=5.15,<6' and pip install --no-deps dflash==0.1.0"
        why = (
            f"the reference cannot run in {sys.executable}: {error}. Install torch, then {install}"
        )
        print(f"{why}, or name another interpreter with --reference-python", file=sys.stderr)
        sys.exit(BAD_INPUT)


def load(task: dict[str, Any]) -> tuple:
    """The pair, loaded as by dflash's benchmark."""
    how = {"attn_implementation": "sdpa", "dtype": getattr(torch, task["dtype"])}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = (AutoModelForCausalLM, dflash.model.DFlashDraftModel)
    folders = (task["target"], task["drafter"])
    models: list[Any] = [
        kind.from_pretrained(folder, **how) for kind, folder in zip(kinds, folders, strict=True)
    ]
    return (*(model.to(device).eval() for model in models), device)


def timed(task: dict[str, Any], target, drafter, device: str, block_size: int) -> dict[str, Any]:
    """Decodes all prompts `repeats` times; block size 1 is plain decoding.

    Milliseconds of a step and of a token, without the prefill; each is the median of the repeats.
    """
    prompts = [torch.tensor([ids], device=device) for ids in task["prompts"]]

    def decode(prompt, tokens: int):
        return dflash.model.dflash_generate(
            drafter, target, prompt, tokens, task["stop_token_ids"],
            block_size=block_size, return_stats=True,
        )  # fmt: skip

    decode(prompts[0], min(WARM_UP_TOKENS, task["max_new_tokens"]))
    a_step, a_token, lengths = [], [], []
    for _ in range(task["repeats"]):
        runs = [decode(prompt, task["max_new_tokens"]) for prompt in prompts]
        seconds = sum(run.time_per_output_token * run.num_output_tokens for run in runs)
        lengths = [n for run in runs for n in run.acceptance_lengths]
        a_step.append(1e3 * seconds / len(lengths))
        a_token.append(1e3 * seconds / sum(lengths))
    return {
        "block_size": block_size,
        "steps": len(lengths),
        "mean_acceptance_length": sum(lengths) / len(lengths),
        "ms_per_step": statistics.median(a_step),
        "ms_per_token": statistics.median(a_token),
    }


def main(arguments: list[str]) -> None:
    if arguments == ["check"]:
        return
    assert arguments[0] == "time", arguments
    task = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    target, drafter, device = load(task)
    if device == "cpu":
        dflash.model._cuda_time = time.perf_counter  # return_stats asks for CUDA's clock
    result = {
        "versions": {name: version(name) for name in ("dflash", "torch", "transformers")},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "plain": timed(task, target, drafter, device, 1),
        "dflash": timed(task, target, drafter, device, drafter.block_size),
    }
    Path(arguments[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
