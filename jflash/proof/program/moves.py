"""Follows caches and weights through a compiled program and finds instructions that move them.

It knows XLA's operations, no model and no limits.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

from jflash.proof.program.hlo import Instruction, Leaf, Module, Shape

CACHE, WEIGHT, OTHER = "cache", "weight", ""
_RENAMES = {"bitcast", "opt-barrier", "add-dependency", "copy-done", "async-done"}  # move nothing
_UPDATES = {"scatter", "dynamic-update-slice"}  # write where their first operand lies


class Move(NamedTuple):
    """`instruction` writes `bytes` of what it got from the parameter `source` to another place."""

    kind: str
    source: str
    instruction: str
    bytes: int
    in_loop: bool


class Value(NamedTuple):
    """An array and its origin: the kind and name of a parameter."""

    kind: str
    source: str
    leaf: Leaf


SCALAR = Leaf("", ())
Values = Value | list  # as nested as the instruction's shape


def moves(module: Module, kinds: dict[str, str], least_weight: int) -> list[Move]:
    """Every instruction that puts a whole cache or weight, or part of a weight, in a new place.

    `kinds` maps the beginnings of the parameters' names to CACHE or WEIGHT; weights of fewer than
    `least_weight` bytes are not followed. A result is a whole cache or weight if it has as many
    elements, and part of a weight if it is made only of weights. Neither a write into a cache where
    it lies nor a matrix product is a move. Scalars are ignored: a slice of a weight at a run-time
    index is made only of the weight.
    """
    given: list[Values] = []
    for i in module.parameters:
        kind = next((k for prefix, k in kinds.items() if i.label.startswith(prefix)), OTHER)
        if kind == WEIGHT and isinstance(i.shape, Leaf) and i.shape.bytes < least_weight:
            kind = OTHER
        given.append(_each(i.shape, lambda leaf, _, k=kind, i=i: Value(k, i.label, leaf)))
    walk = _Walk(module, {})
    walk.computation(module.entry, given, in_loop=False)
    return list(walk.found.values())


class _Walk(NamedTuple):
    module: Module
    found: dict[str, Move]

    def computation(self, name: str, given: list[Values], in_loop: bool) -> Values:
        """The values of a computation's root; the moves on the way are noted."""
        values: dict[str, Values] = {}
        instructions, root = self.module.computations[name]
        for i in instructions.values():
            if i.opcode == "parameter":
                values[i.name] = given[int(i.argument)]
            else:
                values[i.name] = self.result(i, [values[o] for o in i.operands], in_loop)
        return values[root]

    def result(self, i: Instruction, arguments: list, in_loop: bool) -> Values:
        match i.opcode:
            case "constant":
                return _each(i.shape, lambda *_: Value(OTHER, "", SCALAR))
            case "tuple":
                return arguments
            case "get-tuple-element":
                return arguments[0][int(i.attribute(r"index=(\d+)"))]
            case "while":
                return self.loop(i.names("body")[0], arguments[0])
            case "call":
                return self.computation(i.names("to_apply")[0], arguments, in_loop)
            case "conditional":
                names = i.names("branch_computations")
                names = names or i.names("true_computation") + i.names("false_computation")
                ends = [self.computation(name, [argument], in_loop)
                        for name, argument in zip(names, arguments[1:], strict=True)]  # fmt: skip
                return _join(ends)
            case name if name in _RENAMES:
                return _renamed(i.shape, arguments[0])
        return self.written(i, arguments, in_loop)

    def loop(self, body: str, carry: Values) -> Values:
        while True:  # until no round adds an origin
            joined = _join([carry, self.computation(body, [carry], in_loop=True)])
            if joined == carry:
                return carry
            carry = joined

    def written(self, i: Instruction, arguments: list, in_loop: bool) -> Values:
        """The values of a result that has new memory, or lies where an operand does."""
        arrays = [v for v in _flat(arguments) if v.kind or v.leaf.size > 1]
        only_weights = bool(arrays) and all(v.kind == WEIGHT for v in arrays)
        copies = self.copies(i)

        def value(leaf: Leaf, path: tuple[int, ...]) -> Value:
            if updated := self.updated(i, path, arguments):
                return updated
            sources = [v for v in arrays if only_weights or (v.kind and copies(leaf, v.leaf))]
            if not sources:
                return Value(OTHER, "", leaf)
            kind, source, _ = sources[0]
            self.found[f"{i.name} {path}"] = Move(kind, source, i.name, leaf.bytes, in_loop)
            if kind == WEIGHT and not only_weights:  # an activation from here on
                return Value(OTHER, "", leaf)
            return Value(kind, source, leaf)

        return _each(i.shape, value)

    def updated(self, i: Instruction, path: tuple[int, ...], arguments: list) -> Value | None:
        """The cache that is this leaf of the result, with rows written; None if it is none."""
        key = ", ".join(map(str, path))
        alias = i.attribute(rf"output_to_operand_aliasing=\{{.*?\{{{key}\}}: \((\d+), \{{\}}")
        place = int(alias) if alias else self.updated_operand(i, path)
        values = [] if place is None else _flat(arguments[place])
        return next((v for v in values if v.kind == CACHE), None)

    def updated_operand(self, i: Instruction, path: tuple[int, ...]) -> int | None:
        """The operand that `i`, or the root of the fusion that it is, updates to give this leaf."""
        if i.opcode != "fusion":
            return 0 if i.opcode in _UPDATES else None
        inner, root = self.module.computations[i.names("calls")[0]]
        source = inner[root]
        for place in path:
            source = inner[source.operands[place]] if source.opcode == "tuple" else source
        source = _before_bitcasts(inner, source)
        if source.opcode not in _UPDATES:
            return None
        source = _before_bitcasts(inner, inner[source.operands[0]])
        return int(source.argument) if source.opcode == "parameter" else None

    def copies(self, i: Instruction) -> Callable[[Leaf, Leaf], bool]:
        """A test of two arrays: whether a result of `i` can be a copy of the whole operand."""
        called = [self.module.computations[name] for name in i.names("calls")]
        inner = [x.opcode for c in called for x in c.instructions.values()]
        if "custom-call" in (i.opcode, *inner):  # unknown inside: a copy looks like what it copies
            return operator.eq
        if "dot" in (i.opcode, *inner):  # a product may be as large as what it reads
            return lambda *_: False
        return lambda result, operand: result.size >= operand.size


def _before_bitcasts(inner: dict[str, Instruction], source: Instruction) -> Instruction:
    while source.opcode == "bitcast":
        source = inner[source.operands[0]]
    return source


def _each(shape: Shape, make, path: tuple[int, ...] = ()) -> Values:
    """`make(leaf, path)` in place of every leaf of a shape."""
    if isinstance(shape, Leaf):
        return make(shape, path)
    return [_each(part, make, (*path, n)) for n, part in enumerate(shape)]


def _flat(values: Values) -> list[Value]:
    return [values] if isinstance(values, Value) else [v for part in values for v in _flat(part)]


def _renamed(shape: Shape, values: Values) -> Values:
    """The same arrays under another shape, or the result of an asynchronous copy."""
    if isinstance(shape, Leaf):
        return _flat(values)[0]._replace(leaf=shape)
    return values


def _join(ends: list) -> Values:
    """For each array, the strongest origin of all branches."""
    if isinstance(ends[0], Value):
        return max(ends)
    return [_join(list(parts)) for parts in zip(*ends, strict=True)]
