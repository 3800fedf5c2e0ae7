"""What an answer says after its thoughts."""

import pytest

from jflash.evals.evaluation import said


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("It is 5.", "It is 5."),
        ("<think>\nso 4\n</think>\n\nIt is 5.", "\n\nIt is 5."),
        ("so 4\n</think>\nIt is 5.", "\nIt is 5."),  # a template has opened the thoughts
        ("<think>\nso it would be 5", ""),
        ("<think>a</think>b<think>c</think>d", "d"),
    ],
)
def test_a_thought_is_no_answer(text, after):
    assert said(text) == after
