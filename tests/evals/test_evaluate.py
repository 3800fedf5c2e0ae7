"""evaluate.py on the embedded pair: numbers, resuming after any end, two turns, refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from jflash.cli import evaluate, evaluation_run, evaluation_shares, main
from jflash.evals import evaluation
from jflash.evals.folder import LOCK
from jflash.io import encode_prompt, load_tokenizer
from jflash.system.hosts import RESULTS, Hosts
from jflash.system.locks import locked
from tests.support.refusals import one_line
from tiny_pair.word_problems import problems

# What is asked here is how answers are counted and kept; bit laws are tests/serving's.
pytestmark = pytest.mark.usefixtures("compiled_once")

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "checkpoints" / "tiny-math" / "target"
COUNT = 8
SAME = ["--dtype", "float32", "--batch", "2", "--max-new-tokens", "120", "--prompt-style", "plain"]
SHORT = ("--max-new-tokens", "16")  # of texts that take many steps
TIMES = ("environment", "speed")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "problems.jsonl"
    asked = problems("eval", seed=100, limit=COUNT)
    rows = [json.dumps({"question": p.question, "answer": p.answer}) for p in asked]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


@pytest.fixture
def run(capsys):
    """main(argv) for GSM8K that must end well: its summary, and what it wrote to both streams."""

    def call(data: Path, folder: Path, *more: str) -> tuple[dict, str, str]:
        argv = ["--data", str(data), "--output", str(folder), *SAME, *more]
        code = main.run("eval-gsm8k", argv)
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads((folder / "summary.json").read_text()), out, err

    return call


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory) -> Path:
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    argv = ["--data", str(data), "--output", str(folder), *SAME]
    assert main.run("eval-gsm8k", argv) == 0
    return folder


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokens(folder: Path, name: str = "answers.jsonl") -> dict[int, list[int]]:
    return {r["index"]: r["token_ids"] for r in lines(folder / name)}


def without_times(summary: dict) -> dict:
    return {key: value for key, value in summary.items() if key not in TIMES}


def killed_after_two_answers(data: Path, folder: Path) -> bytes:
    """What a process that is killed while it decodes leaves of its answers."""
    argv = ["--data", str(data), "--output", str(folder), *SAME]
    command = [sys.executable, str(ROOT / "scripts" / "eval_gsm8k.py"), *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    file = folder / "answers.jsonl"
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") > 1):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return file.read_bytes()


class Board:
    """The coordination service in this process; tests/cli/test_hosts.py has the real one."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, text: str) -> None:
        assert key not in self.texts
        self.texts[key] = text

    def blocking_key_value_get(self, key: str, _: int) -> str:
        return self.texts[key]


def test_hosts_share_the_problems_and_the_first_sums_all_up(
    run, data, unbroken, tmp_path, monkeypatch
):
    board, folder = Board(), tmp_path / "first"
    for index in (1, 0):
        hosts = Hosts(index, 2, board)
        monkeypatch.setattr(evaluate, "joined", lambda *_, hosts=hosts: nullcontext(hosts))
        argv = ["--data", str(data), "--output", str(folder), *SAME]
        assert main.run("eval-gsm8k", argv) == 0
        assert folder.exists() == (index == 0)  # the other host leaves nothing
    results = [key for key in board.texts if key.startswith(RESULTS)]
    assert len(results) == COUNT // 2  # only these were decoded by the other host
    assert tokens(folder) == tokens(unbroken) and len(lines(folder / "answers.jsonl")) == COUNT
    got, want = (json.loads((f / "summary.json").read_text()) for f in (folder, unbroken))
    assert got["settings"].pop("hosts") == 2
    assert without_times(got) == without_times(want)


