"""An upper estimate of what a program takes beside weights and state, by the configs.

The tests check it against programs compiled for a GPU and, in float32, for the CPU. (In bfloat16
XLA's CPU backend converts whole weights to float32 and takes more.)
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jflash.compiled.shape import Shape, chunk_sizes, target_rows
from jflash.layers.cache import ring_slots
from jflash.models.params import abstract_params
from jflash.pair import Models
from jflash.records.config import Drafter2Config
from jflash.records.specs import AttentionSpec, MoeSpec
from pallas_kernels.block_attention.canonical import tiles_for, written_bytes
from pallas_kernels.gated_delta import CHUNK
from pallas_kernels.grouped_matmul import CONVERTING

FLOAT32 = 4  # bytes
WORKSPACE = 64 * 2**20  # of matrix products and of rounded sizes
SMALLEST_SPLIT = 128  # slots at least, where a kernel splits the KV axis


def temporary_bytes(models: Models, shape: Shape, caches: int) -> int:
    """The most that a step or a prompt's chunk takes of a device; `caches` is what those take."""
    return max(_step_bytes(models, shape, caches), _prefill_bytes(models, shape)) + WORKSPACE


def _step_bytes(models: Models, shape: Shape, caches: int) -> int:
    """A step's logits, activations and attention, and the copies of tokens that the host reads."""
    rows = shape.batch * models.block_size
    logits = rows * models.target.config.vocab_size * FLOAT32
    live = 4 if models.sampled else 2  # draft's and verify's; probabilities and draws
    reports = 4 * shape.batch * shape.capacity * FLOAT32
    attention = max(
        max(_attention_bytes(mixer, slots, models, rows), _tail_bytes(mixer, slots, models, shape))
        for mixer, slots in _mixers(models, shape)
    )
    if models.kernels.attention == "xla" and shape.batch > 1:
        attention += caches  # its einsums transpose the batch: caches are copied at entry
    experts = _expert_bytes(models, rows, models.dtype)
    experts += _delta_bytes(models, shape.batch, models.block_size)
    experts += _dequantised_bytes(models)
    return live * logits + rows * _row_bytes(models) + experts + attention + reports


