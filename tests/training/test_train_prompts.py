"""Training prompts: every source, no test question, and user turns that a target writes itself."""

import gzip
import json
import re
from pathlib import Path

import pytest

from jflash.cli import main, make_prompts
from jflash.io import load_pair, load_tokenizer
from jflash.io.text import decode
from jflash.records.decoding import Decoding, Sampling
from jflash.serving.batch import Job, serve
from jflash.training.prompts import Prompt, boxed, collected
from jflash.training.self_written import user_prefix
from tests.support.small_checkpoints import EOS, USER, make_pair

LONG = "Tom has 3 pens and buys 14 more pens in the shop. How many pens has Tom got now?"
ASKED = "Ann picks 12 pears and eats two of them on her way home. How many are left in the end?"


def command(*arguments: object) -> int:
    return main.run("make-prompts", [str(a) for a in arguments])


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    questions = [LONG, "Short?", ASKED]
    train = [{"question": q, "answer": "1+1=<<1+1=2>>2\n#### 2"} for q in questions]
    task = {"instruction": "Name it.", "instances": [{"input": "a cat"}, {"input": ""}]}
    story = {"Body": "Jo had 4 hats", "Question": "How many hats?"}
    texts = {
        "train.jsonl": "\n".join(json.dumps(r) for r in train),
        "tasks.jsonl": json.dumps(task) + "\n",
        "svamp.json": json.dumps([story, story]),
        "problems.jsonl": "".join(
            json.dumps({"question": f"Is {i} odd?", "source": "word-problems"}) + "\n"
            for i in range(5)
        ),
        "test.jsonl": json.dumps({"question": "SHORT", "answer": "1"}) + "\n\n"
        + json.dumps({"turns": [f"Mind this. {ASKED}", "and more"]}),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in texts}


def test_collects_every_source_but_test_questions(files, tmp_path, capsys):
    output = tmp_path / "out" / "prompts.jsonl"
    given = ["--output", output, "--gsm8k-train", files["train.jsonl"], "--variants", 3]
    given += ["--self-instruct", files["tasks.jsonl"], "--svamp", files["svamp.json"]]
    given += ["--questions", files["problems.jsonl"], "--exclude-test", files["test.jsonl"]]
    assert command(*given) == 0
    told = capsys.readouterr().out
    prompts = [json.loads(line) for line in output.read_text().splitlines()]
    by_source: dict[str, list[str]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt["source"], []).append(prompt["prompt"])
    # "Short?" is a test question but for its case; ASKED shares more than 13 words with one.
    assert by_source["gsm8k-train"] == [boxed(LONG)]
    assert all(
        "\\boxed{}" in text and text != boxed(LONG) for text in by_source["gsm8k-renumbered"]
    )
    assert sorted(by_source["self-instruct"]) == ["Name it.", "Name it.\n\na cat"]
    assert by_source["svamp"] == [boxed("Jo had 4 hats. How many hats?")]
    assert sorted(by_source["word-problems"]) == [boxed(f"Is {i} odd?") for i in range(5)]
    assert f"{len(prompts)} prompts" in told and "2 left out" not in told.split("\n")[0]
    assert not [p for p in prompts if "pears" in p["prompt"] and "12" in p["prompt"]]

    assert command(*given) == 2
    assert "exists already: pass --overwrite" in capsys.readouterr().err
    before = output.read_text()
    assert command(*given, "--overwrite") == 0 and output.read_text() == before


def test_a_file_that_came_meanwhile_stays(files, tmp_path, capsys, monkeypatch):
    """Such as another process's; `--overwrite` was not given."""
    output, honest = tmp_path / "prompts.jsonl", make_prompts.collected

    def meanwhile(*given):
        output.write_text("the other's")
        return honest(*given)

    monkeypatch.setattr(make_prompts, "collected", meanwhile)
    assert command("--output", output, "--questions", files["problems.jsonl"]) == 2
    assert "prompts.jsonl exists already: pass --overwrite" in capsys.readouterr().err
    assert output.read_text() == "the other's"


def test_files_with_a_mark_before_their_text_are_read(files, tmp_path, capsys):
    """Some editors write it."""
    for file in files.values():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    output = tmp_path / "prompts.jsonl"
    given = ["--svamp", files["svamp.json"], "--self-instruct", files["tasks.jsonl"]]
    assert command("--output", output, *given) == 0, capsys.readouterr().err
    assert len(output.read_text().splitlines()) == 3


