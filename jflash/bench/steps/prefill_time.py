"""Times the prefill of whole prompts, `programs.prefill`, by their lengths and the chunk's.

A prompt's tokens are random, and its slot is the only one. This file knows no request.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jflash.compiled.programs import compile_prefill
from jflash.compiled.shape import Shape, capacity_for, chunk_sizes, make_request, new_state
from jflash.pair import Models, Params
from jflash.records.decoding import Decoding


def time_prefill(
    models: Models, params: Params, lengths: Sequence[int], chunk: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds (the median) and tokens a second of prompts of these lengths, one program."""
    capacity = capacity_for(max(lengths), 1, models.block_size, chunk)
    shape = Shape.of(1, capacity, chunk=chunk)
    compiled, took = compile_prefill(models, params, shape)
    state = new_state(models, shape)
    vocabulary = models.target.config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, max(lengths)).tolist()
    for length in lengths:
        decoding, key = Decoding(max_new_tokens=1), jax.random.key(0)
        request = make_request(shape, ids[:length], decoding, 0, key)
        seconds = []
        for _ in range(repeats + 1):
            jax.block_until_ready((state, request))
            begin = time.perf_counter()
            state = compiled(params, state, jnp.int32(0), request)
            jax.block_until_ready(state.sequences.length)
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds[1:])  # the first warms up
        yield {
            "tokens": length,
            "chunks": chunk_sizes(models, shape),
            "ms": 1e3 * median,
            "ms_of_repeats": [1e3 * s for s in seconds[1:]],
            "tokens_per_second": length / median,
            "compile_seconds": took,
        }
