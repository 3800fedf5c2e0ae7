"""Drafters for targets of all kinds: what a dry run would trace, and a short training of one."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash import generate, load_pair
from jflash.cli import main
from jflash.io.hf_config import drafter_config
from jflash.io.hf_write import to_hf_config
from jflash.io.load import configure_target
from jflash.models.params import abstract_params
from jflash.training.data import random_rows
from jflash.training.drafter import drafter_config_for, make_lesson
from jflash.training.recipe import PAPERS, TrainConfig
from tests.support.reference import record

CASES = Path(__file__).parents[1] / "reference" / "cases"
OF_FAMILY = {record(folder)["family"]: folder for folder in sorted(CASES.glob("pair*"))}
MUSE = OF_FAMILY["muse_glimmer"]
# Of these the other training tests have no layer.
OTHERS = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "gpt_oss", "gemma3_text", "gemma4_text"),
    *("minimax_m2", "glm4", "glm4_moe", "muse_glimmer"),
)


@pytest.mark.parametrize("family", OTHERS)
def test_a_lesson_fits_a_target_of_other_layers(family):
    """The gradient of a step is traced, and nothing is compiled: the target's pass over rows, with
    its windows, sinks and states; and the new drafter's config can be written."""
    target = configure_target(OF_FAMILY[family] / "target")
    config = drafter_config_for(
        target.config, num_layers=1, block_size=4, mask_token_id=3, target_layer_ids=[0, 1]
    )
    assert config.mixers[0].rope is not None
    written = drafter_config(to_hf_config(config, "float32"))
    assert written.layers == config.layers and written.target_layer_ids == (0, 1)
    rows, training = random_rows(2, 24, config.vocab_size), TrainConfig(steps=2, batch_size=2)
    lesson = make_lesson(target, config, rows, anchors=3, training=training, objective=PAPERS)
    frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.stored, x.dtype or "float32"),
                          abstract_params(target.config))  # fmt: skip
    step = jax.value_and_grad(lesson.loss, has_aux=True)
    batch = jax.tree.map(jnp.asarray, rows)
    (loss, _), found = jax.eval_shape(step, lesson.start, frozen, batch, jax.random.key(0), 0.5)
    assert loss.shape == () and jax.tree.structure(found) == jax.tree.structure(lesson.start)


def train(folder: Path, rows: list[dict], *flags: str, **changes) -> int:
    """The command on the target of `folder` and answers that the data brings."""
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {
        "target": folder / "target", "data": folder / "data.jsonl", "output": folder / "made",
        "mask-token-id": 3, "num-layers": 1, "block-size": 4, "target-layer-ids": "0,1",
        "anchors": 6, "row-length": 128, "batch": 2, "steps": 40, "eval-every": 0,
        "checkpoint-every": 20, "learning-rate": 5e-3, **changes,
    }  # fmt: skip
    words = [str(x) for name, value in given.items() for x in (f"--{name}", value)]
    return main.run("train", [*words, "--keep-answers", "--keep-looping", *flags])


def test_an_image_in_the_data_is_refused_before_weights_are_read(tmp_path, capsys):
    shutil.copytree(MUSE / "target", tmp_path / "target")
    (tmp_path / "target/model.safetensors").unlink()
    path = tmp_path / "target/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token_id": 7}))
    for row in ({"prompt_ids": [1, 7]}, {"prompt_ids": [1], "answer_ids": [7]}):
        assert train(tmp_path, [{"prompt_ids": [1]}, row]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "data.jsonl:2: token id 7 stands for an image or a video" in line


@pytest.mark.long
def test_a_dry_run_for_gpt_oss(tmp_path, capsys):
    """Sinks, windows and clamped experts: the step of the training is compiled, and some answers
    are decoded, of a target without a tokenizer."""
    shutil.copytree(OF_FAMILY["gpt_oss"] / "target", tmp_path / "target")
    asked = [{"prompt_ids": [1, 2, 3]}, {"prompt_ids": [4], "answer_ids": [5, 6]}]
    assert train(tmp_path, asked, "--dry-run", **{"answer-batch": 1, "max-new-tokens": 8}) == 0
    out = capsys.readouterr().out
    assert "activations and gradients" in out and "minutes for 40 steps" in out
    assert "answers: 1 of at most 8 tokens" in out
    assert sorted(x.name for x in tmp_path.iterdir()) == ["data.jsonl", "target"]


def trained_and_drafting(folder: Path, family: str, **changes):
    """The pair of `family`'s target and of a drafter that the command trains, on answers that the
    data brings, with what it is held to: the loss falls, and a text of the pair is the reference's.
    """
    case_folder = OF_FAMILY[family]
    shutil.copytree(case_folder / "target", folder / "target")
    cases = [case for case in record(case_folder)["cases"] if len(case["output_ids"]) > 8]
    rows = [{"prompt_ids": c["prompt_ids"][-30:], "answer_ids": c["output_ids"]} for c in cases]
    assert train(folder, rows, **changes) == 0
    curve = json.loads((folder / "made-work/training/curve.json").read_text())
    losses = [row["loss"] for row in curve]
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    pair = load_pair(folder / "target", folder / "made", dtype="float32")
    case = cases[0]
    made = generate(
        pair, [case["prompt_ids"]], max_new_tokens=len(case["output_ids"]), capacity=512
    )
    assert made[0].token_ids == case["output_ids"]
    return pair, made[0]


def test_a_drafter_for_muse_is_trained_and_drafts(tmp_path):
    """By the command, of a target whose vision tower it ignores.

    The drafter's positions are those of the target's windows: its other layers have none.
    """
    pair, _ = trained_and_drafting(tmp_path, "muse_glimmer")
    drafter = pair.models.drafter
    assert drafter and drafter.config.mixers[0].rope == pair.models.target.config.mixers[0].rope


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_text", "gpt_oss"])
def test_a_drafter_for_other_layers_is_trained_and_drafts(tmp_path, family):
    """Delta nets, rings and capped logits, and experts with sinks: what the drafter learnt from the
    target's pass over rows is of use to a step, so some drafts are accepted."""
    _, text = trained_and_drafting(tmp_path, family, steps=300)
    assert text.steps < len(text.token_ids) - 1