def test_equal_prompts_count_once():
    prompts = [Prompt("One two?", "a"), Prompt("one  TWO", "b"), Prompt("three", "b")]
    assert collected(prompts, []) == ([prompts[0], prompts[2]], 0)
    assert collected(prompts, ["Three!"]) == ([prompts[0]], 1)
    assert collected([Prompt(boxed("three"), "b")], ["Three!"]) == ([], 1)
    # Signs and parts of letters make other prompts.
    signs = ["What is 7 + 5?", "What is 7 - 5?", "Is C++ old?", "Is C# old?", "कि", "की", "?", "+"]
    different = [Prompt(text, "a") for text in signs]
    assert collected(different, []) == (different, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: re.sub(r"[^\w\s]", "", text),
        lambda text: text.replace(",", ""),
        lambda text: re.sub(r"(\d[\d,]*)", r"**\1**", text),
        lambda text: re.sub(r"(\d[\d,]*)", r"__\1__", text),
        lambda text: text.upper().replace(" ", "\n\n"),
    ],
)
def test_a_test_question_in_other_marks_is_left_out(change):
    """A long one in part and a short one whole, inside of a prompt too."""
    long = "Ann, who has 1,200 pears, eats two, on her way (home). How many are left, in the end?"
    short = "Now explain, please: 5 of them?"
    same = [Prompt(change(text), "a") for text in (long, short)]
    inside = [Prompt(f"Solve this. {prompt.text} Thanks", "a") for prompt in same]
    asked = [*same, *inside, Prompt("Go on, explain 5 of them now, please", "a")]
    assert collected(asked, [long, short]) == (asked[-1:], 4)
    # A test's turn of few words occurs by chance.
    assert collected(asked, ["of them", "Thanks", "Go on"]) == (asked, 0)


def test_target_writes_user_turns(tmp_path, capsys):
    """What is written is what sampling after the template's user mark gives, as one can redo."""
    folders = make_pair(tmp_path)
    output = tmp_path / "prompts.jsonl"
    given = ["--output", output, "--written-by", folders.target, "--count", 24, "--batch", 4]
    given += ["--max-new-tokens", 160, "--seed", 5]
    assert command(*given) == 0
    written = {json.loads(line)["prompt"] for line in output.read_text().splitlines()}
    tokenizer = load_tokenizer(folders.target)
    assert user_prefix(tokenizer) == [USER]
    decoding = Decoding(
        sampling=Sampling(temperature=1.0), max_new_tokens=160, stop_token_ids=(EOS,), seed=5
    )
    jobs = [Job(i, [USER], decoding) for i in range(24)]
    found = serve(load_pair(folders.target), jobs, batch_size=8)
    texts = [decode(tokenizer, g.token_ids).strip() for _, g in found if g.finish_reason == "stop"]
    assert written == {text for text in texts if len(text) >= 12} and len(written) > 2
    assert "of 24 user turns are worth asking" in capsys.readouterr().out


def test_a_name_with_brackets_goes_on_too(tmp_path, capsys):
    """The answers' name is no pattern: what was written before is found again."""
    target = make_pair(tmp_path).target
    given = ["--output", tmp_path / "p[1].jsonl", "--written-by", target, "--count", 4]
    given += ["--batch", 4, "--max-new-tokens", 8, "--overwrite"]
    for again in (False, True):
        assert command(*given) == 2  # too short to be kept
        out, err = capsys.readouterr()
        assert ("4 of 4 answers were made before" in out) == again
        assert "no source gave a prompt" in err
    (written,) = tmp_path.glob("*written*.jsonl")
    assert len(written.read_text().splitlines()) == 4
    written.unlink()
    assert command(*given, "--system", "x " * 2000) == 2  # before a weight is read
    assert "tokens" in capsys.readouterr().err and not list(tmp_path.glob("*written*"))


