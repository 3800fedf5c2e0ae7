"""Safetensors to parameters, strictly: no tensor is missing, and none is left over."""

import collections
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from jflash.io.arrange import arrangements
from jflash.io.assemble import fill_leaves
from jflash.io.families import speculators
from jflash.io.families.variants import refuse_own_mask
from jflash.io.fitting import Owners, Tensor, expected_tensors, tensor_problems
from jflash.io.folder import Fill, Folder, read_config
from jflash.io.foreign import one_line, refuse_pointer
from jflash.io.hf_config import names_of, read_json
from jflash.io.hf_values import checked, shown
from jflash.io.names import Names, Source, leaf_sources
from jflash.io.problems import check_problems
from jflash.io.quantised.scheme import quantisation, scheme_of
from jflash.io.quantised.tensors import (
    Header,
    Weight,
    check_biases,
    find_weights,
    is_spare,
)
from jflash.io.read_ahead import Piece, find_tensors, same_numbers, split_rows
from jflash.models.params import leaf_paths
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import Kept

MODELOPT = "hf_quant_config.json"
TWICE = "consolidated"  # begins the names of files that hold Mistral's weights once more
# What transformers writes with a `variant` and reads only by its name: model.fp16.safetensors.
VARIANT = re.compile(r"model\.[^.]+\.safetensors")
LAYER, EXPERT = re.compile(r"\blayers\.(\d{1,9})\."), re.compile(r"\bexperts\.(\d{1,9})\.")


@dataclass(frozen=True)
class Safetensors(Folder):
    """A folder in Hugging Face's form."""

    @functools.cached_property
    def raw(self) -> dict[str, Any]:
        """config.json, with the quantisation of modelopt's own file where it says none."""
        raw, file = super().raw, self.path / MODELOPT
        if quantisation(raw) or not file.exists():
            return raw
        key = "quantization"
        inner = read_config(file, read_json(file), lambda own: checked(own, [key]).get(key, {}))
        own = {"quantization_config": {"quant_method": "modelopt"} | inner}
        return raw | own if inner.get("quant_algo") else raw  # else only caches are quantised

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """Every tensor of every file, by the headers; ValueError for a damaged file."""
        return [tensor for file in _files(self.path) for tensor in _tensors(file)]

    def config[C: TargetConfig | DrafterConfig](self, read: Callable[[dict[str, Any]], C]) -> C:
        """The config; its numbers of layers and experts must be those of any weights."""
        config = super().config(read)
        if isinstance(config, DrafterConfig):
            refuse_own_mask(self.path)
        own = [self.names.canonical(name) for name in self._stored()]
        config = speculators.with_own_tensors(config, self.raw, own)
        check_problems(self.path, _miscounted(config, self.names, own))
        return config

    @functools.cached_property
    def names(self) -> Names:
        """What the tensors of this family are called."""
        return names_of(self.raw)

    @property
    def quantised(self) -> str | None:
        raw = quantisation(self.raw)
        return scheme_of(raw).method if raw else None

    @property
    def _scaled(self) -> bool:
        """Whether there may be scales that no weight needs: caches alone may be quantised."""
        return quantisation(self.raw) is not None or (self.path / MODELOPT).exists()

    def _stored(self) -> list[str]:
        """The names of all tensors; none where the weights are missing or damaged.

        `check` reports that later: errors that need no weights come first.
        """
        try:
            return [tensor.name for tensor in self.tensors]
        except ValueError:
            return []

    def check(self, config: TargetConfig | DrafterConfig) -> Fill:
        """The function that reads the parameters of `config`.

        ValueError with every unknown, missing, repeated or wrongly shaped tensor.
        """
        owners = self._owners()
        names = self.names.fitting(owners)
        sources = leaf_sources(config, names)
        weights = self._weights(sources, owners)

        def is_dropped(name: str) -> bool:
            return names.is_dropped(config, name) or is_spare(name, weights, self._scaled)

        expected = expected_tensors(sources, weights)
        check_problems(self.path, tensor_problems(expected, owners, is_dropped))
        places = self._places(owners)
        check_biases(self.path, {n: places[n] for n in places if n not in expected}, weights)
        if isinstance(config, TargetConfig) and config.tie_embeddings:
            self._check_tied(names, places)
        leaves, plan = leaf_paths(config), {}
        for leaf, parts in sources.items():
            if leaves[leaf].kept:
                arrays = [weights[part.name].parts(places) for part in parts]
                for array in leaves[leaf].arrays:
                    plan[f"{leaf}/{array}"] = [piece for each in arrays for piece in each[array]]
            else:
                plan[leaf] = [p for part in parts for p in _pieces(part.name, places, weights)]
        if names.inputs_first:
            plan = {leaf: _outputs_first(leaf, pieces) for leaf, pieces in plan.items()}
        arranged, name = arrangements(config, names), self.path.name
        return functools.partial(fill_leaves, plan, leaves, name, arranged=arranged)

    def _check_tied(self, names: Names, places: dict[str, Piece]) -> None:
        """ValueError if a head that is to be the embedding is another one: transformers reads that
        head, whatever the config says, and the text would not be its text."""
        [head], [embedding] = names.ends["head"], names.ends["embedding"]
        if {head, embedding} <= places.keys() and not same_numbers(places[head], places[embedding]):
            raise ValueError(
                f"{self.path} does not fit: tie_word_embeddings is true, but {head} is not "
                f"{embedding}: write false into config.json, or remove the one that is wrong"
            )

    def kept(self, config: TargetConfig | DrafterConfig) -> dict[str, Kept | None]:
        """How the layers' quantised kernels may stay so in memory, by path; None: not at all.

        All tensors of a kernel that may are quantised alike. No single column is listed, which is
        not multiplied as a matrix.
        """
        owners = self._owners()
        names = self.names.fitting(owners)
        sources = leaf_sources(config, names)
        weights, places = self._weights(sources, owners), self._places(owners)
        kept = {}
        for leaf, spec in leaf_paths(config).items():
            matrix = leaf.startswith("layers_") and leaf.endswith("/kernel")
            stored = [weights.get(part.name) for part in sources[leaf]]
            if not matrix or spec.stored[-1] == 1 or not any(stored):
                continue
            forms = {weight.kept(places) if weight else None for weight in stored}
            turned = spec.experts and names.inputs_first  # codes would share scales by column
            kept[leaf] = forms.pop() if len(forms) == 1 and not turned else None
        return kept

    def _owners(self) -> Owners:
        owners = collections.defaultdict(list)
        for tensor in self.tensors:
            owners[self.names.canonical(tensor.name)].append(tensor)
        return owners

    def _weights(self, sources: dict[str, tuple[Source, ...]], owners: Owners) -> dict[str, Weight]:
        """The quantised weights among the sources, by name."""
        raw = quantisation(self.raw)
        headers = {name: Header(t.shape, t.dtype) for name, (t, *_) in owners.items()}
        shapes = {part.name: part.shape for parts in sources.values() for part in parts}
        try:
            scheme = scheme_of(raw) if raw else None
            return find_weights(scheme, shapes, headers, self.names.spellings)
        except ValueError as error:
            raise ValueError(f"{self.path} does not fit: {error}") from None

    def _places(self, owners: Owners) -> dict[str, Piece]:
        """Where each tensor lies."""
        files = {file: find_tensors(file) for file in {t.file for t in self.tensors}}
        firsts = {name: tensor for name, (tensor, *_) in owners.items()}
        return {
            name: files[tensor.file][tensor.name]
            for name, tensor in firsts.items()
            if tensor.name in files[tensor.file]
        }


