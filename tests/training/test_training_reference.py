"""A training step's loss and gradients are those of the reference's modules.

tests/reference/record_training.py recorded them, block by block, over all anchors.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jflash.io import save_checkpoint
from jflash.training.data import Conversation, Rows, pack
from jflash.training.drafter_loss import Blocks, drafter_loss
from jflash.training.recipe import Objective
from tests.support.reference import pair

TESTS = Path(__file__).parents[1]
STEPS = json.loads((TESTS / "golden" / "training.json").read_text())
T = 32  # tokens of a row, which holds several of the conversations
OBJECTIVES = {
    "cross-entropy": Objective(),
    "total variation": Objective(loss="tv", decay=2.5),
    "D-PACE": Objective(weights="dpace"),
    "DFlash 2": Objective(),
}


def seen(gradient: np.ndarray) -> list[float]:
    """As the record has it: the norm, and the sum with a wave over its places."""
    flat = gradient.astype(np.float64).ravel()
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(len(flat))))]


@pytest.mark.parametrize("name", STEPS)
def test_loss_and_gradients_of_a_step(name, tmp_path):
    step, objective = STEPS[name], OBJECTIVES[name]
    both = pair(TESTS / "reference" / step["pair"])
    models, params = both.models, both.params
    talks = [Conversation(**talk) for talk in step["conversations"]]
    rows = Rows(*map(jnp.asarray, pack(talks, T)[0]))
    blocks = Blocks(anchors=T, objective=objective)
    loss = partial(drafter_loss, models.target, models.drafter, blocks)
    of_drafter = {k: v for k, v in params.drafter.items() if not k.startswith("context_")}
    (value, _), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        of_drafter, params.target, rows, jax.random.key(0), jnp.float32(0)
    )
    assert value == pytest.approx(step["loss"], rel=1e-5)
    save_checkpoint(tmp_path, models.drafter.config, gradients, "float32")
    found = {k: seen(v) for k, v in load_file(tmp_path / "model.safetensors").items()}
    assert found.keys() == step["gradients"].keys()
    for tensor, (norm, wave) in step["gradients"].items():
        assert found[tensor] == pytest.approx([norm, wave], rel=1e-4, abs=1e-4 * norm), tensor
