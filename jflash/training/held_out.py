"""τ of a drafter in training, by real speculative decoding of prompts that it does not learn from.

Every evaluation decodes with the parameters of the moment, by executables compiled once.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jflash.acceptance import by_ending
from jflash.devices.backends import with_backends
from jflash.generate import Generation, Pair
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, with_context_kernel
from jflash.pair import Models, Params
from jflash.records.config import DrafterConfig
from jflash.records.decoding import Decoding
from jflash.training.answers import answer_prompts
from jflash.training.trainer import Evaluation


def held_out_evaluation(
    target: Target, target_params: Any, config: DrafterConfig, prompts: Sequence[Sequence[int]], *,
    every: int, batch_size: int, decoding: Decoding,
) -> Evaluation:  # fmt: skip
    """Decoding of `prompts` (token ids) on the first device; see `acceptance_numbers`."""
    drafter, device = Drafter(config), jax.local_devices()[0]
    dtype = target.config.dtype
    models = with_backends(Models(target, drafter, config.block_size), dtype, device)

    @jax.jit
    def ready(params):
        return with_context_kernel(drafter, jax.tree.map(lambda x: x.astype(dtype), params))

    def run(params: Any) -> dict[str, Any]:
        # They go through the host: arrays that were on a mesh remember it, and decoding has none.
        drafting = ready(jax.device_put(jax.device_get(params), device))
        answers = answer_prompts(
            Pair(models, Params(target_params, drafting)), prompts, decoding,
            batch_size=min(batch_size, len(prompts)),
        )  # fmt: skip
        return acceptance_numbers(answers, config.block_size)

    return Evaluation(every, run)


def acceptance_numbers(answers: Sequence[Generation], width: int) -> dict[str, Any]:
    """`tau`, pooled over all steps; `tau_ended`, of answers that a stop token ended without a loop;
    `accepted` [W - 1], the share of steps that accepted at least 1, 2, … drafts.

    A number is left out if no answer of its kind has a step.
    """
    groups = by_ending(answers, width)
    numbers = {"tau": groups["all"]["tau_pooled"], "tau_ended": groups["ended"]["tau_pooled"]}
    counts, steps = groups["all"]["histogram"], groups["all"]["steps"]
    if steps:
        numbers["accepted"] = [round(sum(counts[k:]) / steps, 5) for k in range(1, width)]
    return {name: value for name, value in numbers.items() if value is not None}