@pytest.mark.parametrize(
    "more, why",
    [
        (["--seed", "5"], "host 1 has seed 5, host 0 has 0"),
        (["--limit", "4"], "host 1 has problems 4, host 0 has"),
        (["--baseline"], "host 1 has baseline True, host 0 has False"),
    ],
)
def test_a_host_of_other_settings_is_named(data, tmp_path, monkeypatch, capsys, more, why):
    """Its answers would stand among the first host's, or never come."""
    board = Board()
    for index, extra in ((1, more), (0, [])):
        hosts = Hosts(index, 2, board)
        monkeypatch.setattr(evaluate, "joined", lambda *_, hosts=hosts: nullcontext(hosts))
        monkeypatch.setattr(evaluate, "answers_of", lambda *_: None)
        argv = ["--data", str(data), "--output", str(tmp_path / "out"), *SAME, *extra]
        assert main.run("eval-gsm8k", argv) == (0 if index else 2)
    assert why in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_replicas_make_their_parts_once_and_join_them_sorted(
    run, data, unbroken, tmp_path, monkeypatch
):
    folder, begun = tmp_path / "parts", []

    def made(make, parts: int, devices: int) -> list[dict]:
        assert (parts, devices) == (2, 1)
        make(1, 2)
        begun.extend(lines(folder / "answers-1-of-2.jsonl"))
        settings = [make(index, 2) for index in (0, 1)]  # 1 once more, as if its process had died
        assert lines(folder / "answers-1-of-2.jsonl") == begun
        return settings

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # the command sets it for good
    monkeypatch.setattr(evaluate, "require", lambda *_: None)
    monkeypatch.setattr(evaluate, "cluster", lambda *_: nullcontext())
    monkeypatch.setattr(evaluation_shares, "made", made)
    _, out, _ = run(data, folder, "--limit", "3", "--replicas", "2")
    answers = lines(folder / "answers.jsonl")
    assert [r["index"] for r in answers] == [0, 1, 2] and answers[1] in begun
    assert tokens(folder) == {n: tokens(unbroken)[n] for n in range(3)}
    assert "the seconds of 2 replicas" in out and not list(folder.glob("*-of-*"))

    def others(make, parts: int, devices: int) -> list[dict]:
        return [json.loads((folder / "run.json").read_text()) | {"device": "another"}]

    monkeypatch.setattr(evaluation_shares, "made", others)
    argv = ["--data", str(data), "--output", str(folder), *SAME, "--limit", "3", "--replicas", "2"]
    assert main.run("eval-gsm8k", argv) == 2