def _pieces(name: str, places: dict[str, Piece], weights: dict[str, Weight]) -> list[Piece]:
    return weights[name].pieces(places) if name in weights else split_rows(places[name])


def _outputs_first(leaf: str, pieces: list[Piece]) -> list[Piece]:
    """The pieces of a kernel of experts turned from [.., in, out] to [.., out, in]."""
    if not (leaf.endswith("/kernel") and len(pieces[0].shape) == 3):
        return pieces
    return [piece._replace(decode=lambda rows: rows.swapaxes(1, 2)) for piece in pieces]


def _files(folder: Path) -> list[Path]:
    """The files of a folder's weights: those of its index, or all without one.

    An index beside model.safetensors is that of older shards, which transformers passes over too,
    as it does a second copy of the weights and their variants.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists() and whole.exists():
        return [whole]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map: which files hold the tensors?")
        if not all(isinstance(name, str) and _is_inside(name) for name in weight_map.values()):
            raise ValueError(f"{index} must name only files of its folder in weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [shown(file.name) for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no safetensors files, and others, such as pytorch_model.bin, are not "
            "read: transformers writes safetensors of them by from_pretrained and save_pretrained"
        )
    if not whole.exists():
        return files
    return [f for f in files if not (f.name.startswith(TWICE) or VARIANT.fullmatch(f.name))]


def _is_inside(name: str) -> bool:
    """Whether a name in a folder's index stays below that folder."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _tensors(file: Path) -> Iterator[Tensor]:
    try:
        with safe_open(file, "numpy") as handle:
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                tensor = handle.get_slice(name)
                yield Tensor(file, name, tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        refuse_pointer(file)
        raise ValueError(f"{file} is corrupt or truncated: {one_line(error)}") from None


def _miscounted(config: TargetConfig | DrafterConfig, names: Names, stored: list[str]) -> list[str]:
    """Problems if the names show other numbers of layers or experts than `config` has.

    The check comes before anything is made for each of them: a config.json may have any number.
    Tensors that are never read do not count: a vision tower has layers too.
    """
    counts = {"num_hidden_layers": (LAYER, config.num_layers)}
    if config.experts:
        counts["num_experts"] = (EXPERT, config.experts[0].num_experts)
    problems = []
    stored = [name for name in stored if not names.is_dropped(config, name)]
    for key, (pattern, count) in counts.items():
        there = max((int(m[1]) for m in map(pattern.search, stored) if m), default=-1) + 1
        if there and there != count:
            problems.append(f"{key} is {count}, the tensors are those of {there}")
    return problems
