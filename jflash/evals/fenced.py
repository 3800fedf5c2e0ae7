r"""The fenced blocks of an answer in Markdown, by CommonMark's rule and Python's.

A block begins after a line of three or more backticks or tildes with an info string, which may
stand in an item of a list at any depth; its lines lose the fence's indentation. By CommonMark it
ends at a line of nothing but a fence of that kind, as long or longer and indented by at most three
columns more, or with the text. A program may hold such a line in a docstring, and an answer may
close a block at the end of a line of code. So a block ends at the first fence that stands outside
the strings and comments of Python, if it parses as Python then, and else by CommonMark.
"""

import ast
import re
import textwrap
import warnings

TAB = 4  # columns
DEEPER = 3  # columns of a closing fence after those of the one that opens
# Not by CommonMark, but as models write: a text before a fence that a word at most follows.
OPENING = re.compile(
    r"^(?P<before>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)"
    r"(?P<fence>`{3,}+(?=[^`\n]*\n)|~{3,}+(?=[^\n]*\n))[^\n]*\n"
    r"|^(?P<blanks>[ \t]*)[^\n]*?[^`\n](?P<after_text>`{3,}+)\w*[ \t\r]*\n",
    re.MULTILINE,
)
# Python's strings and comments. A string that nothing ends goes on to the end of all that it may
# hold, and the block then does not parse.
LEXED = r"""#[^\n]*|(?P<quotes>\"{3}|'{3}).*?(?:(?P=quotes)|\Z)"""
LEXED += r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""


def fenced_blocks(text: str) -> list[str]:
    """The texts of all blocks, in their order."""
    blocks, place = list[str](), 0
    while opening := OPENING.search(text, place):
        columns = _columns(opening["before"] or opening["blanks"] or "")
        fence = opening["fence"] or opening["after_text"]
        block, place = _block(text, opening.end(), fence, columns)
        blocks.append(block)
    return blocks


def _block(text: str, begin: int, fence: str, columns: int) -> tuple[str, int]:
    """The block that begins there, and the place after its closing fence."""
    run = rf"{fence[0]}{{{len(fence)},}}"
    closing = re.compile(rf"^(?P<blanks>[ \t]*){run}[ \t\r]*$", re.MULTILINE)
    for found in re.compile(rf"{LEXED}|(?P<run>{run})", re.DOTALL).finditer(text, begin):
        if found["run"]:
            line = text.rfind("\n", 0, found.start()) + 1
            alone = not text[line : found.start()].strip(" \t")
            block = _without(columns, text[begin : line if alone else found.start()])
            if _parses(block):
                return block, found.end()
            break
    for found in closing.finditer(text, begin):
        if _columns(found["blanks"]) <= columns + DEEPER:
            return _without(columns, text[begin : found.start()]), found.end()
    return _without(columns, text[begin:]), len(text)


def _columns(blanks: str) -> int:
    return len(blanks.expandtabs(TAB))


def _without(columns: int, text: str) -> str:
    """The text whose lines have lost so many columns of blanks, or all that they had."""
    if not columns:
        return text
    lines = []
    for line in text.split("\n"):
        left = columns
        while left > 0 and line[:1] in (" ", "\t"):
            left -= TAB if line[0] == "\t" else 1
            line = line[1:]
        lines.append(line)
    return "\n".join(lines)


def _parses(block: str) -> bool:
    """Whether it is Python, maybe the body of a function, as a completion of HumanEval is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none, which a program may have
        try:
            ast.parse(textwrap.dedent(block))
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # also of a text too deep
            return False
    return True
