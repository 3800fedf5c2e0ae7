"""Texts of a pair in any shape, by the digests of their tokens, logits, keys and values."""

import jax
import jax.numpy as jnp
import numpy as np

from jflash.compiled.shape import Shape
from jflash.generate import Pair
from jflash.proof.digest import Apart, apart, digests
from jflash.proof.lossless import Mode, Task, compile_executable, corrupted, decode
from jflash.records.decoding import Decoding

NEW = 24  # tokens of a text


def texts(pair: Pair, batch: int, asked, capacity=256, chunk=128, replay=None, new=NEW):
    """The digests of prompts, `batch` of them at a time."""
    shape = Shape.of(batch, capacity, chunk=chunk)
    executable = compile_executable(pair.models, pair.params, shape)
    vocabulary, found = pair.models.target.config.vocab_size, []
    for i in range(0, len(asked), batch):
        task = Task(asked[i : i + batch], Decoding(max_new_tokens=new))
        text = None
        if replay is not None:
            text = np.zeros((batch, capacity), np.int32)
            for row, digest in zip(text, replay[i : i + batch], strict=True):
                row[: len(digest.tokens)] = digest.tokens
            text = corrupted(jnp.asarray(text), jax.random.key(3), vocabulary)
        run = decode(executable, Mode("", pair.params, text=text), task)
        found += digests(run, task)
    return found


def total(reference, found) -> Apart:
    sums = Apart()
    for one, other in zip(reference, found, strict=True):
        sums = sums.plus(apart(one, other))
    assert sums.compared_logits_rows and sums.compared_kv_rows  # something was compared
    return sums
