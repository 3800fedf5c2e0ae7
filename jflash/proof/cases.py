"""The pairs that the lossless check decodes, with their prompts and shapes."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jflash.bench.shapes import model_shape
from jflash.compiled.shape import Shape, capacity_for
from jflash.devices.backends import with_backends
from jflash.devices.mesh import with_context, with_rounding
from jflash.generate import PREFILL_CHUNK
from jflash.io import (
    configure_pair,
    encode_prompt,
    load_tokenizer,
    load_weights,
    random_drafter,
    stop_token_ids,
)
from jflash.memory import check_decoding, check_memory
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import random_weights
from jflash.pair import Models, Params
from jflash.proof.program.step_program import cut
from jflash.records.config import DecoderConfig
from jflash.system.device import device_memory
from jflash.system.embedded import EMBEDDED_PAIR as EMBEDDED
from jflash.system.json_lines import json_lines

QUESTIONS = Path(__file__).with_name("questions.jsonl")
LONGEST_PROMPT, MOST_NEW_TOKENS = 128, 512
FAULT_CAPACITY = 4096


class Case(NamedTuple):
    """A pair, a second drafter for it, and the prompts that it decodes."""

    name: str
    drafters: tuple[str, str]  # names of its drafter and of the second one
    models: Models
    params: Params
    other_drafter: Params  # the same target
    prompts: Callable[[int, int], list[list[int]]]  # (count, seed) -> token ids
    stops: list[int]
    max_new_tokens: int


def load_case(
    name: str,
    dtype: str,
    seed: int,
    backends: dict[str, str],
    batch: int,
    layers: int | None = None,
    drafter_dtype: str = "",
) -> Case:
    """One of PAIRS, ready to decode; jflash chooses the kernels that `backends` does not name.

    `layers`: the first so many of a target with random weights, and no more of its drafter.

    Drafters hold their context kernel, as they do when they decode for a user, and are rounded to
    `drafter_dtype` if it is given. ValueError, before a weight is made or read, if a backend cannot
    run here or `batch` sequences take more memory than the device has.
    """

    def suited(models: Models) -> Models:
        models = models.drafting_in(drafter_dtype, batch)
        models = with_backends(models, dtype, jax.devices()[0], **backends)
        check_decoding(models, batch, LONGEST_PROMPT, MOST_NEW_TOKENS)
        check_memory(models, fault_shape(), FAULT_CAPACITY, device_memory())
        return models

    tiny = name == "tiny-math"
    case = _tiny_math(dtype, seed, suited) if tiny else _random_weights(name, layers, suited)

    def ready(params: Params) -> Params:
        return with_rounding(case.models, with_context(case.models, params))

    return case._replace(params=ready(case.params), other_drafter=ready(case.other_drafter))


def _tiny_math(dtype: str, seed: int, suited: Callable[[Models], Models]) -> Case:
    """The embedded pair on word problems, half of them of kinds it was not trained on."""
    files = configure_pair(EMBEDDED / "target", EMBEDDED / "drafter", dtype=dtype)
    models = suited(files.models)
    pair = load_weights(files)
    tokenizer = load_tokenizer(EMBEDDED / "target")
    _, other = random_drafter(EMBEDDED / "drafter", seed, dtype)
    questions = [text for _, line in json_lines(QUESTIONS) for text in line.values()]

    def prompts(count: int, seed: int) -> list[list[int]]:
        drawn = np.random.default_rng(seed).permutation(questions)
        return [encode_prompt(tokenizer, str(drawn[i % len(drawn)])) for i in range(count)]

    return Case(
        "tiny-math", ("trained drafter", "random drafter"), models, pair.params,
        other_drafter=Params(pair.params.target, other), prompts=prompts,
        stops=stop_token_ids(EMBEDDED / "target", tokenizer), max_new_tokens=320,
    )  # fmt: skip


def _random_weights(name: str, layers: int | None, suited: Callable[[Models], Models]) -> Case:
    """Random weights of a published shape and two random drafters, on random prompts.

    Its greedy text does not run into loops: with norms of 1 attention is broad, so every new token
    changes the input of all later ones. Windows of both models are cut, so that texts exceed them.
    """
    shape = model_shape(name)
    some = layers or shape.target.num_layers
    target, drafter = cut(shape, some, min(some, shape.drafter.num_layers)) if layers else shape
    target, drafter = _short_sighted(target), _short_sighted(drafter)
    models = suited(Models(Target(target), Drafter(drafter), drafter.block_size))
    target, drafter = models.configs
    weights = random_weights([target, drafter, drafter])
    return Case(
        name, ("random drafter", "another random drafter"), models, Params(weights[0], weights[1]),
        other_drafter=Params(weights[0], weights[2]),
        prompts=lambda count, seed: random_prompts(target.vocab_size, count, seed),
        stops=[], max_new_tokens=MOST_NEW_TOKENS,
    )  # fmt: skip


def _short_sighted[C: DecoderConfig](config: C) -> C:
    """The model with no window longer than a prompt."""
    if not any(config.windows):
        return config
    near = [window and min(window, LONGEST_PROMPT) for window in config.windows]
    return config.attending(*[{"window": window} for window in near])


def random_prompts(
    vocab_size: int, count: int, seed: int, low: int = 16, high: int = LONGEST_PROMPT
) -> list[list[int]]:
    """Prompts of low to high random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(low, high + 1)).tolist() for _ in range(count)]


def case_shape(case: Case, batch: int) -> Shape:
    """A shape for the longest prompt and answer."""
    width = case.models.block_size
    capacity = capacity_for(LONGEST_PROMPT, MOST_NEW_TOKENS, width, PREFILL_CHUNK)
    return Shape.of(batch, capacity)


def fault_shape() -> Shape:
    """A shape for two long contexts."""
    return Shape.of(2, FAULT_CAPACITY)
