"""Which weights of a checkpoint are quantised, and how: quantization_config with the tensors.

The tensors say which modules are quantised, because published lists leave modules out; a module
that the config excludes must not be. The config says how. Only weights are dequantised: scales of
activations and of caches are known by name and not read.
"""

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jflash.io.hf_values import shown
from jflash.io.quantised import awq, compressed, fp8, gptq, mxfp4
from jflash.io.quantised.compressed import Layouts, check_pattern, matches
from jflash.io.quantised.weight import Layout

PLAIN = ("F64", "F32", "F16", "BF16")
# Tensors of a quantised module that no number of its weight needs.
UNREAD = (
    *("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale"),
    *("weight_shape", "k_scale", "v_scale", "q_scale", "kv_scale"),
    "activation_scale",  # as transformers calls it, and after the name of a stack of experts
)
_KEYS = ("quantization_config", "compression_config")
_IGNORED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


@dataclass(frozen=True)
class Scheme:
    """The form of a checkpoint's quantised weights."""

    method: str
    of: Callable[[Sequence[str]], Layouts | None]  # by a module's names
    ignored: tuple[str, ...]  # modules, and patterns of them

    def layout(
        self, modules: Sequence[str], shape: tuple[int, int], found: Mapping[str, tuple[int, ...]]
    ) -> Layout:
        """The layout of a module's weight [O, I], whose tensors have these shapes.

        `modules` are its names: the config may mean it by any. ValueError, by the first, if the
        config leaves the module out, or if the shape is none that the format has.
        """
        layouts = self.of(modules)
        excluded = any(_excludes(module, name) for name in self.ignored for module in modules)
        if layouts is None or excluded:
            raise ValueError(f"{modules[0]} is quantised, and quantization_config leaves it out")
        return layouts(shape, found)


def quantisation(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of a config.json, which may stand in that of the text model."""
    places = [raw, *(inner for inner in [raw.get("text_config")] if type(inner) is dict)]
    found = ((key, place[key]) for place in places for key in _KEYS if place.get(key))
    key, value = next(found, ("", None))
    if value is not None and type(value) is not dict:
        raise ValueError(f"{key} must be an object, got {shown(value)}")
    return value


def unquantised(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json without the keys that `quantisation` reads."""
    kept = {key: value for key, value in raw.items() if key not in _KEYS}
    inner = kept.get("text_config")
    return kept | {"text_config": unquantised(inner)} if type(inner) is dict else kept


def scheme_of(raw: Mapping[str, Any]) -> Scheme:
    """The scheme of a quantization_config; ValueError, by its name, for what is not read."""
    method = raw.get("quant_method") or ("modelopt" if "quant_algo" in raw else None)
    try:
        if type(method) is not str or method not in _METHODS:
            raise ValueError(f"not supported; supported: {', '.join(_METHODS)}")
        if method == "gptq":
            raw = {**raw, "ignore": [*_names(raw, "ignore"), *gptq.excluded(raw)]}
        ignored = [name for key in _IGNORED for name in _names(raw, key)]
        return Scheme(method, _METHODS[method](raw), tuple(ignored))
    except ValueError as error:
        raise ValueError(f"quantization_config ({_printed(method)}): {error}") from None


def _one(layouts: Layouts) -> Callable[[Sequence[str]], Layouts]:
    return lambda modules: layouts


def _fp8(raw: Mapping[str, Any]) -> Callable[[Sequence[str]], Layouts]:
    return _one(functools.partial(fp8.layout, block=fp8.check_fp8(raw)))


def _fbgemm(raw: Mapping[str, Any]) -> Callable[[Sequence[str]], Layouts]:
    return _one(functools.partial(fp8.layout, block=None))


def _modelopt(raw: Mapping[str, Any]) -> Callable[[Sequence[str]], Layouts]:
    fp8.check_modelopt(raw)
    return _fbgemm(raw)


def _awq(raw: Mapping[str, Any]) -> Callable[[Sequence[str]], Layouts]:
    group = awq.check(raw)
    return _one(lambda shape, found: awq.layout(shape, group))


def _gptq(raw: Mapping[str, Any]) -> Callable[[Sequence[str]], Layouts]:
    return _one(functools.partial(gptq.layout, **gptq.check(raw)))


_METHODS: dict[Any, Callable[[Mapping[str, Any]], Callable[[Sequence[str]], Layouts | None]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": compressed.layouts,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda raw: _one(mxfp4.layout),
}


def _names(raw: Mapping[str, Any], key: str) -> Iterable[str]:
    names = raw.get(key) or []
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError(f"{key} must be a list of names, got {shown(names)}")
    for name in names:
        check_pattern(name)
    return names


def _excludes(module: str, name: str) -> bool:
    """Whether a list's entry names a module: itself, what it lies in, or by a pattern."""
    if fnmatch.fnmatchcase(module, name) or matches(module, name):
        return True
    return module.startswith(f"{name}.") or module.endswith(f".{name}")


def _printed(method: Any) -> str:
    return " ".join(str(method if method is not None else "unknown").split())[:80]