def test_one_process_goes_on_from_the_parts_of_killed_replicas(run, data, unbroken, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    shutil.copy(unbroken / "run.json", folder)
    left = (unbroken / "answers.jsonl").read_text().splitlines(keepends=True)
    for index in (0, 1):
        (folder / f"answers-{index}-of-2.jsonl").write_text("".join(left[index::2]))
    _, _, err = run(data, folder)
    assert f"resuming: {COUNT} answers are in {folder}" in err
    made = sorted(map(json.loads, left), key=lambda record: record["index"])
    assert lines(folder / "answers.jsonl") == made  # with their times: none is decoded again
    assert not list(folder.glob("*-of-*"))


@pytest.mark.long
def test_killed_and_resumed_it_sums_up_like_an_unbroken_run(run, data, unbroken, tmp_path):
    whole, out, _ = run(data, unbroken)
    assert whole["accuracy"]["share"] == 1 and whole["answers"] == COUNT
    assert "95 % Wilson interval" in out and "pooled" in out
    for name in ("histogram", "position", "progress"):
        assert (unbroken / f"{name}.png").stat().st_size > 5000

    folder = tmp_path / "killed"
    file = folder / "answers.jsonl"
    for _ in range(5):  # a busy machine may let it reach its end before it is killed
        kept = killed_after_two_answers(data, folder)
        if kept.count(b"\n") < COUNT:
            break
        shutil.rmtree(folder)
    assert 1 < kept.count(b"\n") < COUNT
    file.write_bytes(kept + b'{"index": 9, "tok')  # as if it had died while it wrote

    resumed, _, err = run(data, folder)
    assert f"resuming: {kept.count(bytes([10]))} answers are in {folder}" in err
    assert file.read_bytes().startswith(kept)
    assert len(lines(file)) == COUNT and len(tokens(folder)) == COUNT
    assert without_times(resumed) == without_times(whole)
    again, _, err = run(data, folder)
    assert f"resuming: {COUNT} answers" in err
    assert again["speed"] == resumed["speed"]


def test_ctrl_c_keeps_every_answer(run, data, unbroken, tmp_path, monkeypatch, capsys):
    whole = json.loads((unbroken / "summary.json").read_text())
    serve, folder = evaluation.serve, tmp_path / "run"

    def interrupted(*args, **kwargs):
        for i, answer in enumerate(serve(*args, **kwargs)):
            if i == 4:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(evaluation, "serve", interrupted)
    argv = ["--data", str(data), "--output", str(folder), *SAME]
    assert main.run("eval-gsm8k", argv) == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert len(lines(folder / "answers.jsonl")) == 4
    monkeypatch.setattr(evaluation, "serve", serve)
    resumed, _, _ = run(data, folder)
    assert without_times(resumed) == without_times(whole)


@pytest.mark.long
def test_the_baseline_and_every_drafter_say_the_same(run, data, tmp_path):
    limit, count = ("--limit", "2", *SHORT), 2
    summary, out, err = run(data, tmp_path / "pair", "--baseline", *limit)
    tau = summary["acceptance"]["all"]["tau_pooled"]
    assert re.search(rf"right \d+\.\d%, τ {tau:.2f}, [1-9]\d* tokens/s", err)
    baseline = summary["baseline"]
    assert baseline["identical_outputs"] == baseline["answers"] == count
    assert baseline["first_differences"] == [] and baseline["speed_up"] > 0
    assert f"identical        {count} of {count}" in out
    assert tau > 8
    want = tokens(tmp_path / "pair")
    assert tokens(tmp_path / "pair", "baseline.jsonl") == want
    for name, more in {
        "none": ["--drafter", "none"],  # at width 1, another program: --same-as refuses it
        "random": ["--drafter", "random:3"],
        "oracle": ["--oracle"],
    }.items():
        same = [] if name == "none" else ["--same-as", str(tmp_path / "pair")]
        other, out, _ = run(data, tmp_path / name, *more, *same, *limit)
        assert tokens(tmp_path / name) == want
        assert not same or f"as {tmp_path / 'pair'}: {count} of {count} outputs" in out
        tau = other["acceptance"]["all"]["tau_pooled"]
        assert tau == 1 if name != "random" else tau < 2


def test_a_later_run_without_baseline_keeps_a_whole_one(run, data, unbroken, tmp_path):
    """Its answers lie there, and took as long as ours: only one of a part of the prompts is left
    out, as it compares with nothing."""
    folder = tmp_path / "out"
    shutil.copytree(unbroken, folder)
    plain = lines(folder / "answers.jsonl")
    plain[0]["token_ids"][1] += 1
    texts = [json.dumps(record) + "\n" for record in plain]
    (folder / "baseline.jsonl").write_text("".join(texts))
    baseline = run(data, folder)[0]["baseline"]
    assert (baseline["answers"], baseline["identical_outputs"]) == (COUNT, COUNT - 1)
    (folder / "baseline.jsonl").write_text("".join(texts[1:]))
    assert "baseline" not in run(data, folder)[0]


def test_a_later_run_without_same_as_keeps_what_was_compared(run, data, unbroken, tmp_path):
    """Unless an answer had to be decoded again, which was not compared."""
    folder = tmp_path / "out"
    shutil.copytree(unbroken, folder)
    compared = run(data, folder, "--same-as", str(unbroken))[0]["same_as"]
    assert (compared["answers"], compared["identical_outputs"]) == (COUNT, COUNT)
    summary, out, _ = run(data, folder)
    assert summary["same_as"] == compared
    assert f"as {unbroken}: {COUNT} of {COUNT} outputs" in out
    texts = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text("".join(texts[1:]))
    assert "same_as" not in run(data, folder)[0]
    (folder / "summary.json").write_text("{")
    assert "same_as" not in run(data, folder)[0]


def test_other_tokens_than_another_run_has_are_told(data, unbroken, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(unbroken, other)
    found = lines(other / "answers.jsonl")
    found[2]["token_ids"][4] += 1
    (other / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    settings = json.loads((other / "run.json").read_text())
    del settings["draft_rule"]  # older runs did not say it
    (other / "run.json").write_text(json.dumps(settings))
    argv = ["--data", str(data), "--output", str(unbroken), *SAME, "--same-as", str(other)]
    assert main.run("eval-gsm8k", argv) == 1
    token = found[2]["token_ids"][4]
    out = capsys.readouterr().out
    assert f"as {other}: {COUNT - 1} of {COUNT} outputs" in out
    assert f"problem {found[2]['index']}, turn 0: at token 4 {token - 1}, there {token}" in out
    (other / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found[:-1]))
    assert main.run("eval-gsm8k", argv) == 2
    assert f"has {COUNT - 1} answers, its summary {COUNT}" in capsys.readouterr().err
    (other / "summary.json").unlink()
    assert main.run("eval-gsm8k", argv) == 2
    assert "holds no finished run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--max-new-tokens", "60"), "with max_new_tokens 120, this one has 60"),
        (("--batch", "5"), "with batch 2, this one has 5"),
        (("--block-size", "8"), "with block_size 16, this one has 8"),
        (("--top-k", "5", "--temperature", "0.5"), "with temperature 0.0, this one has 0.5"),
    ],
)
def test_runs_of_other_programs_are_not_compared(
    data, unbroken, tmp_path, capsys, options, complaint
):
    out = tmp_path / "x"
    argv = ["--data", str(data), "--output", str(out), *SAME, *options, "--same-as", str(unbroken)]
    assert main.run("eval-gsm8k", argv) == 2
    assert complaint in capsys.readouterr().err
    assert not out.exists()


