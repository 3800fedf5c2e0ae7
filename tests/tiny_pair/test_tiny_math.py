"""The embedded pair's recipe runs end to end, and what it counts is what it says."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jflash.acceptance import acceptance, by_ending, is_looping
from jflash.cli import main
from jflash.generate import Generation, Seconds, generate
from jflash.io import load_pair, load_tokenizer, stop_token_ids
from jflash.io.text import encode_prompt
from jflash.records.decoding import Decoding
from jflash.training.data import Conversation, load_conversations, save_conversations
from jflash.training.drafter import default_mask_token_id
from jflash.training.prompts import renumbered
from jflash.training.records import read_records
from tables.documents import TABLES, read_results
from tiny_pair.evaluation import Limits, evaluate_split
from tiny_pair.recipe import full_recipe, smoke_recipe
from tiny_pair.stages import (
    STAGES,
    Gsm8k,
    Workplace,
    chat_prompts,
    clean_gsm8k,
    conversations,
    make_stage,
)
from tiny_pair.word_problems import problems

pytestmark = pytest.mark.usefixtures("compiled_once")
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
TEST_QUESTION = (
    "A long train with many wagons carries 12 cows and 14 goats from one town to another"
)


def command(name: str, *arguments: object) -> int:
    """Runs a script's command in this process and returns its exit code."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    body = script.make if name == "make_tiny_pair" else script.main
    return script.run_command(script.make_parser(), body, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory) -> Gsm8k:
    folder = tmp_path_factory.mktemp("gsm8k")
    records = [
        {"question": "Tom has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7.\n#### 7"},
        {"question": f"{TEST_QUESTION}. How many animals?", "answer": "26\n#### 26"},
    ]
    train, test = folder / "train.jsonl", folder / "test.jsonl"
    train.write_text("\n".join(map(json.dumps, records)))
    test.write_text(json.dumps({"question": TEST_QUESTION, "answer": "#### 26"}))
    return Gsm8k(train, test)


@pytest.fixture(scope="module")
def place(tmp_path_factory, gsm8k) -> Workplace:
    """The whole recipe from nothing, as its command: generator to drafter."""
    made = Workplace(*(tmp_path_factory.mktemp("tiny") / name for name in ("pair", "work")))
    given = ["--smoke", "--output", made.output, "--work", made.work]
    given += ["--gsm8k-train", gsm8k.train, "--gsm8k-test", gsm8k.test]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "make_tiny_pair.py", *map(str, given)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return made


def test_a_stage_needs_the_one_before(tmp_path):
    empty = Workplace(tmp_path / "pair", tmp_path / "work")
    with pytest.raises(ValueError, match="stage drafter needs the result of stage answers"):
        make_stage("drafter", smoke_recipe(), empty, None, lambda step: False)


def test_the_pair_loads_and_decodes_losslessly(place, capsys):
    pair, tokenizer = load_pair(place.target, place.drafter), load_tokenizer(place.target)
    stops = stop_token_ids(place.target)
    assert stops == [tokenizer.eos_token_id] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert pair.models.drafter.config.mask_token_id == tokenizer.mask_token_id
    [prompt] = chat_prompts(tokenizer, ["What is 1 + 1?"])
    args = {"max_new_tokens": 20, "stop_token_ids": stops}
    drafted = generate(pair, [prompt], **args)[0]
    assert drafted.token_ids == generate(pair, [prompt], **args, oracle=True)[0].token_ids
    for stage in STAGES:  # nothing runs again
        assert make_stage(stage, smoke_recipe(), place, None, lambda step: False)
    assert capsys.readouterr().out.count("already made") == len(STAGES)


def test_prompts_are_those_of_the_chat_template(place):
    tokenizer = load_tokenizer(place.target)
    questions = [p.question for p in problems("train", 3, 5)] + ["Größe: 100 € ?"]
    ids = chat_prompts(tokenizer, questions)
    assert ids == [encode_prompt(tokenizer, question) for question in questions]
    text = tokenizer.decode(encode_prompt(tokenizer, "Hi 512!", system="Be brief."))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 512!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [tokenizer.decode([i]) for i in tokenizer("512")["input_ids"]] == ["5", "1", "2"]
    [talk] = conversations(tokenizer, [("Q?", "4\n#### 4")])
    assert tokenizer.decode(talk.answer_ids) == "4\n#### 4<|im_end|>"


