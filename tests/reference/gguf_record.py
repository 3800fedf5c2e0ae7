"""What transformers makes of GGUF files: logits and token ids. Runs in the reference environment.

    python gguf_record.py CASES.json OUT.npz

CASES.json: {name: {"file": path, "ids": [...], "texts": [...]}}, either list may be empty. OUT.npz:
`name/logits` [ids, vocabulary] and, for text number n, `name/n` its ids without added ones.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def record(file: Path, ids: list[int], texts: list[str]) -> dict[str, np.ndarray]:
    found = {}
    if ids:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
        with torch.no_grad():
            found["logits"] = model(torch.tensor([ids])).logits[0].numpy()
    if texts:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        for number, text in enumerate(texts):
            found[str(number)] = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def main(cases: str, out: str) -> None:
    results = {}
    for name, case in json.loads(Path(cases).read_text(encoding="utf-8")).items():
        found = record(Path(case["file"]), case["ids"], case["texts"])
        results |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