DRAWN = ("--temperature", "0.9", "--top-p", "0.9", "--seed", "5", "--limit", "3", *SHORT)


@pytest.mark.long
def test_draws_do_not_depend_on_where_a_run_was_broken(data, run, tmp_path, capsys):
    """By rule "greedy"; drafts drawn from q decide what is drawn, so such runs do not compare."""
    greedy = ("--draft-rule", "greedy")
    run(data, tmp_path / "whole", *DRAWN, *greedy)
    want = tokens(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    file = tmp_path / "broken" / "answers.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[:1]))
    run(data, tmp_path / "broken", *DRAWN, *greedy)
    assert tokens(tmp_path / "broken") == want and len(lines(file)) == 3
    same = ("--same-as", str(tmp_path / "whole"))
    argv = ["--data", str(data), "--output", str(tmp_path / "x"), *SAME, *DRAWN, *same]
    assert main.run("eval-gsm8k", argv) == 2
    assert "only under --draft-rule greedy" in capsys.readouterr().err


@pytest.mark.long
def test_draws_of_rule_greedy_do_not_depend_on_the_drafter(data, run, tmp_path):
    whole, greedy = tmp_path / "whole", ("--draft-rule", "greedy")
    run(data, whole, *DRAWN, *greedy)
    other = ("--drafter", "random:3", "--same-as", str(whole))
    told = run(data, tmp_path / "random", *DRAWN, *greedy, *other)[1]
    assert f"as {whole}: 3 of 3 outputs" in told


@pytest.mark.long
def test_draws_from_the_drafter_do_not_depend_on_where_a_run_was_broken(run, data, tmp_path):
    folder = tmp_path / "broken"
    drawn = ("--temperature", "0.9", "--seed", "5", "--limit", "3", *SHORT)
    run(data, folder, *drawn)
    want, file = tokens(folder), folder / "answers.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[:1]))
    run(data, folder, *drawn)
    assert tokens(folder) == want and len(lines(file)) == 3


def test_a_base_model_is_shown_examples(data, tmp_path, monkeypatch):
    asked = []

    def evaluated(run, *_):
        asked.extend(job.prompt_ids for job in evaluation.first_jobs(run.evaluation))
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "_evaluate", evaluated)
    argv = ["--data", str(data), "--output", str(tmp_path), *SAME, "--no-chat-template"]
    argv += ["--few-shot", "1", "--few-shot-data", str(data)]
    assert main.run("eval-gsm8k", argv) == 130
    shown, second = lines(data)[:2]
    text = f"Question: {shown['question']}\nAnswer: {shown['answer'].strip()}\n\n"
    text += f"Question: {second['question']}\nAnswer:"
    assert load_tokenizer(TARGET).decode(asked[1]) == text


