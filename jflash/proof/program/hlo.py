"""Reads the text of a compiled XLA program into records; it knows no model and no gate."""

import re
from math import prod
from typing import NamedTuple

_START = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{")
_LINE = re.compile(r"  (ROOT )?%([\w.\-]+) = (.*)")
_LEAF = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_PIECE = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?|\(|\)")
_NAME = re.compile(r"%([\w.\-]+)")


class Leaf(NamedTuple):
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) if bits else 8) // 8


Shape = Leaf | list  # a list is a tuple of shapes


class Instruction(NamedTuple):
    """A line of a computation; `argument` is the text between the opcode's brackets."""

    name: str
    shape: Shape
    opcode: str
    argument: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, pattern: str) -> str:
        """The pattern's first group in the attributes; '' where it does not match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    def names(self, key: str) -> list[str]:
        """The computations that attribute `key` names: one, or several in braces."""
        return _NAME.findall(self.attribute(rf"\b{key}=(%[\w.\-]+|\{{[^}}]*\}})"))

    @property
    def label(self) -> str:
        """Its name in JAX: of a parameter, the path of the argument."""
        return self.attribute(r'op_name="([^"]*)"').replace("\\'", "'")


class Computation(NamedTuple):
    instructions: dict[str, Instruction]
    root: str


class Module(NamedTuple):
    computations: dict[str, Computation]
    entry: str
    aliased: frozenset[int]  # parameters of the entry whose memory a result takes over

    @property
    def parameters(self) -> list[Instruction]:
        """The entry's parameters, in order."""
        entry = self.computations[self.entry].instructions.values()
        return sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.argument))


def parse(text: str) -> Module:
    """Parses `compiled.as_text()`. ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if start := _START.fullmatch(line):
            name, body = start[2], {}
            entry = name if start[1] else entry
        elif name and line == "}":
            computations[name], name = Computation(body, root), ""
        elif name and (match := _LINE.fullmatch(line)):
            body[match[2]] = _instruction(match[2], match[3])
            root = match[2] if match[1] else root
    if not entry:
        raise ValueError("the text holds no compiled program: it has no ENTRY computation")
    header = text.splitlines()[0].partition("input_output_alias=")[2]
    aliased = re.findall(r"\{[\d, ]*\}: \((\d+), \{\}", header)
    return Module(computations, entry, frozenset(map(int, aliased)))


def _instruction(name: str, text: str) -> Instruction:
    cut = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", cut)
    closing = _closing(text, opening)
    opcode, argument = text[cut:opening].strip(), text[opening + 1 : closing - 1]
    operands = () if opcode == "constant" else tuple(_NAME.findall(argument))
    return Instruction(name, _shape(text[:cut]), opcode, argument, operands, text[closing:])


def _shape(text: str) -> Shape:
    """Parses `bf16[2,3]{1,0}`, or nested brackets of such shapes; skips comments between them."""
    open_tuples: list[list] = [[]]
    for piece in _PIECE.findall(text):
        if piece == "(":
            open_tuples.append([])
        elif piece == ")":
            done = open_tuples.pop()
            open_tuples[-1].append(done)
        elif match := _LEAF.match(piece):
            dims = tuple(int(n) for n in match[2].split(",") if n)
            open_tuples[-1].append(Leaf(match[1], dims))
    return open_tuples[0][0]


def _closing(text: str, opening: int) -> int:
    """The index after the bracket that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place + 1
    raise ValueError(f"brackets do not close in {text[:80]!r}")