def test_gsm8k_is_cleaned(gsm8k):
    assert clean_gsm8k(gsm8k) == [("Tom has 3 pens and buys 4. How many?", "3+4=7.\n#### 7")]


def test_training_stopped_early_leaves_no_target(place, tmp_path):
    cut = Workplace(tmp_path / "pair", tmp_path / "work")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/tokenizer").symlink_to(place.tokenizer)
    assert not make_stage("target", smoke_recipe(), cut, None, lambda step: step >= 4)
    assert not cut.target.exists()


def test_evaluation_counts(place):
    pair, tokenizer = load_pair(place.target, place.drafter), load_tokenizer(place.target)
    limits = Limits(batch_size=3, decoding=Decoding(max_new_tokens=12, stop_token_ids=(2,)))
    found = evaluate_split(pair, tokenizer, "held_out", 4, limits)
    assert sum(found["endings"].values()) == found["all"]["prompts"] == 4
    assert sum(found["all"]["histogram"]) == found["all"]["steps"]


def test_the_evaluations_command(place, gsm8k, tmp_path):
    argv = ["--target", place.target, "--drafter", place.drafter, "--problems", 4, "--batch", 3]
    argv += ["--gsm8k-test", gsm8k.test, "--max-new-tokens", 12, "--compare-width-1"]
    argv += ["--timed-prompts", 2, "--output", tmp_path / "pair.json"]
    assert command("evaluate_tiny_pair", *argv) == 0
    found = json.loads((tmp_path / "pair.json").read_text())
    assert [found[name]["all"]["prompts"] for name in ("eval", "held_out", "gsm8k")] == [4, 4, 1]
    times = found["width_1"]
    assert times["same_tokens"] == times["prompts"] == 2 and times["speed_up"] > 0
    made = {name: TABLES[name](read_results(tmp_path)) for name in ("tiny_pair", "tiny_pair_speed")}
    assert all("`benchmarks/pair.json`" in text for text in made.values())


def generation(ids: list[int], lengths: list[int], reason: str = "stop") -> Generation:
    return Generation(
        prompt_tokens=1, token_ids=ids, acceptance_lengths=lengths, finish_reason=reason,
        seconds=Seconds(compile=0.0, prefill=0.0, decode=1.0),
    )  # fmt: skip


def test_acceptance_is_pooled_and_by_prompt():
    found = acceptance(
        [generation([1] * 6, [4, 1]), generation([1, 2], [1]), generation([1], [])], 4
    )
    assert found["tau_pooled"] == 2.0 and found["tau_mean_of_means"] == 1.75
    assert found["histogram"] == [2, 0, 0, 1] and found["steps"] == 3
    assert found["new_tokens"] == 9 and found["prompts"] == 3
    assert acceptance([], 2)["tau_pooled"] is None


def test_loops_and_limits_are_counted_apart():
    assert is_looping([1, 2, 3, 4, 5] * 8) and is_looping([7] * 22)
    assert not is_looping([7] * 21) and not is_looping([*range(40)] * 2)
    kinds = by_ending(
        [generation([7] * 30, [29], "length"), generation([1, 2], [1], "length"),
         generation([1, 2], [1])], 29,
    )  # fmt: skip
    assert kinds["endings"] == {"ended": 1, "limit": 1, "looping": 1}
    assert kinds["ended"]["tau_pooled"] == 1 and kinds["limit_or_looping"]["tau_pooled"] == 15


def test_conversations_survive_the_disk(tmp_path):
    talks = [Conversation([1, 2], [70_000]), Conversation([3], [4, 5, 6])]
    save_conversations(tmp_path / "a.npz", talks)
    assert load_conversations(tmp_path / "a.npz") == talks


