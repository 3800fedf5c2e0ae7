"""A grammar that takes llguidance minutes is refused, and what comes after it is not."""

import json
from typing import Any

import pytest

from jflash.serving import tried
from jflash.serving.grammar import Grammars
from jflash.serving.tried import TriedGrammars
from tests.support.letters import END, letters_tokenizer

ALL_OF = {"allOf": [{"type": "string", "pattern": f"a{i}|b?c?{i}"} for i in range(40)]}
DOUBLED = "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(16))


@pytest.fixture(scope="module")
def grammars() -> TriedGrammars:
    return TriedGrammars(letters_tokenizer(), 67, [END])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a?" * 100_000),
        ("json_schema", json.dumps(ALL_OF)),
        ("grammar", f'start: T16\nT0: "a"? "b"?\n{DOUBLED}'),
    ],
)
def test_a_slow_grammar_is_refused_each_time(grammars, kind: Any, text):
    for _ in range(2):
        with pytest.raises(ValueError, match="more than 2 seconds of a core: give a simpler one"):
            grammars.compile(kind, text)
    assert grammars.compile("regex", "[ab]{3}").text == "[ab]{3}"


@pytest.mark.parametrize("kind", ["regex", "json_schema", "choice", "grammar"])
def test_what_is_wrong_is_said_as_without_a_trial(grammars, kind: Any):
    texts = {"regex": "(", "json_schema": '{"type": "foo"}', "choice": "[]", "grammar": "start: x"}
    usual = Grammars(letters_tokenizer(), 67, [END])
    said = list[str]()
    for each in (grammars, usual):
        with pytest.raises(ValueError) as error:
            each.compile(kind, texts[kind])
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_process_that_has_ended_is_started_anew(grammars):
    tried._process(grammars._of_trials).close()
    with pytest.raises(RuntimeError, match="the process that tries grammars has ended"):
        grammars.compile("regex", "[0-9]{7}")
    assert grammars.compile("regex", "[0-9]{7}").text == "[0-9]{7}"
