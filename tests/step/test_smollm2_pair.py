"""The drafter that ships for SmolLM2-135M-Instruct: its files, its tokens, and the reference's.

.ci/run names the target's file and the reference's interpreter; elsewhere what needs them skips.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from jflash import encode_prompt, generate, load_pair, load_tokenizer, stop_token_ids
from jflash.generate import Generation, Pair
from jflash.io import load_drafter
from tests.support.logits import close, target_logits
from tests.support.reference import PYTHON, SMOLLM2, needs, path_of, run_reference

TESTS = Path(__file__).parents[1]
CHECKPOINTS = TESTS.parent / "checkpoints"
DRAFTER = CHECKPOINTS / "smollm2-135m-instruct-dflash"
NEW, FIRST = 24, 5  # tokens; those that are decoded one by one too
QUESTIONS = (
    "A tram carries 48 people. At the first stop 13 get off and 9 get on. How many are on it now?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Mira reads 12 pages a day. How many days does she need for a book of 180 pages?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "What is the capital of France?",
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(path_of(SMOLLM2), DRAFTER, dtype="float32")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(path_of(SMOLLM2))
    return [encode_prompt(tokenizer, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def ours(pair, prompts) -> list[Generation]:
    return generate(
        pair, prompts, max_new_tokens=NEW, stop_token_ids=stop_token_ids(path_of(SMOLLM2))
    )


def test_the_files_are_whole_and_small():
    drafter, params = load_drafter(DRAFTER, "float32")
    assert drafter.config.block_size == 16 and drafter.config.num_target_layers == 30
    assert params
    sizes = {f: f.stat().st_size for f in CHECKPOINTS.rglob("*") if f.is_file()}
    assert sum(size for file, size in sizes.items() if file.is_relative_to(DRAFTER)) <= 24_000_000
    assert sum(sizes.values()) <= 42_000_000
    config = json.loads((DRAFTER / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]


@needs(SMOLLM2)
def test_it_knows_the_capital_and_ends(ours):
    answer = load_tokenizer(path_of(SMOLLM2)).decode(ours[-1].token_ids)
    assert "The capital of France is Paris." in answer
    assert ours[-1].finish_reason == "stop" and ours[-1].token_ids[-1] == 2


@needs(SMOLLM2)
def test_it_drafts_several_tokens_and_changes_none(pair, prompts, ours):
    stops = stop_token_ids(path_of(SMOLLM2))
    oracle = generate(pair, prompts, max_new_tokens=FIRST, stop_token_ids=stops, oracle=True)
    assert [g.token_ids[:FIRST] for g in ours] == [g.token_ids for g in oracle]
    steps = sum(len(g.acceptance_lengths) for g in ours)
    assert sum(sum(g.acceptance_lengths) for g in ours) / steps > 4


@needs(PYTHON, SMOLLM2)
def test_the_reference_decodes_alike(tmp_path, pair, prompts, ours):
    """Tokens and acceptance lengths; the target's logits as transformers loads the same file."""
    asked, out, file = (tmp_path / name for name in ("prompts.json", "out.json", "logits.npy"))
    asked.write_text(json.dumps([{"prompt_ids": ids} for ids in prompts]))
    run_reference(
        TESTS / "reference" / "record_pair.py", "--target", path_of(SMOLLM2), "--drafter", DRAFTER,
        "--prompts", asked, "--out", out, "--logits", file, "--max-new-tokens", NEW,
    )  # fmt: skip
    theirs = json.loads(out.read_text())["cases"]
    assert [g.token_ids for g in ours] == [case["output_ids"] for case in theirs]
    assert [g.acceptance_lengths for g in ours] == [c["acceptance_lengths"] for c in theirs]
    close(target_logits(pair.models.target, pair.params.target, prompts[0]), np.load(file))
