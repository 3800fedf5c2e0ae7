"""The report of a run: the JSON object of one generation, and lines of statistics."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax

from jflash.evals.report import number
from jflash.generate import Generation, Pair, Seconds
from jflash.records.decoding import Sampling

RESULT_KEYS = frozenset(
    [
        *("text", "token_ids", "prompt_tokens", "new_tokens", "steps", "acceptance_lengths"),
        *("mean_acceptance_length", "finish_reason", "seconds", "tokens_per_second"),
        *("target", "drafter", "block_size", "dtype", "device", "attention_backend"),
        *("sampling", "seed", "draft_rule"),
    ]
)


class Setup(NamedTuple):
    """What all generations of a run share."""

    shared: dict[str, Any]  # entries of every generation's object
    load_seconds: float


def describe(pair: Pair, target: str, drafter: str, seed: int, load_seconds: float) -> Setup:
    """The setup of a loaded pair; `target` and `drafter` as the user named them."""
    shared = {
        "target": target,
        "drafter": drafter,
        "block_size": pair.models.block_size,
        "dtype": pair.models.dtype,
        "device": jax.devices()[0].device_kind,
        "attention_backend": pair.models.kernels.attention,
        "seed": seed,
        "draft_rule": pair.models.draft_rule,
    }
    return Setup(shared, load_seconds)


def record(
    generation: Generation, text: str | None, setup: Setup, sampling: Sampling
) -> dict[str, Any]:
    """The JSON object of one generation: RESULT_KEYS, no NaN; text is None without a tokenizer."""
    result = {
        "text": text,
        "token_ids": generation.token_ids,
        "prompt_tokens": generation.prompt_tokens,
        "new_tokens": len(generation.token_ids),
        "steps": generation.steps,
        "acceptance_lengths": generation.acceptance_lengths,
        "mean_acceptance_length": generation.mean_acceptance_length,
        "finish_reason": generation.finish_reason,
        "seconds": {"load": setup.load_seconds} | asdict(generation.seconds),
        "tokens_per_second": tokens_per_second([generation]),
        **setup.shared,
        "sampling": asdict(sampling),
    }
    assert result.keys() == RESULT_KEYS
    return result


def partial(result: dict[str, Any], missing: int) -> dict[str, Any]:
    """A result that names how many cases are still to come, if any."""
    return result | ({"missing_cases": missing} if missing else {})


def json_line(result: dict[str, Any]) -> str:
    """A result as one line without NaN."""
    return json.dumps(result, allow_nan=False)


def as_json(batch: Sequence[Generation]) -> str:
    """A batch's generations as a text that another host reads with `from_json`."""
    return json.dumps([asdict(generation) for generation in batch])


def from_json(text: str) -> list[Generation]:
    return [
        Generation(**{**fields, "seconds": Seconds(**fields["seconds"])})
        for fields in json.loads(text)
    ]


def tokens_per_second(batch: Sequence[Generation]) -> float | None:
    """Tokens of the steps over the seconds of the steps, of one batch; None without a step."""
    tokens = sum(sum(generation.acceptance_lengths) for generation in batch)
    return tokens / batch[0].seconds.decode if tokens else None


def statistics(generation: Generation, setup: Setup, first_token_seconds: float) -> str:
    """One generation in a line, with the seconds of loading and compiling by themselves."""
    return (
        f"{len(generation.token_ids)} tokens · {generation.steps} steps · "
        f"τ {number(generation.mean_acceptance_length)} · "
        f"{number(tokens_per_second([generation]))} tokens/s · "
        f"first token after {first_token_seconds:.3f} s "
        f"(beside load {setup.load_seconds:.1f} s, compile {generation.seconds.compile:.1f} s) · "
        f"{_where(setup)}"
    )


def batch_statistics(batches: Sequence[Sequence[Generation]], setup: Setup, hosts: int = 1) -> str:
    """Many generations in a line, with both of the field's averages of τ.

    Hosts took turns with the batches at the same time, so the slowest one's seconds count.
    """
    everything = [generation for batch in batches for generation in batch]
    tokens = sum(len(generation.token_ids) for generation in everything)
    accepted = sum(sum(generation.acceptance_lengths) for generation in everything)
    steps = sum(generation.steps for generation in everything)
    means = [g.mean_acceptance_length for g in everything if g.mean_acceptance_length is not None]
    shares = [[batch[0].seconds for batch in batches[host::hosts]] for host in range(hosts)]
    decode = max(sum(seconds.decode for seconds in share) for share in shares)
    compiled = max(sum(seconds.compile for seconds in share) for share in shares)
    on = f" · {hosts} hosts" if hosts > 1 else ""
    return (
        f"{len(everything)} prompts · {tokens} tokens · {steps} steps · "
        f"τ {number(accepted / steps if steps else None)} over all steps, "
        f"{number(sum(means) / len(means) if means else None)} as the mean of prompts · "
        f"{number(accepted / decode if steps else None)} tokens/s · "
        f"load {setup.load_seconds:.1f} s, "
        f"compile {compiled:.1f} s · {_where(setup)}{on}"
    )


def _where(setup: Setup) -> str:
    s = setup.shared
    return (
        f"{s['device']}, {s['dtype']}, attention {s['attention_backend']}, block {s['block_size']}"
    )
