"""A parameter before it is an array: its logical shape and axes, its dtype and its memory format.

The layers declare their leaves; memory, floors, files and random weights read the declarations.
Axes are logical: a shard of a leaf is a slice along one of them, also of a fused leaf. A format
gives the order of a fused leaf in memory, and only this file knows it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jflash.records.specs import Kept
from pallas_kernels.matmul.float8.rounded import Rounded
from pallas_kernels.matmul.kept import fragments
from pallas_kernels.matmul.kept.fragments import Fragments
from pallas_kernels.matmul.kept.quantised import Quantised
from pallas_kernels.matmul.pieces import pieces


class SideBySide(NamedTuple):
    """The last two axes are one in memory: first all columns of the first part, then the next's.

    [K, (G + 2)·H] lies as N·H columns of queries, K·H of keys and K·H of values.
    """

    columns: tuple[int, ...]  # of each part

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first column of each part. This property and the two functions define the order."""
        return tuple(itertools.accumulate(self.columns, initial=0))[:-1]

    def join(self, parts: Sequence[Any], axis: int = -1) -> Any:
        """The array from its parts."""
        return jnp.concatenate(parts, axis=axis)

    def split(self, x: Any) -> list[Any]:
        """The parts of an array, along its last axis."""
        pairs = zip(self.firsts, self.columns, strict=True)
        return [x[..., first : first + count] for first, count in pairs]


