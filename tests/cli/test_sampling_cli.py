"""generate.py's sampling options, for all prompts and for a line of a file of its own."""

import json
import re

import pytest

from jflash.cli import main
from jflash.cli.main import make_parser
from tests.support.refusals import decode
from tests.support.small_checkpoints import Folders, make_pair

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Folders:
    return make_pair(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def weightless(tmp_path_factory) -> Folders:
    """Nothing can be loaded: what is refused is refused before."""
    pair = make_pair(tmp_path_factory.mktemp("weightless"))
    for folder in pair:
        (folder / "model.safetensors").unlink()
    return pair


HOT = ["--temperature", "1"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--top-p", "0.9"], "--top-p 0.9 needs a --temperature above 0"),
        (["--top-k", "5"], "--top-k 5 needs a --temperature above 0"),
        (["--min-p", "0.1"], "--min-p 0.1 needs a --temperature above 0"),
        ([*HOT, "--top-p", "0"], "--top-p 0.0: above 0"),
        ([*HOT, "--top-p", "1.5"], "--top-p 1.5: above 0, at most 1"),
        ([*HOT, "--top-p", "nan"], "--top-p nan"),
        ([*HOT, "--top-k", "-1"], "--top-k -1: a whole number"),
        ([*HOT, "--top-k", "2.5"], "2.5"),
        ([*HOT, "--min-p", "-0.5"], "--min-p -0.5: within 0"),
        (["--temperature", "1e-9"], "--temperature 1e-09: 0 (greedy) or"),
        (["--draft-rule", "sampled"], "--draft-rule sampled needs a --temperature above 0"),
        ([*HOT, "--draft-rule", "best"], "best"),
    ],
)
def test_options(weightless, refused, argv, named):
    refused(decode(weightless, *argv), named)


def test_drawn_drafts_need_a_drafter(weightless, refused):
    argv = ["hi", "--target", str(weightless.target), "--drafter", "none", *HOT]
    refused([*argv, "--draft-rule", "sampled"], "--draft-rule sampled without a drafter")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"temperature": 1, "top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"top_p": 0.5}, "top_p 0.5 needs a temperature above 0"),
        ({"temperature": 1, "min_p": 2}, "min_p 2.0: within 0"),
        ({"sampling": {}}, "sampling: keys of the result"),
    ],
)
def test_a_line_that_cannot_be_drawn_is_named(weightless, refused, tmp_path, line, named):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": "a"} | line))
    argv = ["--prompts", str(source), "--output", str(tmp_path / "out.jsonl")]
    refused(decode(weightless, *argv, prompt=None), "in.jsonl:2: " + named)


def run(pair: Folders, *argv: str) -> None:
    models = ["--target", str(pair.target), "--drafter", str(pair.drafter)]
    assert main.run("generate", [*models, "--max-new-tokens", "10", "--ignore-eos", *argv]) == 0


@pytest.mark.parametrize("rule", ["greedy", "sampled"])
def test_a_stream_and_json_give_the_same_text(pair, capsys, rule):
    how = ["hello", *HOT, "--top-p", "0.9", "--seed", "5", "--draft-rule", rule]
    run(pair, *how, "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["sampling"] == {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    assert (result["seed"], result["draft_rule"]) == (5, rule)
    run(pair, *how)
    assert capsys.readouterr().out == result["text"] + "\n"


def test_a_line_draws_as_it_says(pair, capsys, tmp_path):
    """Over the options; a greedy one gives greedy tokens, and all lines are of one program."""
    own = [{}, {"temperature": 0}, {"temperature": 2, "top_k": 3}, {"top_p": 1}]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt_ids": [1, 2]} | line) for line in own))
    files = ["--prompts", str(source), "--output", str(output), "--batch-size", "2"]
    run(pair, *files, "--temperature", "0.7", "--top-p", "0.8")
    got = [json.loads(line) for line in output.read_text().splitlines()]
    off = {"temperature": 0.7, "top_k": 0, "top_p": 0.8, "min_p": 0.0}
    assert [line["sampling"] for line in got] == [
        off,
        {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        off | {"temperature": 2.0, "top_k": 3},
        off | {"top_p": 1.0},
    ]
    assert not {"temperature", "top_k", "top_p"} & set().union(*got)
    capsys.readouterr()
    run(pair, "--prompt-ids", "1,2", "--json")
    assert json.loads(capsys.readouterr().out)["token_ids"] == got[1]["token_ids"]
    assert len({tuple(line["token_ids"]) for line in got}) > 1


@pytest.mark.parametrize("parser", [make_parser("generate"), make_parser("evaluate")])
def test_help_says_where_the_drafter_changes_no_token(parser):
    """Drafts drawn from q decide which tokens are drawn; greedy ones never do."""
    text = " ".join(parser.format_help().split())
    (oracle,) = re.findall(r"--oracle the same executable.*?--draft-rule greedy", text)
    (random,) = re.findall(r"random:SEED or random:SEED:SOURCE.*?--draft-rule greedy\)", text)
    for what in (oracle, random):
        assert "the same greedy tokens" in what
        assert "temperature 0" in what and "only under --draft-rule greedy" in what
