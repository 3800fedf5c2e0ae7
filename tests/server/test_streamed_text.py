"""Text in pieces: wherever the tokens and the pieces are cut, the whole comes out."""

import asyncio
import itertools
import json
import random
from typing import Any

import pytest

from jflash.io import load_tokenizer
from jflash.io.incremental import WINDOW, Incremental
from jflash.io.text import decode
from jflash.server.calls import Strings
from jflash.server.reasoning import Reasoning, opened
from jflash.server.tools import Tools
from jflash.serving.handle import Handle
from jflash.serving.request import Event, Failed, Request
from jflash.system.embedded import EMBEDDED_PAIR
from tests.support.gguf_files import sentencepiece, write_gguf
from tests.support.letters import END, letters_tokenizer

RANDOM = random.Random(0)


def cuts(whole, count=40):
    """The whole in pieces of length 1, at once, and in random ones."""
    yield [whole[i : i + 1] for i in range(len(whole))]
    yield [whole]
    for _ in range(count):
        places = sorted(RANDOM.choices(range(len(whole) + 1), k=RANDOM.randint(1, 6)))
        edges = [0, *places, len(whole)]
        yield [whole[a:b] for a, b in itertools.pairwise(edges)]


def flags(pieces):
    """Each piece with whether it is the last."""
    return [(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def joined(parts):
    """Calls by their parts: names, arguments, and whether these are whole."""
    calls = []
    for part in parts:
        if part.name is not None:
            assert part.index == len(calls) and not part.arguments
            calls.append((part.name, "", False))
        name, arguments, ended = calls[part.index]
        assert not ended and part.index == len(calls) - 1
        calls[part.index] = (name, arguments + part.arguments, part.ended)
    return calls


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED_PAIR / "target")


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        ([], "Ärger 🦊🦊 – 漢字 costs 12 é!\n\nEND 3"),
        (["END"], "Ärger 🦊🦊 – 漢字 costs 12 é!\n\n"),
        (["\n\nEN", "字 c"], "Ärger 🦊🦊 – 漢"),
        (["🦊🦊🦊", "END 34"], "Ärger 🦊🦊 – 漢字 costs 12 é!\n\nEND 3"),
    ],
)
def test_pieces_are_the_decoded_whole_before_its_earliest_stop(tokenizer, stops, kept):
    whole = "Ärger 🦊🦊 – 漢字 costs 12 é!\n\nEND 3"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(whole.split())  # characters in several tokens are what it is about
    for pieces in cuts(ids):
        stream = Incremental(lambda ids: decode(tokenizer, ids), stops)
        given = [stream.push(piece, last) for piece, last in flags(pieces)]
        assert "".join(given) == kept
        assert stream.stopped == (kept != whole)
        assert not any("\ufffd" in piece for piece in given)


@pytest.mark.parametrize("least", range(9))
def test_a_stop_text_within_the_least_tokens_does_not_count(least):
    """A token is a letter; a stop that begins there and ends later counts."""
    whole, stop = "abcabcab", "cab"
    end = min((i for i in (5, 8) if i > least), default=None)
    kept = whole if end is None else whole[: end - 3]
    for pieces in cuts([ord(letter) for letter in whole]):
        stream = Incremental(lambda ids: "".join(map(chr, ids)), [stop], least)
        given = [stream.push(piece, last) for piece, last in flags(pieces)]
        assert "".join(given) == kept and stream.stopped == (end is not None)


def test_the_stop_that_is_complete_first_ends_the_text_at_any_cut():
    """As token by token: a longer stop that began before it would have come later."""
    for pieces in cuts([ord(letter) for letter in "abcde"]):
        stream = Incremental(lambda ids: "".join(map(chr, ids)), ["bcd", "c"])
        given, taken = "", 0
        for piece, last in flags(pieces):
            given += stream.push(piece, last)
            taken += stream.taken
        assert (given, taken) == ("ab", 3)


def test_a_call_decodes_little_more_than_once():
    """However long the text is, and never more than a window with the call's tokens."""
    lengths = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "".join(chr(97 + i) for i in ids)

    text, ids = Incremental(decode), [i % 26 for i in range(300)]
    pieces = [text.push(ids[i : i + 5], last=i == 295) for i in range(0, 300, 5)]
    assert "".join(pieces) == "".join(chr(97 + i) for i in ids)
    assert len(lengths) < 1.3 * len(pieces) and max(lengths) <= WINDOW + 5


