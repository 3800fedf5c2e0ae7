"""Refuses the times of steps whose numbers are not finite.

Rows of NaN go to a few experts, all to the same, so their step reads a part of the weights.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jflash.pair import Models
from jflash.state import State


def check_timed(name: str, models: Models, state: State, experts: float | None) -> None:
    """ValueError, which begins with `name`, if the timed steps left a number that is not finite, or
    a layer's block reached fewer experts than one token goes to.

    `state` is what the steps left, `experts` what `experts_read` counted. A layer's state hangs on
    all layers before it: so this looks at everything but the last layer's MLP, norm and head.
    """
    for model, layers in (("target", state.target_cache), ("drafter", state.drafter_cache)):
        for i, layer in enumerate(layers):
            floats = (x for x in jax.tree.leaves(layer) if jnp.issubdtype(x.dtype, jnp.floating))
            if not all(bool(_finite(x)) for x in floats):
                raise ValueError(
                    f"{name}: the steps left numbers in layer {i} of the {model} that are not "
                    "finite: their time is no model's"
                )
    each = [moe.experts_per_token for moe in models.target.config.experts]
    if experts is not None and experts < sum(each) / len(each):
        raise ValueError(
            f"{name}: a layer's block reached {experts:g} experts, and each token goes to "
            f"{max(each)}: the time is no model's"
        )


@jax.jit
def _finite(x: Array) -> Array:
    return jnp.isfinite(x).all()
