"""What is refused before anything runs: requests a pair cannot serve, and keys out of range."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral

from jflash.compiled.shape import PREFILL_CHUNK, Shape, state_bytes
from jflash.pair import Models
from jflash.records.decoding import Decoding, whole
from jflash.system.device import device_memory


def check_request(models: Models, prompt: Sequence[int], decoding: Decoding) -> None:
    """ValueError, before anything runs, for a request that the models cannot serve."""
    check_ids(models, prompt, decoding.stop_token_ids)
    max_new_tokens = decoding.max_new_tokens
    positions = min(c.max_position_embeddings for c in models.configs)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral):
        raise ValueError(f"max_new_tokens must be a whole number, got {max_new_tokens}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if len(prompt) + max_new_tokens > positions:
        fits = positions - len(prompt)
        advice = f"max_new_tokens {fits} fits" if fits > 0 else "the prompt itself is too long"
        raise ValueError(
            f"{len(prompt)} prompt tokens + {max_new_tokens} new tokens pass the model's "
            f"{positions} positions: {advice}"
        )


def check_ids(models: Models, prompt: Sequence[int], stops: Sequence[int]) -> None:
    """ValueError for an empty prompt, and for ids that the models do not read."""
    vocabulary = models.target.config.vocab_size
    try:
        empty, listed = not len(prompt), not isinstance(prompt, Set | Mapping | bytes)
    except TypeError:  # such as a token of one prompt, given in place of several prompts
        empty, listed = False, False
    if not listed:
        raise ValueError(f"the prompt {prompt!r:.80} is no list of token ids")
    if empty:
        raise ValueError("the prompt is empty: give at least one token")
    for name, given in (("token id", prompt), ("stop token id", stops)):
        try:  # ids may be numbers of NumPy or JAX, too
            ids = [operator.index(t) for t in given]
        except TypeError as error:
            raise ValueError(f"{name}s must be whole numbers: {error}") from None
        outside = [t for t in ids if not 0 <= t < vocabulary]
        if outside:
            where = f"is outside the vocabulary of {vocabulary} tokens"
            raise ValueError(f"{name} {outside[0]} {where}")
    unread = [int(t) for t in prompt if t in models.target.config.unread_ids]
    if unread:
        raise ValueError(f"token id {unread[0]} stands for an image or a video: only text is read")


def check_keys(seed: int, indices: Iterable[int], prefill_chunk: int) -> None:
    """ValueError for a seed or an index that a key cannot hold, and for empty chunks."""
    for name, value in (("seed", seed), *(("index", index) for index in indices)):
        if not (isinstance(value, Integral) and 0 <= value < 2**32):
            raise ValueError(f"{name} {value} must be a whole number within 0 … {2**32 - 1}")
    if whole("prefill_chunk", prefill_chunk) < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")


def check_chunk(models: Models, prefill_chunk: int) -> None:
    """ValueError for a chunk that no prompt fills, for which a pass would only take memory."""
    positions = min(c.max_position_embeddings for c in models.configs)
    if prefill_chunk > max(positions, PREFILL_CHUNK):
        why = f"a prompt has no more tokens than the model's {positions} positions"
        raise ValueError(f"prefill_chunk {prefill_chunk}: {why}")


def check_state(models: Models, shape: Shape) -> None:
    """ValueError for a state that by itself takes more memory than the device has."""
    takes, limit = state_bytes(models, shape), device_memory()
    if limit is not None and takes > limit:
        raise ValueError(
            f"{shape.batch} sequences of a capacity of {shape.capacity} tokens take "
            f"{takes / 1e9:.3g} GB, and JAX may use {limit / 1e9:.3g} GB: give fewer of either"
        )