@pytest.mark.parametrize("base", [False, True])
def test_a_chat_answer_is_judged_whole_a_base_models_to_the_next_example(
    data, tmp_path, monkeypatch, base
):
    gold = re.sub(r".*#### ", "", lines(data)[0]["answer"], flags=re.DOTALL)
    text = "<think>\n\\boxed{0}?\n</think>\n"  # thoughts are no answer
    text += f"I restate it.\nQuestion: how many?\nAnswer: {gold}"
    read_by = "decode" if base else "answer_text"
    monkeypatch.setattr(evaluation_run, read_by, lambda tokenizer, ids: text)
    argv = ["--data", str(data), "--output", str(tmp_path / "run"), *SAME, "--limit", "1"]
    assert main.run("eval-gsm8k", argv + ["--no-chat-template"] * base) == 0
    (answer,) = lines(tmp_path / "run" / "answers.jsonl")
    assert answer["text"] == text
    assert answer["check"]["correct"] is not base


def test_the_second_turn_holds_the_first_answer(tmp_path, capsys):
    turns = [[p.question, "And twice that?"] for p in problems("eval", seed=7, limit=3)]
    data = tmp_path / "turns.jsonl"
    data.write_text("".join(json.dumps({"turns": t, "category": "x"}) + "\n" for t in turns))
    argv = ["--dataset", "mt-bench", "--data", str(data), "--output", str(tmp_path / "run")]
    assert main.run("evaluate", [*argv, *SAME, "--max-new-tokens", "50", "--baseline"]) == 0, (
        capsys.readouterr().err
    )
    records = {(r["index"], r["turn"]): r for r in lines(tmp_path / "run" / "answers.jsonl")}
    assert len(records) == 6
    tokenizer = load_tokenizer(TARGET)
    for i, (first, second) in enumerate(turns):
        said = records[i, 0]["text"]
        prompt = encode_prompt(tokenizer, second, history=[(first, said)])
        assert records[i, 1]["prompt_tokens"] == len(prompt)
        text = tokenizer.decode(prompt)
        assert text.index(first) < text.index(said) < text.index(second)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] is None and summary["baseline"]["identical_outputs"] == 6


