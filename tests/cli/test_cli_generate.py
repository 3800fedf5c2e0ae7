"""generate.py from argv to its output, on random checkpoints; most of it in this process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from jflash import memory
from jflash.cli import generate as cli
from jflash.cli import main
from jflash.cli.live_text import paint, texts
from jflash.cli.main import make_parser
from jflash.generate import Chunk, Generation, Seconds, generate
from jflash.io import load_pair, load_tokenizer, stop_token_ids
from jflash.io.incremental import held_back
from jflash.io.text import before_stop, decode, encode_prompt, stop_at_text
from tests.support.small_checkpoints import EOS, POSITIONS, Folders, make_pair

pytestmark = pytest.mark.usefixtures("compiled_once")
ROOT = Path(__file__).parents[2]
KEYS = {
    *("text", "token_ids", "prompt_tokens", "new_tokens", "steps", "acceptance_lengths"),
    *("mean_acceptance_length", "finish_reason", "seconds", "tokens_per_second", "target"),
    *("drafter", "block_size", "dtype", "device", "attention_backend"),
    *("sampling", "seed", "draft_rule"),
}


@pytest.fixture(scope="module")
def random(tmp_path_factory) -> Folders:
    return make_pair(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def monotone(tmp_path_factory) -> Folders:
    return make_pair(tmp_path_factory.mktemp("monotone"), monotone=True)


def models(folders: Folders) -> list[str]:
    return ["--target", str(folders.target), "--drafter", str(folders.drafter)]


@pytest.fixture
def run(capsys):
    """main(argv) that must succeed: what it wrote to stdout and stderr."""

    def call(*argv: str) -> tuple[str, str]:
        code = main.run("generate", argv)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    return lambda *argv: json.loads(run(*argv, "--json")[0])


def test_json_is_one_object_with_every_key(run, random):
    out, err = run("hello", *models(random), "--max-new-tokens", "9", "--json")
    assert out.count("\n") == 1 and err == ""
    got = json.loads(out)
    assert got.keys() == KEYS
    assert got["seconds"].keys() == {"load", "compile", "prefill", "decode"}
    tokenizer = load_tokenizer(random.target)
    [want] = generate(
        load_pair(*random),
        [encode_prompt(tokenizer, "hello")],
        max_new_tokens=9,
        stop_token_ids=stop_token_ids(random.target),
    )
    assert got["token_ids"] == want.token_ids and got["new_tokens"] == len(want.token_ids)
    assert got["text"] == decode(tokenizer, want.token_ids)
    assert got["acceptance_lengths"] == want.acceptance_lengths
    assert got["new_tokens"] == 1 + sum(got["acceptance_lengths"])
    assert got["mean_acceptance_length"] == sum(got["acceptance_lengths"]) / got["steps"]
    assert got["prompt_tokens"] == len("<user>") - 5 + len("hello") + 1
    assert (got["block_size"], got["dtype"], got["finish_reason"]) == (4, "float32", "length")
    assert got["target"] == str(random.target) and got["drafter"] == str(random.drafter)


def test_no_step_means_null_not_nan(run_json, random):
    got = run_json("hello", *models(random), "--max-new-tokens", "1")
    assert got["mean_acceptance_length"] is None and got["tokens_per_second"] is None
    assert (got["steps"], got["new_tokens"], got["acceptance_lengths"]) == (0, 1, [])


def test_stream_prints_what_json_says(run, run_json, random):
    argv = ["hello", *models(random), "--max-new-tokens", "40", "--ignore-eos"]
    out, err = run(*argv)
    want = run_json(*argv)
    assert out == want["text"] + "\n"
    assert err.count("\n") == 1
    tau = f"τ {want['mean_acceptance_length']:.2f}"
    for part in ("40 tokens", f"{want['steps']} steps", tau, "tokens/s", "first token"):
        assert part in err
    for part in ("compile", "cpu", "float32", "attention cpu", "block 4"):
        assert part in err


def test_any_drafter_none_and_the_oracle_give_the_same_tokens(run_json, random):
    argv = ["hello", "--target", str(random.target), "--max-new-tokens", "20"]
    drafters = [
        ["--drafter", str(random.drafter)],
        ["--drafter", f"random:5:{random.drafter}"],
        ["--drafter", str(random.drafter), "--oracle"],
        ["--drafter", "none", "--block-size", "4"],
        ["--drafter", "none"],
    ]
    results = [run_json(*argv, *drafter) for drafter in drafters]
    assert len({tuple(result["token_ids"]) for result in results}) == 1
    assert [result["block_size"] for result in results] == [4, 4, 4, 4, 1]
    assert [result["drafter"] for result in results] == [
        *(str(random.drafter), f"random:5:{random.drafter}", str(random.drafter)),
        *("none", "none"),
    ]


def test_the_oracle_accepts_nothing(run_json, monotone):
    argv = ["hello", *models(monotone), "--max-new-tokens", "10"]
    free, oracle = run_json(*argv), run_json(*argv, "--oracle")
    assert free["acceptance_lengths"] == [4, 4, 1] and oracle["acceptance_lengths"] == [1] * 9
    assert free["token_ids"] == oracle["token_ids"]


def test_prompt_ids_need_no_tokenizer(run, run_json, random, tmp_path):
    bare = make_pair(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (bare.target / file).unlink()
    argv = ["--prompt-ids", "1,2, 3", "--max-new-tokens", "4"]
    got = run_json(*argv, *models(bare))
    assert got["text"] is None and got["prompt_tokens"] == 3
    with_text = run_json(*argv, *models(random))
    assert with_text["token_ids"] == got["token_ids"] and with_text["text"] is not None
    assert run(*argv, *models(bare))[0].split() == [str(i) for i in got["token_ids"]]


def test_prompt_file_system_reasoning_and_template(run_json, random, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("héllo\n", encoding="utf-8")
    argv = [*models(random), "--max-new-tokens", "3"]
    from_file = run_json("--prompt-file", str(file), *argv)
    assert from_file["token_ids"] == run_json("héllo", *argv)["token_ids"]
    assert from_file["prompt_tokens"] == 1 + 6 + 1
    assert run_json("héllo", *argv, "--no-chat-template")["prompt_tokens"] == 6
    assert run_json("héllo", *argv, "--system", "abc")["prompt_tokens"] == 4 + 8
    assert run_json("héllo", *argv, "--reasoning", "on")["prompt_tokens"] == 8 + len("hmm")


def test_reasoning_effort_is_the_templates(random):
    tokenizer = load_tokenizer(random.target)
    plain = encode_prompt(tokenizer, "hi")
    with pytest.raises(ValueError, match="reasoning high: the chat template has no"):
        encode_prompt(tokenizer, "hi", effort="high")
    own = tokenizer.chat_template
    tokenizer.chat_template = own.replace("enable_thinking", "think")
    with pytest.raises(ValueError, match="reasoning: the chat template has no enable_thinking"):
        encode_prompt(tokenizer, "hi", reasoning=True)
    tokenizer.chat_template = "Reasoning: {{ reasoning_effort }}" + own
    got = encode_prompt(tokenizer, "hi", effort="high")
    assert decode(tokenizer, got[: -len(plain)]) == "Reasoning: high"


def test_the_default_prompt_is_a_word_problem(run_json, random):
    from jflash.cli.prompts import DEFAULT_PROMPT

    got = run_json(*models(random), "--max-new-tokens", "2")
    assert got["prompt_tokens"] == len(DEFAULT_PROMPT.encode()) + 2


def test_stop_ids_add_to_the_models_own(run_json, random):
    argv = ["hello", *models(random), "--max-new-tokens", "30", "--ignore-eos"]
    free = run_json(*argv)["token_ids"]
    stop = next(token for token in free[3:] if token not in free[:3])
    got = run_json(*argv, "--stop-token-ids", f"{stop}")
    assert got["token_ids"] == free[: free.index(stop) + 1] and got["finish_reason"] == "stop"
    assert got["new_tokens"] == 1 + sum(got["acceptance_lengths"])


def test_ignore_eos_drops_the_models_stops_only(run_json, monotone):
    config = monotone.target / "generation_config.json"
    config.write_text('{"eos_token_id": [0, 256]}')
    argv = ["hello", *models(monotone), "--max-new-tokens", "6"]
    try:
        assert run_json(*argv)["token_ids"] == [0]
        assert run_json(*argv, "--ignore-eos")["token_ids"] == [0] * 6
        assert run_json(*argv, "--ignore-eos", "--stop-token-ids", "0")["token_ids"] == [0]
    finally:
        config.unlink()


def test_text_stop_cuts_text_tokens_and_the_last_step(run, run_json, monotone):
    argv = ["hello", *models(monotone), "--max-new-tokens", "30", "--stop", "!!!"]
    got = run_json(*argv)
    assert (got["text"], got["token_ids"], got["finish_reason"]) == ("", [0] * 3, "stop")
    assert got["acceptance_lengths"] == [2]
    assert run(*argv)[0] == "\n"


def test_text_stop_in_a_random_text(run, run_json, random):
    argv = ["hello", *models(random), "--max-new-tokens", "30", "--ignore-eos"]
    whole = run_json(*argv)["text"]
    stop = whole[8:10]
    got = run_json(*argv, "--stop", "never said", "--stop", stop)
    assert got["text"] == before_stop(whole, [stop])
    assert run(*argv, "--stop", "never said", "--stop", stop)[0] == got["text"] + "\n"


def test_a_stop_that_is_a_special_token_stops_by_its_id(run, run_json, monotone, tmp_path):
    """No decoded text has it. Here the token that is said for ever is one."""
    marked = Folders(shutil.copytree(monotone.target, tmp_path / "target"), monotone.drafter)
    tokenizer = Tokenizer.from_file(str(marked.target / "tokenizer.json"))
    tokenizer.add_special_tokens(["!"])
    tokenizer.save(str(marked.target / "tokenizer.json"))
    argv = ["hello", *models(marked), "--max-new-tokens", "6"]
    assert run_json(*argv, "--stop", "!!")["token_ids"] == [0] * 6
    got = run_json(*argv, "--ignore-eos", "--stop", "never said", "--stop", "!")
    assert (got["text"], got["token_ids"], got["finish_reason"]) == ("", [0], "stop")
    assert run(*argv, "--stop", "!")[0] == "\n"


def test_show_steps_brackets_every_step(run, monotone):
    argv = ["hello", *models(monotone), "--max-new-tokens", "10", "--show-steps"]
    assert run(*argv)[0] == "![!!!!][!!!!][!]\n"


def test_paint_alternates_and_leaves_the_prefill_alone():
    assert paint("a", 0, True) == "a"
    assert paint("a", 1, True) != paint("a", 2, True) == paint("a", 4, True)
    assert paint("a", 1, True).endswith("a\033[0m") and paint("", 1, True) == ""


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.use_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not cli.use_colour()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not cli.use_colour()


@pytest.mark.parametrize(("terminal", "json"), [(True, False), (True, True), (False, False)])
def test_a_bar_for_each_model_while_it_is_loaded_on_a_terminal(
    random, terminal, json, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    options = make_parser("generate").parse_args([*models(random), *["--json"] * json])
    cli._load(options, cli._prepare(options, []).files)
    out, err = capsys.readouterr()
    assert out == "" and bool(err) == (terminal and not json)
    for folder in random if err else ():
        assert f"loading {folder.name}: 100%" in err


def test_dtype_and_block_size_reach_the_pair(random):
    argv = [*models(random), "--dtype", "bfloat16", "--block-size", "3"]
    options = make_parser("generate").parse_args(argv)
    pair, setup = cli._load(options, cli._prepare(options, []).files)
    assert pair.params.drafter["fc"]["kernel"].dtype == setup.shared["dtype"] == "bfloat16"
    assert pair.models.block_size == setup.shared["block_size"] == 3


def test_a_seed_decides_what_is_drawn(run_json, random):
    argv = ["hello", *models(random), "--max-new-tokens", "12", "--temperature", "1"]
    ids = [run_json(*argv, "--seed", seed)["token_ids"] for seed in ("1", "1", "2")]
    assert ids[0] == ids[1] != ids[2]


def test_batches_give_what_single_prompts_give(run, run_json, monotone, tmp_path):
    lines = [{"prompt": "a", "id": 7}, {"prompt_ids": [1, 2]}, {"prompt": "ccc", "more": [None]}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    options = [*models(monotone), "--max-new-tokens", "6"]
    argv = ["--prompts", str(source), "--output", str(output), "--batch-size", "2", *options]
    out, err = run(*argv)
    assert out == "" and "3 prompts · 18 tokens · 6 steps · τ 2.50 over all steps" in err
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert [set(line) - KEYS for line in got] == [{"id"}, set(), {"more"}]
    assert got[0]["id"] == 7 and got[2]["more"] == [None]
    assert [line["prompt_tokens"] for line in got] == [3, 2, 5]
    for line in got:
        assert line["token_ids"] == [0] * 6 and line["acceptance_lengths"] == [4, 1]
    # The second batch is padded to the first one's shape: nothing is compiled for it.
    assert got[2]["seconds"]["compile"] < 0.1 * max(1, got[0]["seconds"]["compile"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_all_batches_have_one_shape(run, random, tmp_path, monkeypatch):
    calls = []

    def recorded(pair, prompts, decodings, *, capacity, **_):
        calls.append((len(prompts), capacity))
        return [chunks([0], [0])[-1].generation for _ in prompts]

    monkeypatch.setattr(cli, "generate", recorded)
    monkeypatch.setattr(memory, "PREFILL_CHUNK", 200)  # two of them pass the smallest bucket
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt_ids": [1] * n} for n in (3, 3, 210, 3, 3)]
    source.write_text("\n".join(map(json.dumps, lines)))
    argv = ["--prompts", str(source), "--output", str(output), *models(random)]
    run(*argv, "--batch-size", "2", "--max-new-tokens", "5")
    assert calls == [(2, 512)] * 3 and len(output.read_text().splitlines()) == 5


def test_an_interruption_leaves_the_answers_that_were_there(random, tmp_path, monkeypatch, capsys):
    """Whole lines beside the output, which a later run does not write over unasked."""
    ends = [KeyboardInterrupt(), OSError("the disc is full")]

    def broken(pair, prompts, decodings, *, first_index, **_):
        if first_index == 2:
            raise ends.pop(0)
        return [chunks([0], [0])[-1].generation for _ in prompts]

    monkeypatch.setattr(cli, "generate", broken)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_ids": [1]}\n' * 5)
    argv = ["--prompts", str(source), "--output", str(output), "--batch-size", "2"]
    argv += [*models(random), "--max-new-tokens", "5"]
    left = tmp_path / "out.jsonl.unfinished"
    assert main.run("generate", argv) == 130 and str(left) in capsys.readouterr().err
    lines = left.read_text()
    assert [json.loads(line)["new_tokens"] for line in lines.splitlines()] == [2, 2]
    assert main.run("generate", argv) == 2 and f"{left} has the lines" in capsys.readouterr().err
    left.unlink()
    assert main.run("generate", argv) == 2 and "the disc is full" in capsys.readouterr().err
    assert len(left.read_text().splitlines()) == 2
    monkeypatch.setattr(cli, "generate", lambda *a, **k: broken(*a, **k | {"first_index": 0}))
    assert main.run("generate", [*argv, "--overwrite"]) == 0
    assert len(output.read_text().splitlines()) == 5
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", left.name}


@pytest.mark.parametrize("when", ["generate", "_load"])
def test_a_second_run_of_an_output_is_refused(random, tmp_path, monkeypatch, capsys, when):
    """Whether the first one reads its weights or decodes; it then goes on to its end."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_ids": [1]}\n' * 3)
    argv = ["--prompts", str(source), "--output", str(output), "--batch-size", "1"]
    argv += [*models(random), "--max-new-tokens", "2"]
    first, calls = getattr(cli, when), []

    def busy(*given, **named):
        calls.append(when)
        if len(calls) == 2 or when == "_load":
            for more in ([], ["--overwrite"]):
                assert main.run("generate", [*argv, *more]) == 2
                out, err = capsys.readouterr()
                line = err.split("\r")[-1].split("]")[-1]  # after the first one's bar
                assert out == "" and line.count("\n") == 1 and f"{output} is in use by" in line
        return first(*given, **named)

    monkeypatch.setattr(cli, when, busy)
    assert main.run("generate", argv) == 0
    assert len(calls) == (3 if when == "generate" else 1)  # the others did not come so far
    assert [json.loads(line)["new_tokens"] for line in output.read_text().splitlines()] == [2] * 3
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_what_a_killed_run_had_written_is_kept(random, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_ids": [1]}\n')
    left = tmp_path / "out.jsonl.unfinished"
    argv = ["--prompts", str(source), "--output", str(output)]
    argv += [*models(random), "--max-new-tokens", "2"]
    for more, code in (([], 2), (["--overwrite"], 0)):
        (tmp_path / ".out.jsonl.part").write_text('{"token_ids": [1]}\n{"tok')
        (tmp_path / ".out.jsonl.lock").touch()
        assert main.run("generate", [*argv, *more]) == code
        err = capsys.readouterr().err
        assert err.count(f"{left} has the lines of a run that did not end") == 1
        assert left.read_text() == '{"token_ids": [1]}\n' and output.exists() == (code == 0)
        left.unlink()
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_prompts_of_different_batches_draw_their_own(run, random, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_ids": [1, 2]}\n' * 4)
    argv = [*models(random), "--max-new-tokens", "12", "--temperature", "1", "--ignore-eos"]
    run("--prompts", str(source), "--output", str(output), "--batch-size", "1", *argv)
    texts_ = [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]
    assert len({tuple(ids) for ids in texts_}) == 4


def test_overwrite_replaces_an_output(run, monotone, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    output.write_text("old")
    argv = [*models(monotone), "--max-new-tokens", "2", "--overwrite"]
    run("--prompts", str(source), "--output", str(output), *argv)
    assert json.loads(output.read_text())["new_tokens"] == 2


def test_the_largest_request_that_fits_runs(run_json, monotone):
    new = POSITIONS - 3
    got = run_json("--prompt-ids", "1,2,3", *models(monotone), "--max-new-tokens", str(new))
    assert got["new_tokens"] == new


def test_an_idle_gpu_is_pointed_out(run, monotone, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    argv = ["a", *models(monotone), "--max-new-tokens", "2", "--json"]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    out, err = run(*argv)
    assert "pip install -e '.[cuda12]'" in err and err.count("\n") == 1 and json.loads(out)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS=cpu" in run(*argv)[1]


def test_ctrl_c_ends_without_a_traceback(capsys, monotone, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "stream", interrupted)
    assert main.run("generate", ["a", *models(monotone), "--max-new-tokens", "2"]) == 130
    assert capsys.readouterr().err == ""


def chunks(*groups: list[int]) -> list[Chunk]:
    seconds = Seconds(compile=0.0, prefill=0.0, decode=1.0)
    ids = [i for group in groups for i in group]
    lengths = [len(group) for group in groups[1:]]
    result = Generation(
        prompt_tokens=1,
        token_ids=ids,
        acceptance_lengths=lengths,
        finish_reason="length",
        seconds=seconds,
    )
    return [*(Chunk(group, None) for group in groups[:-1]), Chunk(groups[-1], result)]


def as_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_no_half_character_is_ever_printed():
    text = "aé€😀z"
    pieces = list(texts(chunks(*([byte] for byte in text.encode())), as_bytes))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert pieces[:4] == ["a", "", "é", ""]


def test_spaces_survive_a_decoder_that_strips_the_first_one():
    words = {1: " one", 2: " two", 3: " three"}  # as SentencePiece does

    def decoder(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert list(texts(chunks([1], [2], [3, 1]), decoder)) == ["one", " two", " three one"]


def test_what_stays_half_is_shown_at_the_end():
    assert list(texts(chunks([97], [0xE2, 0x82]), as_bytes)) == ["a", "\ufffd"]


def test_pieces_join_to_the_whole_whatever_the_bytes(random):
    import random as dice

    tokenizer = load_tokenizer(random.target)
    for seed in range(30):
        draw = dice.Random(seed)
        ids = [draw.randrange(258) for _ in range(60)]
        cuts = sorted(draw.sample(range(1, 60), 12))
        groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, 60], strict=True)]
        pieces = texts(chunks(*groups), lambda i: decode(tokenizer, i))
        assert "".join(pieces) == decode(tokenizer, ids), seed


def test_the_start_of_a_stop_is_held_back():
    assert held_back("abcEN", ["END", "NO"]) == 2
    assert held_back("abcN", ["END", "NO"]) == 1 and held_back("abc", ["END"]) == 0
    groups = [[byte] for byte in b"aENbEN"]
    assert list(texts(chunks(*groups), as_bytes, ["END"])) == ["a", "", "", "ENb", "", "EN"]
    groups = [[byte] for byte in b"aEND"]
    assert list(texts(chunks(*groups), as_bytes, ["END"])) == ["a", "", "", ""]


def test_text_stop_finds_the_completing_token(random):
    tokenizer = load_tokenizer(random.target)
    ids = list(tokenizer("one END two")["input_ids"])
    assert stop_at_text(tokenizer, ["END"])(ids) == len("one END")
    assert stop_at_text(tokenizer, ["nothing"])([*ids, EOS]) is None


def test_the_script_itself_into_a_pipe_that_closes(monotone):
    script = f"{sys.executable} {ROOT}/scripts/generate.py"
    command = f"{script} hello {' '.join(models(monotone))} --max-new-tokens 200 --show-steps"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        f"{command} | head -c 9", shell=True, capture_output=True, timeout=120, env=environment
    )
    assert done.stdout == b"![!!!!][!" and done.stderr == b""