def _attention_bytes(mixer: AttentionSpec, slots: int, models: Models, rows: int) -> int:
    queries = rows * mixer.num_heads
    if models.kernels.attention in ("xla", "reference"):
        return _einsum_bytes(queries, slots, models.dtype)
    splits = -(-slots // SMALLEST_SPLIT)
    return queries * splits * (mixer.head_dim + 2) * FLOAT32


def _tail_bytes(mixer: AttentionSpec, slots: int, models: Models, shape: Shape) -> int:
    """What walks of long texts leave to others, however few slots there are."""
    if models.kernels.attention != "canonical":
        return 0
    heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    return written_bytes(shape.batch, models.block_size, slots, *heads, mixer.window)


def _mixers(models: Models, shape: Shape) -> Iterator[tuple[AttentionSpec, int]]:
    """Every kind of layer, with the slots of its cache: fewer than the capacity with a window."""
    for config in models.configs:
        rows = models.block_size
        if config is models.target.config:
            rows = target_rows(models, shape)
        for mixer in set(config.mixers):
            slots = shape.capacity
            if mixer.window is not None:
                slots = ring_slots(mixer.window, rows, shape.capacity)
            yield mixer, slots


def _einsum_bytes(queries: int, slots: int, dtype: str) -> int:
    """Scores of all slots, and weights in the cache's dtype."""
    return queries * slots * (FLOAT32 + jnp.dtype(dtype).itemsize)


def _prefill_bytes(models: Models, shape: Shape) -> int:
    """One chunk of one sequence: activations, attention, and a copy of one layer's cache."""
    size = jnp.dtype(models.dtype).itemsize
    chunk = chunk_sizes(models, shape)[-1]
    attention = max(
        _chunk_attention_bytes(mixer, slots, models, chunk) + slots * size * mixer.kv_width
        for mixer, slots in _mixers(models, shape)
    )
    logits = models.target.config.vocab_size * FLOAT32
    experts = _expert_bytes(models, chunk, models.dtype)
    experts += _delta_bytes(models, 1, chunk) + _dequantised_bytes(models)
    return chunk * _row_bytes(models) + experts + attention + 2 * logits


def _chunk_attention_bytes(mixer: AttentionSpec, slots: int, models: Models, chunk: int) -> int:
    if models.kernels.chunk.attention != "canonical":
        return _einsum_bytes(chunk * mixer.num_heads, slots, models.dtype)
    heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    whole = tiles_for(1, chunk, *heads, mixer.window).walk  # no piece is written
    return 0 if whole else _attention_bytes(mixer, slots, models, chunk)


def _expert_bytes(models: Models, tokens: int, dtype: str) -> int:
    """One layer's rows, each token once for each of its experts; XLA's product is dense.

    It spreads every row over all experts, mostly zeros, and copies a layer's weights.
    """
    kinds = set(models.target.config.experts)
    return max((_one_layers_experts(models, moe, tokens, dtype) for moe in kinds), default=0)


def _one_layers_experts(models: Models, moe: MoeSpec, tokens: int, dtype: str) -> int:
    size, hidden_size = jnp.dtype(dtype).itemsize, models.target.config.hidden_size
    rows = tokens * moe.experts_per_token
    count = rows * (3 * hidden_size + 3 * moe.intermediate_size) * FLOAT32
    count += (moe.shards - moe.cut) * rows * hidden_size * size  # other devices' rows, gathered
    if models.kernels.experts == "xla":
        widest = max(hidden_size, moe.intermediate_size)
        stack = 2 * hidden_size * moe.intermediate_size
        count += moe.held * (rows * widest + stack) * size
    return count


def _dequantised_bytes(models: Models) -> int:
    """The two largest kernels that are kept as codes, whole where no kernel reads the codes.

    Of experts the kernels for CPUs make one at a time.
    """
    dense, experts = models.kernels.matmul, models.kernels.experts
    sizes = [0]
    for leaf in jax.tree.leaves(abstract_params(models.target.config)):
        if leaf.kept and leaf.experts:
            whole = experts not in CONVERTING
            sizes.append(leaf.size if whole else leaf.size // leaf.experts * (experts == "cpu"))
        elif leaf.kept and dense != "canonical":
            sizes.append(leaf.size)
    return sum(sorted(sizes)[-2:]) * FLOAT32


def _delta_bytes(models: Models, batch: int, tokens: int) -> int:
    """One delta net: its rows by chunks, twice, and the states that a scan carries."""
    rows = batch * (tokens + 3 * CHUNK)
    return max(
        (
            FLOAT32 * s.num_value_heads * (
                rows * 4 * (s.key_dim + s.value_dim) + 4 * batch * s.key_dim * s.value_dim
            )
            for s in set(models.target.config.deltas)
        ),
        default=0,
    )  # fmt: skip


def _row_bytes(models: Models) -> int:
    """Activations of a token in float32: one layer's, a few residuals, and the features."""
    widths = [
        3 * c.intermediate_size + 2 * (mixer.num_heads * mixer.head_dim + mixer.kv_width)
        for c in models.configs
        for mixer in set(c.mixers)
    ]
    widths += [
        3 * c.intermediate_size + 2 * s.inputs_width for c in models.configs for s in c.deltas
    ]
    features = max(4, 2 * len(models.taps)) * models.target.config.hidden_size
    context = 0
    if models.drafter is not None:
        c = models.drafter.config
        context = sum(mixer.kv_width for mixer in c.mixers)
        if isinstance(c, Drafter2Config):  # rows of the codebooks, their product, and kernels
            context += 3 * c.selector_top_k * c.selector_rank
            context += 2 * c.conv_kernel_size * c.hidden_size
    return (max(widths) + features + context) * FLOAT32
