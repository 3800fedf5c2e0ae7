"""A small pair as the lossless check takes one, in place of a real one."""

from dataclasses import replace
from typing import Any

from jflash.generate import Pair
from jflash.models.decoder import Target
from jflash.pair import Params
from jflash.proof.cases import Case, random_prompts
from tests.support.pairs import drafter_config, random_pair, random_params, target_config


def small_case(**changes: Any) -> Case:
    """A random pair of 67 tokens and width 8, its target with `changes`."""
    pair = random_pair(num_layers=2)
    if changes:
        config = target_config(**changes)
        params = pair.params._replace(target=random_params(config, 0))
        pair = Pair(replace(pair.models, target=Target(config)), params)
    return Case(
        name="small",
        drafters=("random drafter", "another random drafter"),
        models=pair.models,
        params=pair.params,
        other_drafter=Params(pair.params.target, random_params(drafter_config(num_layers=2), 2)),
        prompts=lambda count, seed: random_prompts(67, count, seed),
        stops=[],
        max_new_tokens=48,
    )