def test_bad_input_is_a_line(files, tmp_path, capsys):
    output = ["--output", tmp_path / "p.jsonl"]
    (tmp_path / "broken.jsonl").write_text('{"instruction": "x", "instances": []}\n{"a\n')
    whole = gzip.compress(files["test.jsonl"].read_bytes() * 9)
    for name, content in {
        "cut.gz": whole[:-9],
        "damaged.gz": whole[:20] + b"damaged" + whole[27:],
        "number.jsonl": b'{"text": "x"}\n{"text": 5}',
        "among.jsonl": b'{"turns": ["x", 5]}',
        "latin.jsonl": b'{"text": "\xe9"}',
        "body.json": b'[{"Body": "x", "Question": "y"}, {"Body": 5, "Question": "y"}]',
        "empty.jsonl": b'{"question": " ", "answer": "1"}',
        "untold.jsonl": b'{"instruction": "", "instances": [{"input": ""}]}',
        "half.json": b'[{"Body": "x", "Question": "y"}, {"Body": "\\uD800", "Question": "y"}]',
        "bodiless.json": b'[{"Body": "", "Question": "y"}]',
        "nothing.jsonl": b"\n",
        "nothing.json": b"[]",
        "half.jsonl": b'{"question": "one"}\n{"question": "h\\uDC00i"}',
        "gsm8k.jsonl": b'{"question": "x", "answer": "1"}\n{"question": "x", "answer": 1}',
    }.items():
        (tmp_path / name).write_bytes(content)
    made = ["--questions", files["problems.jsonl"]]
    test = [*made, "--exclude-test"]
    greedy = [*made, "--written-by", "any", "--temperature", "0"]
    for given, complaint in [
        ([], "no source of prompts"),
        (["--exclude-test", files["test.jsonl"]], "no source of prompts"),
        (["--gsm8k-train", tmp_path / "none"], "none: no such file"),
        (["--questions", tmp_path], f"{tmp_path.name} is a folder or a pipe: give a file"),
        (["--self-instruct", tmp_path / "broken.jsonl"], "broken.jsonl:2 is not JSON"),
        (["--self-instruct", files["train.jsonl"]], "train.jsonl:1 is no self-instruct task"),
        (["--svamp", files["train.jsonl"]], "is not SVAMP's JSON"),
        (["--svamp", tmp_path / "body.json"], "body.json entry 2 is no SVAMP problem"),
        (["--gsm8k-train", tmp_path / "gsm8k.jsonl"], "gsm8k.jsonl:2 is no GSM8K record"),
        (["--gsm8k-train", tmp_path / "empty.jsonl"], "empty.jsonl:1: question is empty"),
        (["--self-instruct", tmp_path / "untold.jsonl"], "untold.jsonl:1: instruction is empty"),
        (["--svamp", tmp_path / "bodiless.json"], "bodiless.json entry 1: Body is empty"),
        (["--svamp", tmp_path / "half.json"], "half.json entry 2 is not valid UTF-8"),
        ([*made, "--gsm8k-train", tmp_path / "nothing.jsonl"], "nothing.jsonl holds no prompt"),
        ([*made, "--self-instruct", tmp_path / "nothing.jsonl"], "nothing.jsonl holds no prompt"),
        ([*made, "--svamp", tmp_path / "nothing.json"], "nothing.json holds no prompt"),
        ([*test, files["tasks.jsonl"]], "none of the fields"),
        ([*test, tmp_path / "cut.gz"], "cut.gz cannot be read"),
        ([*test, tmp_path / "damaged.gz"], "damaged.gz cannot be read"),
        ([*test, tmp_path / "latin.jsonl"], "latin.jsonl cannot be read"),
        ([*test, tmp_path / "number.jsonl"], "number.jsonl:2: text must be a text or a list"),
        ([*test, tmp_path / "among.jsonl"], "among.jsonl:1: turns must be a text or a list"),
        (["--questions", tmp_path / "half.jsonl"], "half.jsonl:2 is not valid UTF-8"),
        (["--questions", files["tasks.jsonl"]], "tasks.jsonl:1 needs a text `question`"),
        ([*made, "--variants", "-1"], "--variants must be at least 0"),
        ([*made, "--top-p", "0"], "--top-p 0.0 without --written-by TARGET"),
        ([*made, "--count", "5"], "--count 5 without --written-by TARGET"),
        ([*made, "--written-by", "any", "--top-p", "0"], "top_p 0.0: above 0"),
        (
            [*greedy, "--count", "2"],
            "--count 2 at temperature 0: greedy turns are all the same",
        ),
        ([*greedy, "--system", "a", "--system", "b", "--count", "3"], "--system, so at most 2"),
        ([*made, "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        ([*made, "--written-by", ""], "--written-by '': give a folder"),
        ([*made, "--variants", "3"], "--variants 3 without --gsm8k-train"),
        ([*made, "--replicas", "2"], "--replicas 2 without --written-by TARGET"),
        ([*made, "--tensor-parallel", "2"], "--tensor-parallel 2 without --written-by TARGET"),
        ([*made, "--system", "Be brief."], "--system without --written-by TARGET"),
        (["--output", tmp_path, "--overwrite", *made], "is a folder: give a file"),
        (["--output", made[-1], "--overwrite", *made], "would replace"),
        (["--output", made[-1] / "x", *made], "problems.jsonl is a file, no folder: give another"),
        # Where root too makes no folder: before the target is opened, which is none.
        (["--output", "/proc/x/p.jsonl", "--written-by", "none"], "/proc takes no file: No such"),
    ]:
        assert command(*output, *given) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "p.jsonl").exists()
