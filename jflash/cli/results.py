"""What a run says of itself: the JSON object of one generation, and lines of statistics."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jflash.decoding import Sampling
from jflash.evals.report import number
from jflash.generate import Generation, Pair

RESULT_KEYS = frozenset(
    [
        *("text", "token_ids", "prompt_tokens", "new_tokens", "steps", "acceptance_lengths"),
        *("mean_acceptance_length", "finish_reason", "seconds", "tokens_per_second"),
        *("target", "drafter", "block_size", "dtype", "device", "attention_backend"),
        *("sampling", "seed", "draft_rule"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all generations of a run share."""

    target: str
    drafter: str
    block_size: int
    dtype: str
    device: str
    attention_backend: str
    draft_rule: str
    seed: int
    load_seconds: float


def describe(pair: Pair, target: str, drafter: str, seed: int, load_seconds: float) -> Setup:
    """The setup of a loaded pair; `target` and `drafter` as the user named them."""
    return Setup(
        target=target,
        drafter=drafter,
        block_size=pair.models.block_size,
        dtype=pair.models.dtype,
        device=jax.devices()[0].device_kind,
        attention_backend=pair.models.kernels.attention,
        draft_rule=pair.models.draft_rule,
        seed=seed,
        load_seconds=load_seconds,
    )


def record(
    generation: Generation, text: str | None, setup: Setup, sampling: Sampling
) -> dict[str, Any]:
    """The JSON object of one generation: RESULT_KEYS, no NaN; text is None without a tokenizer."""
    seconds = generation.seconds
    result = {
        "text": text,
        "token_ids": generation.token_ids,
        "prompt_tokens": generation.prompt_tokens,
        "new_tokens": len(generation.token_ids),
        "steps": generation.steps,
        "acceptance_lengths": generation.acceptance_lengths,
        "mean_acceptance_length": generation.mean_acceptance_length,
        "finish_reason": generation.finish_reason,
        "seconds": {
            "load": setup.load_seconds,
            "compile": seconds.compile,
            "prefill": seconds.prefill,
            "decode": seconds.decode,
        },
        "tokens_per_second": tokens_per_second([generation]),
        "target": setup.target,
        "drafter": setup.drafter,
        "block_size": setup.block_size,
        "dtype": setup.dtype,
        "device": setup.device,
        "attention_backend": setup.attention_backend,
        "sampling": asdict(sampling),
        "seed": setup.seed,
        "draft_rule": setup.draft_rule,
    }
    assert result.keys() == RESULT_KEYS
    return result


def tokens_per_second(batch: Sequence[Generation]) -> float | None:
    """Tokens of the steps over the seconds of the steps, of one batch; None without a step."""
    tokens = sum(sum(generation.acceptance_lengths) for generation in batch)
    return tokens / batch[0].seconds.decode if tokens else None


def statistics(generation: Generation, setup: Setup, first_token_seconds: float) -> str:
    """One generation in a line; what was spent on loading and compiling is shown apart."""
    return " · ".join(
        [
            f"{len(generation.token_ids)} tokens",
            f"{generation.steps} steps",
            f"τ {number(generation.mean_acceptance_length)}",
            f"{number(tokens_per_second([generation]))} tokens/s",
            f"first token after {first_token_seconds:.3f} s "
            f"(beside load {setup.load_seconds:.1f} s, compile {generation.seconds.compile:.1f} s)",
            _where(setup),
        ]
    )


def batch_statistics(batches: Sequence[Sequence[Generation]], setup: Setup) -> str:
    """Many generations in a line, with both of the field's averages of τ."""
    everything = [generation for batch in batches for generation in batch]
    tokens = sum(len(generation.token_ids) for generation in everything)
    accepted = sum(sum(generation.acceptance_lengths) for generation in everything)
    steps = sum(generation.steps for generation in everything)
    means = [g.mean_acceptance_length for g in everything if g.mean_acceptance_length is not None]
    decode = sum(batch[0].seconds.decode for batch in batches)
    return " · ".join(
        [
            f"{len(everything)} prompts",
            f"{tokens} tokens",
            f"{steps} steps",
            f"τ {number(accepted / steps if steps else None)} over all steps, "
            f"{number(sum(means) / len(means) if means else None)} as the mean of prompts",
            f"{number(accepted / decode if steps else None)} tokens/s",
            f"load {setup.load_seconds:.1f} s, "
            f"compile {sum(batch[0].seconds.compile for batch in batches):.1f} s",
            _where(setup),
        ]
    )


def _where(setup: Setup) -> str:
    return (
        f"{setup.device}, {setup.dtype}, attention {setup.attention_backend}, "
        f"block {setup.block_size}"
    )
