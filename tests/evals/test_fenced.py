"""Programs in fenced blocks: as CommonMark has them, as Python's docstrings hold them, as models
write them."""

import time
from textwrap import indent

import pytest

from jflash.evals.code_execution import passes, program
from jflash.evals.fenced import fenced_blocks

HALF = "def half(x):\n    return x / 2\n"
TOLD = 'def half(x):\n    """Half.\n\n%s\n    half(3)\n%s\n    """\n    return x / 2\n'
ITEM = indent(HALF, "   ")
MBPP = {"prompt": "Half a number.", "test_list": ["assert half(3) == 1.5"]}
HUMANEVAL = {
    "prompt": "import math\n\ndef half(x):\n    '''Half of x.'''\n",
    "entry_point": "half",
    "test": "def check(f):\n    assert f(3) == 1.5\n",
}


def block(code: str, fence: str = "```", info: str = "python") -> str:
    return f"So:\n\n{fence}{info}\n{code}{fence}\nThat is it.\n"


@pytest.mark.parametrize(
    "text",
    [
        block(TOLD % ("    ```python", "    ```")),
        block(TOLD % ("    ```", "    ```")),
        block(TOLD % ("```", "```")),
        block(TOLD % ("~~~", "~~~"), "~~~"),
        block("'''\n```\n'''\n" + HALF),
        block("FENCE = '```'  # it's ```\n" + HALF),
        block(HALF, "~~~"),
        block(HALF, "~~~", " python `x`"),
        block(TOLD % ("```", "```"), "````"),
        block(HALF, info=' python title="half.py"'),
        f"```python\n{HALF}`````  \r\n",
        f"1. So:\n\n   ```python\n{ITEM}   ```\n2. That is it.\n",
        f"1. ```python\n{ITEM}   ```\n",
        f"- a\n  - b\n\n        ```python\n{indent(HALF, ' ' * 8)}        ```\n",
        f"\t```python\n{indent(HALF, chr(9))}\t```\n",
        f"  ```python\n{HALF}  ```\n",  # a line loses only the blanks that it has
        f"```python\n{HALF}",  # cut by the limit
    ],
)
def test_a_program_is_found_whole(text):
    assert passes(program("mbpp", MBPP, text)) == "passed"
    assert passes(program("humaneval", HUMANEVAL, text)) == "passed"


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```\na\n```\nb\n```\nc\n```", ["a\n", "c\n"]),
        ("```\na\n~~~\n````\n", ["a\n~~~\n"]),
        ("````\nis a\n```\nb\n", ["is a\n```\nb\n"]),  # too short to end it
        ("```\nis a\n    ```\nb\n", ["is a\n    ```\nb\n"]),  # too deep, and no Python
        ("```\nis a\n   ```\nb\n", ["is a\n"]),
        ("use ```a``` here\n``` `a`\nb", []),
        ("```python", []),
        # Quotes that nothing ends do not take the next block in.
        ('```\nsay """ or \'\n```\n```\n"""a"""\n```\n', ['say """ or \'\n', '"""a"""\n']),
        # As models write.
        ("So: ```python\na = 1```\nb\n```c\nd\n```", ["a = 1", "d\n"]),
        ("So: ```\na\n```\n", ["a\n"]),
        ("```\n    return 1```\nb", ["    return 1"]),
        ("I wrap it in ``` as asked\n```\na\n```", ["a\n"]),
    ],
)
def test_where_blocks_begin_and_end(text, blocks):
    assert fenced_blocks(text) == blocks


def test_a_completion_in_a_list_goes_on_where_the_prompt_ended():
    text = "- So:\n\n  ```python\n      return x / 2\n  ```\n"
    assert passes(program("humaneval", HUMANEVAL, text)) == "passed"


@pytest.mark.parametrize(
    "part",
    [
        *("```\nit's\n```\n", '```\nx"""\n```\n', "```\nx\n    ```\n", "```text\na b```\n"),
        *("~", "'\\", "```\n\\'''\\\n", "```\n", '\\"""', "- ```a\n", "a `", "~~~\n(\n"),
    ],
)
def test_blocks_of_a_long_answer_are_found_soon(part):
    many = part * (200_000 // len(part))
    begin = time.perf_counter()
    found = fenced_blocks("```\nis one\n```\n" + many), fenced_blocks("```\n" + many + "\n```\n")
    assert time.perf_counter() - begin < 3
    assert found[0][0] == "is one\n" and found[1]