def test_bytes_of_no_character_are_not_waited_for(tokenizer):
    """They come with all else, and are decoded little more than once, whatever their number."""
    lengths, lone = list[int](), tokenizer("🦊", add_special_tokens=False)["input_ids"][1]
    fox = tokenizer("a🦊b", add_special_tokens=False)["input_ids"]

    def counting(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(tokenizer, ids)

    ids = [*fox, *[lone] * 200, *fox, lone, *fox]
    text = Incremental(counting)
    pieces = [text.push([token], False) for token in ids] + [text.push([], True)]
    assert "".join(pieces) == decode(tokenizer, ids)
    assert pieces.index("🦊") < 10 and sum(map(bool, pieces)) > 90
    assert max(lengths) <= 2 * WINDOW and len(lengths) < 6 * len(ids)


@pytest.mark.parametrize(
    "beside", [["<user>"], ["<user>"] * 90, ["▁"]], ids=["one", "many", "blank"]
)
def test_the_blank_after_a_special_token(beside, tmp_path):
    """A window may begin with tokens of no text, after which this decoder drops a blank."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", change=sentencepiece()))
    lengths = list[int]()

    def counting(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(tokenizer, ids)

    for count in range(WINDOW - 2, WINDOW + 3):
        words = ["▁ban", *["ana"] * count, *beside, "▁banana", *["▁ban", *beside] * WINDOW]
        ids = tokenizer.convert_tokens_to_ids(words)
        for stops, begin in itertools.product(((), ["c"]), (0, count + 1)):  # or with those beside
            stream = Incremental(counting, stops)
            pieces = [stream.push([token], False) for token in ids[begin:]]
            pieces += [stream.push([], True)]
            assert "".join(pieces) == decode(tokenizer, ids[begin:])
    assert max(lengths) <= 2 * WINDOW


def test_half_a_character_at_the_end_is_given_out_at_the_end(tokenizer):
    ids = tokenizer("a🦊", add_special_tokens=False)["input_ids"][:-1]
    stream = Incremental(lambda ids: decode(tokenizer, ids))
    assert "".join(stream.push([i], False) for i in ids) == "a"
    assert stream.push([], True) == decode(tokenizer, ids)[1:] != ""


@pytest.mark.parametrize(
    ("inside", "whole", "thought", "said"),
    [
        (False, "<think>\nso\n\nit is\n</think>\n\nYes\n", "so\n\nit is", "Yes\n"),
        (True, "so\n\n</think>\n\nYes", "so", "Yes"),
        (True, "\n<think>\nso</think>Yes", "so", "Yes"),
        (True, " <so <think>", " <so <think>", ""),
        (True, "<th", "<th", ""),
        (True, "never ends </thin", "never ends </thin", ""),
        (False, "\n plain <think> text </think>", "", "\n plain <think> text </think>"),
        (False, "<th", "", "<th"),
    ],
)
def test_thoughts_and_text_are_told_apart_at_any_cut(inside, whole, thought, said):
    for pieces in cuts(whole):
        reader = Reasoning(inside)
        parts = [reader.push(piece, last) for piece, last in flags(pieces)]
        assert "".join(part.reasoning for part in parts) == thought
        assert "".join(part.content for part in parts) == said


def test_a_prompt_that_opens_thoughts_is_seen():
    assert opened("user: hi\nassistant:<think>\n")
    assert not opened("assistant:<think>\n\n</think>\n\n") and not opened("assistant:")
    assert not opened("user: What is <think>?\nassistant:")


def test_calls_are_read_at_any_cut_and_the_rest_stays_text():
    arguments = {"city": "Zürich", "deep": {"tags": ["</tool", "}"]}}
    good = json.dumps({"name": "weather", "arguments": arguments}, ensure_ascii=False)
    whole = (
        f"See:\n<tool_call>\n{good}\n</tool_call>\n<tool_call>no JSON</tool_call> then "
        '<tool_call>{"name": "now"}</tool_call>'
    )
    for pieces in cuts(whole):
        reader = Tools()
        given = [reader.push(piece, last) for piece, last in flags(pieces)]
        assert "".join(text for text, _ in given) == "See:\n\n<tool_call>no JSON</tool_call> then "
        calls = joined(part for _, parts in given for part in parts)
        assert calls == [
            ("weather", json.dumps(arguments, ensure_ascii=False), True), ("now", "{}", True)
        ]  # fmt: skip
    assert [name for name, *_ in joined(Tools(most=1).push(whole, True)[1])] == ["weather"]
    assert Tools().push("a <tool_call>{", True) == ("a <tool_call>{", [])


BEGUN = '<tool_call>{"name": "a\\n", "arguments": {"x": [1, "'
WITHIN = '{"x": [1, "</tool_call>'
GOOD, ONE = '<tool_call>{"name": "c"}</tool_call>', [("c", "{}", True)]
LATE = [("b", '{"x": "</tool_call>"}', True)]


@pytest.mark.parametrize(
    ("whole", "text", "calls"),
    [
        (BEGUN, "", [("a\n", '{"x": [1, "', False)]),  # cut by the limit
        (BEGUN + '</tool_call> and"', "", [("a\n", '{"x": [1, "</tool_call> and"', False)]),
        (BEGUN + '</tool_call>"]}}</tool_call>.', ".", [("a\n", WITHIN + '"]}', True)]),
        (
            BEGUN + '\\"</tool_call>"]}</tool_call>',
            "",
            [("a\n", '{"x": [1, "\\"</tool_call>"]}', True)],
        ),
        (BEGUN + '"</tool_call>.', ".", [("a\n", '{"x": [1, ""', False)]),
        (BEGUN + '}\\"]}"]}, "id": 3', "", [("a\n", '{"x": [1, "}\\"]}"]}', True)]),
        (BEGUN[:-10], BEGUN[:-10], []),
        ('<tool_call>{"name": "\\x", "arguments": {"x": 1}}', None, []),  # no escape of JSON
        ('<tool_call>{"name": "a", "arguments": [{"x": 1}]}</tool_call>', None, []),
        ('<tool_call>{"name": "a", "arguments": {x: 1}}</tool_call>.', None, []),
        (
            '<tool_call>{"name": "a</tool_call>", "arguments": {"x": 1}',
            "",
            [("a</tool_call>", '{"x": 1}', True)],
        ),
        ('<tool_call>{"arguments": {"x": "</tool_call>"}, "name": "b"}</tool_call>.', ".", LATE),
        (f'<tool_call>{{"a": "b</tool_call>{GOOD}', '<tool_call>{"a": "b</tool_call>', ONE),
        (f'<tool_call>a "b</tool_call>{GOOD}', '<tool_call>a "b</tool_call>', ONE),
        ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', None, []),
        ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}", True)]),
        (f"\n{GOOD}\n \n{GOOD}\n", "", ONE * 2),
        (f"\n{GOOD}\n. {GOOD} .", "\n.  .", ONE * 2),
        (" \n", None, []),
        ('<tool_call>{"arguments": {"x" :1}, "name": "b"}', "", [("b", '{"x" :1}', True)]),
        ('<tool_call>{"name": "c", "id": 1, "arguments": { }}', "", [("c", "{ }", True)]),
        ('<tool_call>{"name": "c", "id": 1, "arguments": {"x"', None, []),
    ],
)
def test_what_has_begun_as_a_call_stays_one_and_all_else_stays_text(whole, text, calls):
    """At any cut; `text` None: the whole."""
    for pieces in cuts(whole):
        reader = Tools()
        given = [reader.push(piece, last) for piece, last in flags(pieces)]
        assert joined(part for _, parts in given for part in parts) == calls
        assert "".join(piece for piece, _ in given) == (whole if text is None else text)
        assert reader.count == len(calls)


def test_arguments_come_as_they_are_written():
    reader, sizes = Tools(), list[int]()
    for letter in f"{BEGUN}{'a' * 50}":
        sizes += [len(part.arguments) for part in reader.push(letter, False)[1]]
    assert sizes[:2] == [0, 2] and set(sizes[2:]) == {1} and len(sizes) > 50


@pytest.mark.parametrize("first", ['{"arguments": {"x": "', '{"name": "f", "parameters": {"x": "'])
def test_a_call_that_has_not_begun_is_read_once(monkeypatch, first):
    """Letter by letter, however long it becomes."""
    read, inside = list[str](), Strings.inside

    def noted(self: Strings, letter: str) -> bool:
        read.append(letter)
        return inside(self, letter)

    monkeypatch.setattr(Strings, "inside", noted)
    reader, whole = Tools(), f"<tool_call>{first}{'ab ' * 100}"
    for letter in whole:
        assert reader.push(letter, False) == ("", [])
    assert "".join(read) == whole.removeprefix("<tool_call>")
    assert reader.push('"}}</tool_call>', True)[1] == []


def test_what_is_there_without_waiting_leaves_in_one_list():
    """A pause, the most of a list and an error each end one; nothing is lost or late."""
    most, handle = 3, Handle(Request(prompt_ids=[1]), lambda _: None)

    async def main():
        lists = handle.several(most)
        handle.give([Event((1,)), Event((2,))])
        assert await anext(lists) == [Event((1,)), Event((2,))]
        waits = asyncio.ensure_future(anext(lists))
        await asyncio.sleep(0)
        assert not waits.done()
        handle.give([Event((i,)) for i in range(most + 1)])
        assert await waits == [Event((i,)) for i in range(most)]
        handle.fail(Failed("over"))
        assert await anext(lists) == [Event((most,))]
        with pytest.raises(Failed, match="over"):
            await anext(lists)

    asyncio.run(main())


def test_a_tokenizer_that_decodes_in_its_own_way_does():
    """Others' ids go to the backend at once, with or without special tokens."""
    plain = letters_tokenizer()

    class Loud(type(plain)):
        def _decode(self, token_ids: Any, **options: Any) -> str:
            return super()._decode(token_ids, **options).upper()

    ids = [*plain("the answer")["input_ids"], END]
    for marks, end in ((False, ""), (True, "<end>")):
        assert decode(plain, ids, marks) == f"the answer{end}"
        loud = Loud(tokenizer_object=plain.backend_tokenizer)
        assert decode(loud, ids, marks) == f"the answer{end}".upper()