def test_programs_are_run_only_if_asked(tmp_path, capsys, monkeypatch):
    rows = [
        {"prompt": f"def f{i}():\n", "entry_point": f"f{i}", "test": "def check(f): assert f()"}
        for i in range(2)
    ]
    data = tmp_path / "programs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--dataset", "humaneval", "--data", str(data), "--output", str(tmp_path / "run")]
    assert main.run("evaluate", [*argv, *SAME]) == 0, capsys.readouterr().err
    summary = tmp_path / "run" / "summary.json"
    assert json.loads(summary.read_text())["accuracy"] is None
    assert main.run("evaluate", [*argv, *SAME, "--execute"]) == 0, capsys.readouterr().err
    right = json.loads(summary.read_text())["accuracy"]
    assert (right["judged"], right["correct"]) == (2, 0)  # the pair knows no Python
    assert right["by_rule"] == {"failed": {"judged": 2, "correct": 0}}
    monkeypatch.setattr(evaluation, "passes", lambda source: pytest.fail("run a second time"))
    assert main.run("evaluate", [*argv, *SAME, "--execute"]) == 0, capsys.readouterr().err
    assert main.run("evaluate", [*argv, *SAME]) == 0, capsys.readouterr().err
    assert json.loads(summary.read_text())["accuracy"] == right  # the results are there
    ran = tmp_path / "run" / "executed.jsonl"
    ran.write_text(ran.read_text().splitlines(keepends=True)[0])
    assert main.run("evaluate", [*argv, *SAME]) == 0, capsys.readouterr().err
    assert json.loads(summary.read_text())["accuracy"]["judged"] == 1
    ran.write_text(ran.read_text() + '{"index": 1}\n')
    capsys.readouterr()
    assert main.run("evaluate", [*argv, *SAME]) == 2
    assert "executed.jsonl line 2 is no program's result" in capsys.readouterr().err


@pytest.fixture
def refused(capsys):
    """A command that must end with one line before a weight is read."""

    def call(argv: list[str], *named: str) -> None:
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation_shares, "loaded", lambda *_, **__: pytest.fail("weights read"))
            assert main.run("evaluate", argv) == 2
        one_line(capsys, *named)

    return call


