"""A body that is no JSON: its error says what to look for."""

import pytest

from jflash.server.errors import ApiError
from jflash.server.protocol import Completion, read


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"prompt": "cut \\ud83d"}', r"\ud83d is half of a character"),
        (b'{"prompt": "\\udc4b cut"}', r"\udc4b is half of a character"),
        (b'{"prompt": "a", "model": "\\uD83D."}', r"\ud83d is half of a character"),
        (b'{"prompt": "a"', "Input data was truncated"),
        (b'{"prompt": NaN}', "invalid character"),
        (b"\xff\xfe", "invalid character"),
    ],
)
def test_what_is_wrong_with_a_body(body, why):
    with pytest.raises(ApiError) as error:
        read(body, Completion)
    assert why in str(error.value) and error.value.code == "invalid_json"


def test_a_whole_pair_is_a_character():
    assert read(b'{"prompt": "\\ud83d\\udc4b"}', Completion).prompt == "\U0001f44b"