@dataclass(frozen=True)
class Leaf:
    """A layer's declaration of a parameter; without a `format` it lies in memory as its axes.

    An empty `dtype` means the model's. Of devices that share a model each has its leaf:
    `whole` counts the columns of all of them together, which the product's pieces hang on, and
    `runs` the parts of the shared axis in memory of which each device has a slice. A kernel that is
    `kept` lies as codes and scales.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    format: SideBySide | None = None
    dtype: str = ""
    whole: int = 0  # 0: the leaf's columns
    runs: tuple[int, ...] = ()  # empty: the format's parts, or the whole axis
    kept: Kept | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), self

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def experts(self) -> int:
        """The number of experts in the leaf; 0 if it has no axis of experts."""
        return self.shape[0] if self.axes[0] == "experts" else 0

    @property
    def fragmented(self) -> bool:
        """Whether it is kept in the order of pallas_kernels.matmul.kept.fragments."""
        return self.kept is not None and self.kept.fragments

    @property
    def nbytes(self) -> int:
        if self.fragmented:
            return self.tiles.words.size * 4
        if self.kept:
            return sum(part.nbytes for part in self.arrays.values())
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in memory."""
        if self.format is None:
            return self.shape
        return *self.shape[:-2], sum(self.format.columns)

    @property
    def firsts(self) -> Any:
        """The first column of each part of a fused leaf."""
        assert self.format is not None, self
        return self.format.firsts

    def parts(self, x: Any) -> list[Any]:
        """The parts of a fused leaf, or of a product with it."""
        assert self.format is not None, self
        return self.format.split(x)

    @property
    def arrays(self) -> dict[str, "Leaf"]:
        """The arrays of a kept kernel, by the names of `Quantised` or `Rounded`."""
        assert self.kept
        if self.kept.form == "float8":
            columns = replace(self, shape=self.shape[1:], axes=self.axes[1:], kept=None)
            codes = replace(columns, shape=self.shape[::-1], axes=self.axes[::-1])
            return {
                "codes": replace(codes, dtype="float8_e4m3fn"),
                "scales": replace(columns, dtype=self.kept.scales),
            }
        *lead, rows = self.shape[: 1 + bool(self.experts)]
        groups = -(-rows // self.kept.group)
        packed = self.kept.form == "int4"
        arrays = {
            "codes": (rows // 2 if packed else rows, "uint8" if packed else "float8_e4m3fn"),
            "scales": (groups, self.kept.scales),
        } | ({"zeros": (groups, "uint8")} if self.kept.zeros else {})
        return {
            name: replace(
                self, shape=(*lead, count, *self.shape[len(lead) + 1 :]), dtype=dtype, kept=None
            )
            for name, (count, dtype) in arrays.items()
        }

    def of_arrays(self, arrays: Mapping[str, Any]) -> Quantised | Fragments | Rounded:
        """The kept kernel of these arrays, which may be abstract."""
        assert self.kept
        if self.kept.form == "float8":
            return Rounded(**arrays)
        kernel = Quantised(**{"zeros": None, **arrays}, group=self.kept.group)
        return self.in_fragments(kernel) if self.fragmented else kernel

    def in_fragments(self, kernel: Quantised) -> Fragments:
        """The kept kernel, which may be abstract, in the order in which the leaf lies."""
        assert self.kept and self.fragmented
        pairs = self.firsts if self.kept.pairs else None
        whole = isinstance(kernel.codes, jax.Array)
        return (fragments.fragments if whole else fragments.abstract)(kernel, pairs)

    @property
    def fits_fragments(self) -> bool:
        """Whether the sizes of a kept leaf allow fragments, and those of the whole one."""
        if not self.kept or self.kept.form not in ("fp8", "int4"):
            return False
        plain = replace(self, kept=self.kept._replace(fragments=False)).struct
        assert isinstance(plain, Quantised)
        *_, K, N = self.stored
        cut = 1 if self.experts else pieces("matmul", K, self.columns)
        if any(columns % (2 * fragments.COLUMNS) for columns in (N, self.columns)):
            return False
        return fragments.refusal(plain, cut) is None

    @property
    def struct(self) -> jax.ShapeDtypeStruct | Quantised | Fragments | Rounded:
        """The array's shape and dtype."""
        if self.kept:
            return self.of_arrays({name: part.struct for name, part in self.arrays.items()})
        return jax.ShapeDtypeStruct(self.stored, jnp.dtype(self.dtype))

    def runs_of(self, columns: int) -> tuple[int, ...]:
        """The parts of the last axis in memory of which each device has a slice, in so many columns
        each. ValueError if one is not a multiple of them."""
        runs = self.runs or (self.format.columns if self.format else (self.stored[-1],))
        if any(run % columns for run in runs):
            raise ValueError(f"runs of {runs} columns do not come in {columns}s")
        return tuple(run // columns for run in runs)

    @property
    def tiles(self) -> Fragments:
        """The shape of a leaf in fragments."""
        struct = self.struct
        assert isinstance(struct, Fragments), self
        return struct

    @property
    def columns(self) -> int:
        """Columns of the whole, unsharded weight."""
        return self.whole or self.stored[-1]

    @property
    def bias(self) -> "Leaf":
        """The leaf of the bias that is added to the product with this leaf."""
        kept = slice(0, int(self.experts > 0))  # its axis of experts
        shape, axes = self.shape, self.axes
        return replace(
            self,
            shape=shape[kept] + shape[kept.stop + 1 :],
            axes=axes[kept] + axes[kept.stop + 1 :],
        )

    def of_experts(self, count: int) -> "Leaf":
        """One such leaf for each expert."""
        return replace(self, shape=(count, *self.shape), axes=("experts", *self.axes))


def gate_up_leaf(width: int, columns: int, shards: int = 1) -> Leaf:
    """The fused kernel of a SwiGLU: the gate's columns, then the up projection's."""
    format = SideBySide((columns, columns))
    axes = ("embed", "gate_up", "mlp")
    return Leaf((width, 2, columns), axes, format, whole=2 * columns * shards)


def declare(module: nn.Module, name: str, leaf: Leaf) -> Any:
    """The parameter `name` of a module: its array, or the leaf itself while leaves are listed.

    ValueError for an array that is missing or of another shape: somebody may have put it there.
    """
    found = module.has_variable("params", name)
    if not found and module.is_initializing():
        return module.param(name, lambda key: leaf)
    value = module.get_variable("params", name)
    if not found or value.shape != leaf.stored:
        path = "/".join((*module.path, name))
        wrong = f"{path} is {value.shape if found else 'missing'}, expected {leaf.stored}"
        raise ValueError(f"the parameters are not the model's: {wrong}")
    return value


def declared(module: nn.Module) -> dict:
    """The leaves of a module and of all below it, by name."""
    return dict(module.init(jax.random.key(0), method=_set_up)["params"])


def _set_up(part: Any) -> None:
    """Runs the setup of a module and of all below it: leaves are declared there."""
    if isinstance(part, nn.Module):
        hasattr(part, "an attribute")  # Flax runs a setup when an attribute is looked for
        part = [value for name, value in vars(part).items() if name != "parent"]
    if isinstance(part, Sequence) and not isinstance(part, str):
        for inner in part:
            _set_up(inner)