def test_bad_input_is_refused_before_a_weight_is_read(refused, data, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(data.read_text() + '{"question": "x"}\n')
    folder = tmp_path / "run"
    same = ["--output", str(folder), "--dataset"]
    with_data = [*same, "gsm8k", "--data", str(data)]
    refused([*same, "gsm8k", "--data", str(broken)], f"jsonl:{COUNT + 1}: ", "answer is missing")
    refused([*same, "odd", "--data", str(data)], "odd", "gsm8k")
    refused([*with_data, "--execute"], "gsm8k has no programs")
    refused([*with_data, "--batch", "0"], "--batch 0")
    below = str(data / "x" / "y")
    refused([*with_data, "--output", below], f"--output {below}: {data} is a file, no folder: give")
    refused([*with_data, "--limit", "0"], "limit of 0")
    refused([*with_data, "--reference-order", "--limit", "3"], "--reference-order")
    refused([*with_data, "--baseline", "--drafter", "none"], "plain decoding already")
    refused([*with_data, "--top-p", "2", "--temperature", "1"], "--top-p 2")
    refused([*with_data, "--top-p", "0.5"], "needs a --temperature")
    rule = [*with_data, "--draft-rule", "sampled"]
    refused(rule, "--draft-rule sampled needs a --temperature above 0")
    refused([*rule, "--temperature", "1", "--drafter", "none"], "sampled without a drafter")
    refused([*with_data, "--oracle", "--drafter", "none"], "--oracle without a drafter")
    refused([*with_data, "--prompt-style", "odd"], "'odd'", "hashes")
    itself = f"--same-as {folder} is the --output: answers are always like themselves"
    refused([*with_data, "--same-as", str(folder)], itself)
    refused([*with_data, "--few-shot-data", str(data)], "without --few-shot")
    refused([*with_data, "--max-new-tokens", "100000"], "problem 0", "positions")
    refused([*with_data, "--target", "elsewhere"], "elsewhere", "--drafter")
    assert not folder.exists()


def test_two_turns_must_fit_with_both_answers(refused, tmp_path):
    data = tmp_path / "turns.jsonl"
    data.write_text(json.dumps({"turns": ["x", "y"]}) + "\n")
    argv = ["--dataset", "mt-bench", "--data", str(data), "--output", str(tmp_path / "run")]
    positions = json.loads((TARGET / "config.json").read_text())["max_position_embeddings"]
    new = positions // 2 + 1
    refused([*argv, "--max-new-tokens", str(new)], "problem 0", f"{positions} positions")


def test_another_run_in_the_folder_is_refused_by_name(run, refused, data, tmp_path):
    folder = tmp_path / "run"
    run(data, folder, "--limit", "2")
    argv = ["--dataset", "gsm8k", "--data", str(data), "--output", str(folder), *SAME]
    refused([*argv, "--limit", "2", "--seed", "3"], "seed 0", "has 3", "--overwrite")
    refused([*argv, "--limit", "3"], "problems 2", "has 3")
    refused([*argv, "--limit", "2", "--drafter", "none"], "drafter", "'none'")
    refused([*argv, "--limit", "2", "--shuffle", "1"], "prompts")
    file = folder / "answers.jsonl"
    file.write_text("broken\n" + file.read_text())
    refused([*argv, "--limit", "2"], "answers.jsonl line 1 is broken")
    (folder / "run.json").write_text("[]")
    refused([*argv, "--limit", "2"], "run.json is no JSON object")
    (folder / "run.json").unlink()
    refused([*argv, "--limit", "2"], "without a run.json")
    assert run(data, folder, "--limit", "2", "--overwrite")[0]["answers"] == 2


def test_a_folder_that_another_process_holds_is_refused_and_left_alone(
    run, refused, data, tmp_path
):
    folder = tmp_path / "run"
    run(data, folder, "--limit", "2")
    file = folder / "answers.jsonl"
    file.write_bytes(file.read_bytes() + b'{"index": 1, "tok')  # what the other one is writing
    before = {path: path.read_bytes() for path in folder.iterdir()}
    argv = ["--dataset", "gsm8k", "--data", str(data), "--output", str(folder), *SAME]
    with locked(folder / LOCK, folder):
        refused([*argv, "--limit", "2"], f"{folder} is in use by another process")
        refused([*argv, "--limit", "2", "--overwrite"], f"{folder} is in use by another process")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_answer_that_stands_twice_counts_once(run, refused, data, tmp_path, capsys):
    folder = tmp_path / "run"
    once, _, _ = run(data, folder, "--limit", "3")
    file = folder / "answers.jsonl"
    found = file.read_text().splitlines(True)
    file.write_text("".join([*found, *found[1:]]))
    twice, _, err = run(data, folder, "--limit", "3")
    assert f"resuming: 3 answers are in {folder}" in err
    assert twice["answers"] == 3 and without_times(twice) == without_times(once)
    other = json.loads(found[0])
    other["token_ids"][-1] += 1
    file.write_text("".join([*found, json.dumps(other) + "\n"]))
    argv = ["--data", str(data), "--output", str(folder), *SAME, "--limit", "3"]
    assert main.run("eval-gsm8k", argv) == 2
    told = f"two different answers to problem {other['index']}, turn 0"
    assert told in capsys.readouterr().err


def test_other_weights_at_the_same_path_are_another_run(refused, data, tmp_path):
    folders = {name: tmp_path / name for name in ("target", "drafter")}
    for name, folder in folders.items():
        shutil.copytree(TARGET.parent / name, folder)
    pair = ["--target", str(folders["target"]), "--drafter", str(folders["drafter"])]
    argv = ["--data", str(data), *SAME, *pair, "--limit", "1"]
    assert main.run("eval-gsm8k", [*argv, "--output", str(tmp_path / "run")]) == 0
    argv = ["--dataset", "gsm8k", *argv]
    for name in ("drafter", "target"):
        file = folders[name] / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[: -len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
        assert file.stat().st_size == len(whole)
        told = f"holds a run with {name}_digest"
        refused([*argv, "--output", str(tmp_path / "run")], told)
        if name == "target":
            same = ["--same-as", str(tmp_path / "run"), "--output", str(tmp_path / "other")]
            refused([*argv, *same], told, "need not be the same")
        file.write_bytes(whole)