def test_records_that_do_not_fit_are_named(tmp_path):
    def read(*lines: str) -> list[Conversation]:
        (tmp_path / "d.jsonl").write_text("\n".join(lines))
        return read_records(tmp_path / "d.jsonl", lambda t: [len(t)], lambda t: [len(t), 0], 60)

    good = ['{"prompt": "four", "answer": "ab"}', "", '{"prompt_ids": [1, 2]}']
    assert read(*good) == [Conversation([4], [2, 0]), Conversation([1, 2], [])]
    for line, complaint in {
        "{": "d.jsonl:2 is not JSON",
        '{"answer": "x"}': 'd.jsonl:2 has neither "prompt"',
        '{"prompt": "x", "prompt_ids": [1]}': 'd.jsonl:2 has both "prompt" and "prompt_ids"',
        '{"prompt": 5}': "d.jsonl:2: prompt must be a string, got 5",
        '{"prompt_ids": ["a"]}': "d.jsonl:2: prompt_ids must be a list of integers",
        '{"prompt_ids": []}': "d.jsonl:2: the prompt is empty",
    }.items():
        with pytest.raises(ValueError, match=complaint):
            read('{"prompt": "fine"}', line)
    with pytest.raises(ValueError, match="holds no record"):
        read("")


def test_mask_token_is_the_tokenizers_or_unused():
    class Plain:
        mask_token_id = None

        def get_vocab(self) -> dict[str, int]:
            return {f"t{i}": i for i in range(7)}

    assert default_mask_token_id(Plain(), 8) == 7  # as Qwen3's published drafters: 151669
    with pytest.raises(ValueError, match="uses all 7 ids"):
        default_mask_token_id(Plain(), 7)


def test_full_recipe_is_the_embedded_pair():
    recipe = full_recipe()
    assert recipe.drafter.block_size == 16 and recipe.drafter.target_layer_ids == (0, 2, 4, 6, 7)
    assert recipe.target.num_layers == recipe.drafter.num_target_layers == 8


def test_train_drafter_command(place, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        '{"prompt": "Ann has 2 pears."}\n{"prompt_ids": [1, 5], "answer_ids": [6, 2]}\n'
    )
    sizes = ["--num-layers", "1", "--block-size", "4", "--steps", "3", "--batch", "1"]
    sizes += ["--anchors", "4", "--row-length", "64"]
    sizes += ["--max-new-tokens", "8", "--answer-batch", "2"]
    given = ["--target", place.target, "--data", data, "--output", tmp_path / "drafter", *sizes]
    assert main.run("train", [str(a) for a in (*given, "--keep-answers")]) == 0
    pair = load_pair(place.target, tmp_path / "drafter")
    assert pair.models.block_size == 4
    [answers] = (tmp_path / "drafter-work").glob("answers-*.npz")
    assert Conversation([1, 5], [6, 2]) in load_conversations(answers)
    capsys.readouterr()
    for arguments, complaint in [
        (given, "exists already: pass --overwrite"),
        ([*given, "--overwrite", "--data", tmp_path / "none"], "none: no such file"),
        ([*given, "--overwrite", "--steps", "0"], "--steps 0: at least 1"),
        ([*given, "--overwrite", "--anchors", "65"], "anchors must be within 1 … 64"),
    ]:
        assert main.run("train", [str(a) for a in arguments]) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_make_tiny_pair_needs_the_test_set_too(tmp_path, capsys):
    given = ["--output", tmp_path / "pair", "--gsm8k-train", tmp_path / "train.jsonl"]
    assert command("make_tiny_pair", *given) == 2
    assert "--gsm8k-train needs --gsm8k-test" in capsys.readouterr().err


def test_renumbered_keeps_words_and_digits_and_changes_numbers():
    question = "Tom has 12 cats, 3 dogs and 450 fish. How many are 2 of each?"
    changed = renumbered(question, random.Random(0))
    assert re.sub(r"\d", "#", changed) == re.sub(r"\d", "#", question)
    assert changed != question
    assert renumbered(question, random.Random(0)) == changed
