"""gpt-oss's channels by chat and generate: what is shown, and what a conversation keeps."""

import io
import sys

import pytest

from jflash.cli import chat, generate, main
from jflash.cli.live_text import channel_pieces
from jflash.generate import Chunk, Generation, Seconds
from jflash.io import load_tokenizer
from jflash.io.harmony import answer_text
from tests.server.test_harmony import CALL, FINAL, SAYS, THOUGHT, harmony_tokenizer
from tests.support.small_checkpoints import Folders, make_pair

WHOLE = THOUGHT + SAYS + THOUGHT + FINAL
THOUGHTS = "<think>\nso it is\n</think>\n\n"
SHOWN = f"{THOUGHTS}I look.{THOUGHTS}yes"
# The same without marks, as a text that is no chat's is shown.
RAW = "analysisso it isassistantcommentaryI look.assistantanalysisso it isassistantfinalyes"


def models(pair: Folders) -> list[str]:
    pair_of = ["--target", str(pair.target), "--drafter", str(pair.drafter)]
    return [*pair_of, "--max-new-tokens", "20"]


def chunks(ids: list[int], size: int) -> list[Chunk]:
    """An answer by steps of so many tokens."""
    seconds = Seconds(compile=0.0, prefill=0.0, decode=1.0)
    whole = Generation(
        prompt_tokens=1, token_ids=ids, acceptance_lengths=[], finish_reason="stop",
        seconds=seconds,
    )  # fmt: skip
    steps = [ids[place : place + size] for place in range(0, len(ids), size)]
    return [Chunk(step, None if step is not steps[-1] else whole) for step in steps]


CASES = [
    *((WHOLE, SHOWN, "I look.yes"), (SAYS + FINAL, "I look.yes", "I look.yes")),
    (THOUGHT + CALL % '"a": [1]', THOUGHTS, ""),
    ("<|channel|>analysis<|message|><|end|>", "<think>\n\n</think>\n\n", ""),
    # Cut by the limit: in thoughts, in a head, in the text.
    *((THOUGHT[: -len("<|end|><|start|>assistant")], "<think>\nso it is", ""),),
    *((THOUGHT, THOUGHTS, ""), (FINAL[: -len("<|return|>")], "yes", "yes")),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(("whole", "shown", "answer"), CASES)
def test_thoughts_are_shown_in_marks_and_the_answer_is_kept(whole, shown, answer, size):
    tokenizer = harmony_tokenizer()
    ids = tokenizer(whole)["input_ids"]
    given = chunks(ids, size)
    pieces = list(channel_pieces(given, tokenizer))
    assert len(pieces) == len(given)
    assert "".join(piece.shown for piece in pieces) == shown
    assert "".join(piece.answer for piece in pieces) == answer == answer_text(tokenizer, ids)
    before_stop = list(channel_pieces(given, tokenizer, ["it is"]))
    assert "it" not in "".join(piece.shown for piece in before_stop)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Folders:
    """Of gpt-oss's marks and template."""
    folders = make_pair(tmp_path_factory.mktemp("channels"))
    harmony_tokenizer().save_pretrained(folders.target)
    return folders


@pytest.fixture
def asked(pair, monkeypatch) -> list[str]:
    """The prompts, which are all answered by WHOLE."""
    tokenizer, prompts = load_tokenizer(pair.target), list[str]()

    def recited(_, prompt_ids, *__):
        prompts.append(tokenizer.decode(prompt_ids))
        return iter(chunks(tokenizer(WHOLE)["input_ids"], 3))

    for command in (chat, generate):
        monkeypatch.setattr(command, "stream", recited)
    return prompts


def test_a_conversation_keeps_the_answers_alone(pair, asked, monkeypatch, capsys):
    for options, shown, kept in (((), SHOWN, "I look.yes"), (("--no-chat-template",), RAW, RAW)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
        assert main.run("chat", [*models(pair), *options]) == 0
        assert capsys.readouterr().out == f"{shown}\n" * 2
        first, second = asked[-2:]
        assert "so it is" not in first and second.count(kept) == 1
        assert second.count("so it is") == kept.count("so it is")


def test_generate_shows_a_chats_answer_as_chat_does(pair, asked, capsys):
    prompts = (("a",), SHOWN), (("a", "--no-chat-template"), RAW), (("--prompt-ids", "1,2"), RAW)
    for argv, shown in prompts:
        assert main.run("generate", [*argv, *models(pair)]) == 0
        assert capsys.readouterr().out == f"{shown}\n"
