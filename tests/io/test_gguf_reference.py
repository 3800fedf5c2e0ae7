"""GGUF targets against transformers' own GGUF loading, in the reference environment.

Small random files of every type and architecture, and SmolLM2-135M-Instruct as its makers' users
have it. .ci/run names the interpreter and the file; elsewhere these tests skip.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jflash import generate, load_pair
from jflash.io import encode_prompt, load_target, load_tokenizer, stop_token_ids
from tests.support.gguf_files import KINDS, Kind, sentencepiece, write_gguf
from tests.support.logits import close, target_logits
from tests.support.reference import GEMMA3, PYTHON, SMOLLM2, needs, path_of, run_reference

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = Path(__file__).parents[1] / "reference" / "gguf_record.py"
# Llama's rows are permuted, whatever their type; the other families read what it reads.
SMALL = [("llama", kind) for kind in KINDS]
SMALL += [(arch, kind) for arch in ("qwen2", "qwen3") for kind in (Kind.Q8_0, Kind.Q4_K)]
SMALL += [("gemma3", Kind.Q8_0)]
IDS = np.random.default_rng(1).integers(0, 260, 20).tolist()
# Texts without a space before a digit: SPLIT says why.
TEXTS = [
    "<|im_start|>user\nNatalia sold clips to (48) of her friends in April.<|im_end|>\n",
    "Hello, world! It's 9 PM; you'll've $3.50—or €2,00?\n\n\n\tTabs\tand\r\nCRLF   \n x",
    "def f(x):\n    return x**2 + x  # comment\n\n\nclass A:\n\tpass\n",
    "Ünïcödé naïve café 北京大学 🙂👍🏽 Привет мир العربية a<|im_end|>b",
]
# Recorded from llama.cpp (2026-10): where a space meets a digit, transformers' ids are others.
SPLIT = {
    "1 2  3   4    5": [33, 216, 34, 256, 35, 333, 36, 289, 37],
    "  leading and  double  2 spaces  12345 end  ": [
        216, 2899, 284, 216, 5561, 256, 34, 5600, 256, 33, 34, 35, 36, 37, 1112, 256,
    ],
    "2024年 ١٢٣ ½ Ⅷ": [
        34, 32, 34, 36, 32090, 129, 216, 164, 111, 164, 112, 164, 113, 216, 16738, 216, 173, 223,
        117,
    ],
}  # fmt: skip
# Without <tool>, which is no special token: transformers takes it apart, llama.cpp does not.
PIECES = ["banana ban anana", "  banana an\nb  c", "ban<user> ana", "é ca"]


def case(file: Path | str, ids: list[int], texts: list[str]) -> dict[str, Any]:
    return {"file": str(file), "ids": ids, "texts": texts}


def recorded(folder: Path, cases: dict[str, Any]) -> Any:
    """Their record of some cases; one process for all of them."""
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    run_reference(RECORD, folder / "cases.json", folder / "out.npz")
    with np.load(folder / "out.npz") as found:
        return dict(found)


def logits(file: Path | str, ids: list[int]) -> np.ndarray:
    """Ours [ids, vocabulary], in float32."""
    return target_logits(*load_target(file, "float32"), ids)


class Recorded(NamedTuple):
    """Small files, and what the reference makes of them and of SmolLM2, if it is there."""

    files: dict[str, Path]
    theirs: Any


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Recorded:
    folder = tmp_path_factory.mktemp("gguf")
    files = {
        f"{arch}-{kind.name}": write_gguf(
            folder / f"{arch}-{kind.name}.gguf", arch, kind, seed, tied=bool(seed % 2)
        )
        for seed, (arch, kind) in enumerate(SMALL)
    }
    cases = {name: case(file, IDS, []) for name, file in files.items()}
    files["pieces"] = write_gguf(folder / "pieces.gguf", change=sentencepiece())
    cases["pieces"] = case(files["pieces"], [], PIECES)
    if SMOLLM2 in os.environ:
        cases["real"] = case(path_of(SMOLLM2), [], TEXTS)
    return Recorded(files, recorded(folder, cases))


@needs(PYTHON)
def test_small_files(small):
    files, theirs = small
    for name in files.keys() - {"pieces"}:
        close(logits(files[name], IDS), theirs[f"{name}/logits"])
    tokenizer = load_tokenizer(files["pieces"])
    for number, text in enumerate(PIECES):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs[f"pieces/{number}"].tolist(), text


@needs(PYTHON, SMOLLM2)
def test_smollm2(small):
    """Its tokenizer; its logits are compared in test_smollm2_pair.py, where it is loaded anyway."""
    smollm2 = path_of(SMOLLM2)
    tokenizer = load_tokenizer(smollm2)
    for number, text in enumerate(TEXTS):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert own == small.theirs[f"real/{number}"].tolist(), text
        assert tokenizer.decode(own) == text


@needs(SMOLLM2)
def test_the_text_of_smollm2():
    """What it answers is read in test_smollm2_pair.py, where it is compiled anyway."""
    smollm2 = path_of(SMOLLM2)
    assert hashlib.sha256(Path(smollm2).read_bytes()).hexdigest() == SHA256
    tokenizer, stops = load_tokenizer(smollm2), stop_token_ids(smollm2)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert stops == [tokenizer.convert_tokens_to_ids("<|im_end|>")] == [2]
    for text, ids in SPLIT.items():
        assert tokenizer(text)["input_ids"] == ids, text
    prompt = encode_prompt(tokenizer, "What is the capital of France?")
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@needs(PYTHON, GEMMA3)
def test_gemma_3_speaks_and_its_logits_are_transformers(tmp_path):
    """transformers splits its text otherwise than the model's own tokenizer, so ids are ours."""
    file = path_of(GEMMA3)
    tokenizer, pair = load_tokenizer(file), load_pair(file, dtype="float32")
    ids = tokenizer("Water boils at a temperature of")["input_ids"]
    assert ids == [2, 17390, 104264, 657, 496, 4022, 529]
    [answer] = generate(pair, [ids], max_new_tokens=12)
    assert tokenizer.decode(answer.token_ids).startswith(" 100 degrees Celsius.")
    ids += answer.token_ids
    close(logits(file, ids), recorded(tmp_path, {"real": case(file, ids, [])})["real/logits"])
