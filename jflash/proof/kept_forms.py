"""A target kept as codes against the arrays that the codes stand for, in whole texts, bit for bit.

The arrays' text is decoded plainly at width 1 and batch 1, the codes' in that way and in blocks.
Codes and scales are random. A planted fault, one code that is another, must be caught.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jflash.bench.shapes import quantised
from jflash.devices.kept import in_fragments
from jflash.models.decoder import Target
from jflash.models.params import abstract_params, random_params
from jflash.pair import Models
from jflash.proof.cases import Case
from jflash.proof.law import REFERENCE
from jflash.proof.law.bench import Bench, compared, decoded
from jflash.proof.law.forms import OWN, REPLAY, Way
from jflash.proof.pairs import FORMS
from pallas_kernels.matmul.kept.fragments import Fragments
from pallas_kernels.matmul.kept.quantised import Quantised, dequantised

TEXTS_KEPT, NEW_TOKENS = 8, 160
CPU_TEXTS, CPU_TOKENS = 2, 32
WAYS = (REFERENCE, Way(16, 1, OWN), Way(16, 8, OWN + REPLAY))
ONE_CODE = 7  # its last bits, which are turned


def check_kept(case: Case, seed: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Each form's comparisons and its fault, as a pair's law gives them."""
    texts, tokens = (
        (CPU_TEXTS, CPU_TOKENS) if jax.default_backend() == "cpu" else (TEXTS_KEPT, NEW_TOKENS)
    )
    for form in FORMS:
        yield _checked(case, form, seed, dtype, texts, tokens)


def _checked(
    case: Case, form: str, seed: int, dtype: str, texts: int, new_tokens: int
) -> dict[str, Any]:
    begin, prompts = time.perf_counter(), case.prompts(texts, seed)
    arrays, codes = as_arrays_and_codes(case, form, seed)
    bench = Bench(arrays, dtype, new_tokens)
    [alone] = bench.executables([REFERENCE])
    wanted = decoded(bench, alone, "plain", prompts, (), seed)
    width, bench = case.models.block_size, bench._replace(case=codes)
    ways = [way._replace(width=min(way.width, width)) for way in WAYS]
    made, found = bench.executables(ways), []
    for way, executable in zip(ways, made, strict=True):
        for mode in way.modes:
            got = decoded(bench, executable, mode, prompts, wanted, seed)
            found.append(compared(f"{form}, {way.named(mode)}", wanted, got))
    faulty = bench._replace(case=codes._replace(params=with_another_code(codes.params)))
    got = compared("", wanted[:1], decoded(faulty, made[0], "plain", prompts[:1], (), seed)).apart
    fault = {"fault": f"{form}, one code is another", "caught": got.differ, **got._asdict()}
    tokens = sum(len(text.tokens) - text.prompt_tokens for text in wanted)
    return {
        "pair": f"{case.name} in {form}",
        "backends": codes.models.kernels._asdict(),
        "promised": case.models.one_arithmetic,
        "texts": texts,
        "tokens": tokens,
        "anchored_tokens": tokens,
        "compared": [each.result for each in found],
        "differences": sum(sum(each.apart[:3]) for each in found),
        "faults": [fault],
        "seconds": time.perf_counter() - begin,
    }


def as_arrays_and_codes(case: Case, form: str, seed: int) -> tuple[Case, Case]:
    """The case with a target of random codes, as arrays and kept."""
    codes = as_codes(case, form, seed)
    arrays = jax.tree.map(
        lambda w: _array(w, case.models.dtype) if _is_kept(w) else w, codes.params.target,
        is_leaf=_is_kept,
    )  # fmt: skip
    models = in_fragments(codes.models)
    ordered = in_order(models, codes.params.target)
    return _of_target(case, arrays), _of_target(case._replace(models=models), ordered)


def as_codes(case: Case, form: str, seed: int) -> Case:
    """The case with a target of random codes in the order of files."""
    config = quantised(case.models.target.config, form)
    drawn = jax.tree.map(_with_scales, random_params(config, seed), is_leaf=_is_kept)
    return _of_target(case._replace(models=replace(case.models, target=Target(config))), drawn)


def in_order(models: Models, target: Any) -> Any:
    """Whole parameters of the models' target, its codes in the order in which they lie there."""

    def ordered(leaf, w):
        return leaf.in_fragments(w) if leaf.fragmented and _is_kept(w) else w

    return jax.tree.map(ordered, abstract_params(models.target.config), target)


def with_another_code(params: Any) -> Any:
    """The params with one code of the target's first kept kernel turned."""
    leaves, tree = jax.tree.flatten(params, is_leaf=lambda w: _is_kept(w) or _is_fragments(w))
    at = next(i for i, leaf in enumerate(leaves) if _is_kept(leaf) or _is_fragments(leaf))
    [first, *rest], inner = jax.tree.flatten(leaves[at])
    bits = first.view(jnp.uint8) if first.dtype.itemsize == 1 else first
    turned = bits.at[(0,) * bits.ndim].set(bits[(0,) * bits.ndim] ^ ONE_CODE)
    leaves[at] = jax.tree.unflatten(inner, [turned.view(first.dtype), *rest])
    return jax.tree.unflatten(tree, leaves)


def _of_target(case: Case, target: Any) -> Case:
    params, other = (p._replace(target=target) for p in (case.params, case.other_drafter))
    return case._replace(params=params, other_drafter=other)


def _with_scales(w: Any) -> Any:
    """The same codes with scales that differ, by up to a quarter."""
    if not _is_kept(w):
        return w
    by = jax.random.uniform(jax.random.key(w.scales.size), w.scales.shape, minval=0.75, maxval=1.25)
    return replace(w, scales=(w.scales * by).astype(w.scales.dtype))


_array = jax.jit(dequantised, static_argnums=1)


def _is_kept(w: Any) -> bool:
    return isinstance(w, Quantised)


def _is_fragments(w: Any) -> bool:
    return isinstance(w, Fragments)
