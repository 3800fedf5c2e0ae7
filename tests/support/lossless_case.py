"""A small pair as the lossless check takes one, in place of a real one."""

from jflash.pair import Params
from jflash.proof.cases import Case, random_prompts
from tests.support.pairs import drafter_config, random_pair, random_params


def small_case() -> Case:
    """A random pair of 67 tokens and width 8, in place of a real one."""
    pair = random_pair()
    return Case(
        name="small",
        drafters=("random drafter", "another random drafter"),
        models=pair.models,
        params=pair.params,
        other_drafter=Params(pair.params.target, random_params(drafter_config(), 2)),
        prompts=lambda count, seed: random_prompts(67, count, seed),
        stops=[],
        max_new_tokens=48,
    )
