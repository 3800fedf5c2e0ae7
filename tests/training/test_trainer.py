"""The trainer resumes to the same bits, and its losses fall and are what they say."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jflash.models.decoder import Target
from jflash.speculative import apply
from jflash.system.locks import locked
from jflash.training import steps, trainer
from jflash.training.attention import causal_attend
from jflash.training.curve import read_curve
from jflash.training.data import Conversation, Rows, check_tokens, pack
from jflash.training.losses import head_logits, lookup
from jflash.training.recipe import OPTIMIZERS, TrainConfig
from jflash.training.steps import batch_indices, learning_rates, optimizer
from jflash.training.trainer import LOCK, Evaluation, train
from tests.support.pairs import target_config
from tiny_pair.target_lm import TrainedTarget, init_target, target_loss

ROOT = Path(__file__).parents[2]
CONFIG = TrainConfig(
    steps=36, batch_size=4, learning_rate=1e-2, steps_per_call=4, checkpoint_every=8, seed=5
)
MODEL = target_config(num_layers=1, vocab_size=16, tie_embeddings=True)
LOSS = partial(target_loss, TrainedTarget(MODEL), 0.1)


def rows() -> Rows:
    """Answers that repeat their prompt: there is something to learn."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 16, 3).tolist() for _ in range(40)]
    return pack([Conversation(p, p * 2) for p in prompts], 20)[0]


run = partial(train, LOSS, frozen=None, identity={"layers": (1,)})


def looks(fail: int = 0):
    """An evaluation's `run`: a number of the params, but the first `fail` times no memory."""
    left = iter([True] * fail)

    def look(params) -> dict[str, float]:
        if next(left, False):
            raise MemoryError
        return {"size": float(sum(jnp.abs(x).sum() for x in jax.tree.leaves(params)))}

    return look


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


@pytest.mark.parametrize(
    "optimizer",
    [OPTIMIZERS[0], *(pytest.param(x, marks=pytest.mark.long) for x in OPTIMIZERS[1:])],
)
def test_resumed_training_gives_the_same_bits(tmp_path, optimizer):
    start, config = init_target(MODEL, 0), replace(CONFIG, optimizer=optimizer)
    parts = {"params": start, "data": rows(), "config": config, "directory": tmp_path / "parts"}
    looked = {"evaluation": Evaluation(12, looks())}
    finished = {"params": start, "data": rows(), "config": config, "directory": tmp_path / "whole"}
    whole = run(**finished, **looked)
    assert whole.step == 36
    assert [r["step"] for r in whole.history if "size" in r] == [12, 24, 36]
    assert run(**parts, should_stop=lambda step: True).step == 0
    part = run(**parts, **looked, should_stop=lambda step: step >= 20)
    assert part.step == 20 and not equal(part.params, whole.params)
    with pytest.raises(MemoryError):  # at a look: what it looks at was saved
        run(**parts, evaluation=Evaluation(12, looks(fail=1)))
    kept = {int(folder.name) for folder in (tmp_path / "parts/checkpoints").glob("[0-9]*")}
    assert kept == {20, 24}
    resumed = run(**parts, **looked)
    assert equal(resumed.params, whole.params)
    assert resumed.history == whole.history
    assert json.loads((tmp_path / "parts/curve.json").read_text()) == whole.history
    assert (tmp_path / "parts/curve.png").stat().st_size > 1000
    losses = [record["loss"] for record in whole.history]
    assert losses[-1] < 0.8 * losses[0]
    # Finished: nothing runs, the same params come back.
    again = run(**finished)
    assert equal(again.params, whole.params) and again.history == whole.history

    with pytest.raises(ValueError, match=r"holds a run with \{'seed': 5\}"):
        run(**(parts | {"config": replace(config, seed=6)}))
    with pytest.raises(ValueError, match="data_crc32"):
        run(**(parts | {"data": rows()._replace(tokens=rows().tokens[::-1])}))
    for name in Rows._fields:  # the same tokens with another border between prompt and answer too
        other = rows()._replace(**{name: getattr(rows(), name)[:, ::-1]})
        with pytest.raises(ValueError, match=r"holds a run with \{'data_crc32'"):
            run(**(parts | {"data": other}))
    if optimizer == "adamw":  # once is enough
        assert_damage_is_named(partial(run, **finished), tmp_path / "whole")


def assert_damage_is_named(again, folder) -> None:
    """After a power cut a file may be cut; without a damaged checkpoint the run has the one before.

    `again` goes on with a finished training.
    """
    (folder / "checkpoints/36/default/_METADATA").write_text("")
    with pytest.raises(
        ValueError, match=r"checkpoints/36 cannot be read: .* the checkpoint before"
    ):
        again()
    shutil.rmtree(folder / "checkpoints/36")
    assert again(should_stop=lambda _: True).step == 32
    for name, text in (("curve.json", '[{"st'), ("run.json", '[{"st'), ("run.json", "[]")):
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=f"/{name} is damaged"):
            again()


@pytest.mark.parametrize("text", ["", "null", "{}", "[1]", '[{"loss": 1.0}]', '[{"step": "1"}]'])
def test_a_curve_that_something_damaged_is_told_with_what_to_do(tmp_path, text):
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(ValueError, match=r"/curve\.json .*\. Without this file the same command"):
        read_curve(tmp_path)


def test_looks_and_checkpoints_come_at_the_steps_that_were_asked_for(tmp_path):
    """Neither is a multiple of the steps of a call, and where calls end changes no parameter."""
    config = replace(CONFIG, steps=13, checkpoint_every=6)
    parts = {"params": init_target(MODEL, 0), "data": rows()}
    found = run(**parts, config=config, directory=tmp_path / "a", evaluation=Evaluation(5, looks()))
    assert [r["step"] for r in found.history if "size" in r] == [5, 10, 13]
    kept = {int(folder.name) for folder in (tmp_path / "a/checkpoints").glob("[0-9]*")}
    assert kept == {12, 13}
    plain = run(**parts, config=replace(config, checkpoint_every=8), directory=tmp_path / "b")
    assert equal(found.params, plain.params)


def test_what_orbax_raises_is_a_line(tmp_path, monkeypatch):
    """It is no ValueError where an array was cut, and holds pages."""

    def restore(*_, **__):
        raise Exception("Error while reading\n  an array " + "with its spec" * 99)

    manager = ocp.CheckpointManager(tmp_path)
    monkeypatch.setattr(manager, "latest_step", lambda: 8)
    monkeypatch.setattr(manager, "restore", restore)
    with pytest.raises(ValueError, match=r"/8 cannot be read: Error while reading an .{,250}$"):
        trainer._newest(manager, steps.TrainState({}, {}), tmp_path)


FULL_DISC = """
import resource, sys
from jflash.cli.command import Parser, run_command
from tests.training.test_trainer import CONFIG, MODEL, init_target, rows, run

def body(_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
    run(params=init_target(MODEL, 0), data=rows(), config=CONFIG, directory=sys.argv[1])

sys.exit(run_command(Parser("train", ""), body, []))
"""


def test_a_checkpoint_on_a_full_disc_is_a_line_and_the_training_goes_on_with_room(tmp_path):
    """In a process of its own, as Orbax's threads outlive the error, and print tracebacks of it.
    Its notes begin with a bracket, as a part of the folder's name does."""
    tmp_path = tmp_path / "a [b=c]"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
    command = [sys.executable, "-c", FULL_DISC, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"train: cannot write {tmp_path}/checkpoints: " in done.stderr
    assert "File too large. The same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    job = {"params": init_target(MODEL, 0), "data": rows(), "config": CONFIG}
    assert run(**job, directory=tmp_path).step == CONFIG.steps


def test_steps_that_do_not_fit_are_refused_before_one_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "device_memory", lambda: 100_000)
    monkeypatch.setattr(steps, "new_train_state", lambda *_: pytest.fail("a state was made"))
    with pytest.raises(ValueError, match=r"a step takes 0\.0 GB .*: a smaller batch"):
        run(params=init_target(MODEL, 0), data=rows(), config=CONFIG, directory=tmp_path)
    assert not (tmp_path / "run.json").exists()  # the folder is free for settings that fit


def test_a_folder_takes_one_training_at_a_time(tmp_path):
    job = {"params": init_target(MODEL, 0), "data": rows(), "config": CONFIG}
    with (
        locked(tmp_path / LOCK, tmp_path),
        pytest.raises(ValueError, match=f"{tmp_path} is in use"),
    ):
        run(**job, directory=tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_order_depends_on_seed_and_step_alone():
    whole = batch_indices(CONFIG, 22, 0, 20)
    np.testing.assert_array_equal(batch_indices(CONFIG, 22, 7, 11), whole[7:11])
    flat = whole.ravel()
    assert sorted(flat[:22]) == sorted(flat[22:44]) == list(range(22))
    assert (flat[:22] != flat[22:44]).any()


@jax.jit
def target_logits(params, alone: Rows):
    target, attend = Target(MODEL), causal_attend(alone)
    hidden, _, _ = apply(target, params, alone.tokens, alone.positions, (None,), attend)
    return apply(target, params, hidden, method="logits")


def test_target_loss_is_next_token_cross_entropy():
    packed = rows()
    small = Rows(*(jnp.asarray(x[:2]) for x in packed))
    params = init_target(MODEL, 0)
    params = jax.tree.map(lambda x: x * 5, params)
    loss, metrics = jax.jit(LOSS)(params, None, small, jax.random.key(0), jnp.float32(0))
    total = weight = right = count = 0.0
    for r in range(2):
        segments = packed.segments[r]
        for s in range(1, segments.max() + 1):
            own = segments == s  # each conversation alone, in a row of its own
            alone = Rows(*(jnp.asarray(x[r][own][None]) for x in packed))
            alone = alone._replace(segments=jnp.ones_like(alone.segments))
            logits = np.asarray(target_logits(params, alone))[0].astype(float)
            tokens = np.asarray(alone.tokens[0])
            for i in range(len(tokens) - 1):
                w = 1.0 if alone.supervised[0, i + 1] else 0.1
                log_z = np.log(np.exp(logits[i]).sum())
                total += w * (log_z - logits[i, tokens[i + 1]])
                weight += w
                if w == 1.0:
                    right += logits[i].argmax() == tokens[i + 1]
                    count += 1
    assert loss == pytest.approx(total / weight, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(right / count, abs=1e-6)


def test_lookup_and_head_have_the_plain_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    matrix = jax.random.normal(keys[0], (16, 8))
    tokens = jax.random.randint(keys[1], (2, 5), 0, 7)
    pull = jax.random.normal(keys[2], (2, 5, 16))

    def ours(matrix):
        return jnp.sum(
            pull * head_logits(Target(MODEL), {"embedding": matrix}, lookup(matrix, tokens))
        )

    def plain(matrix):
        return jnp.sum(pull * (matrix[tokens] @ matrix.T))

    np.testing.assert_allclose(jax.grad(ours)(matrix), jax.grad(plain)(matrix), atol=1e-4)


def test_residual_outputs_start_small():
    params = init_target(target_config(num_layers=2, hidden_size=64), 0)
    layer = params["layers_0"]
    out, qkv = layer["attention"]["out"]["kernel"], layer["attention"]["qkv"]["kernel"]
    assert float(qkv.std() / out.std()) == pytest.approx(2.0, rel=0.1)
    assert float(qkv.std() / layer["mlp"]["down"]["kernel"].std()) == pytest.approx(2.0, rel=0.1)


def test_packing_keeps_every_conversation_whole():
    rng = np.random.default_rng(1)
    texts = [
        Conversation(
            rng.integers(0, 99, rng.integers(1, 9)).tolist(),
            rng.integers(0, 99, rng.integers(1, 30)).tolist(),
        )
        for _ in range(50)
    ]
    packed, dropped = pack(texts, 32)
    found = []
    for r in range(len(packed.tokens)):
        for s in range(1, packed.segments[r].max() + 1):
            own = packed.segments[r] == s
            assert packed.positions[r, own].tolist() == list(range(own.sum()))
            answer = packed.supervised[r] & own
            found.append(
                Conversation(
                    packed.tokens[r, own & ~answer].tolist(), packed.tokens[r, answer].tolist()
                )
            )
    fits = [t for t in texts if len(t.prompt_ids) + len(t.answer_ids) <= 32]
    assert sorted(found) == sorted(fits) and dropped == len(texts) - len(fits) > 0
    assert len(packed.tokens) * 32 < 1.3 * sum(len(p) + len(a) for p, a in fits)
    with pytest.raises(ValueError, match="rows of 3 tokens"):
        pack([Conversation([1, 2], [3, 4])], 3)
    with pytest.raises(ValueError, match="token id 98"):
        check_tokens(pack([Conversation([1, 98], [3])], 3)[0], 98)


def test_muon_steps_along_the_orthogonal_part_of_a_product_s_gradient():
    rng = np.random.default_rng(0)
    shapes = {
        "mlp": {"kernel": (6, 10)},
        "norm": {"scale": (6,)},
        "codebook": (12, 4),
        "taps": (2, 3, 4),
    }
    draw = partial(jax.tree.map, lambda s: jnp.asarray(rng.normal(size=s), jnp.float32))
    params, grads = (draw(shapes, is_leaf=lambda x: isinstance(x, tuple)) for _ in range(2))

    config = replace(CONFIG, optimizer="muon", weight_decay=0.0)
    clip = optax.clip_by_global_norm(config.clip_norm)
    rest = optax.chain(clip, optax.nadamw(config.learning_rate, b2=0.95, weight_decay=0.0))

    def second_update(tx: optax.GradientTransformation):  # with momentum
        return tx.update(grads, tx.update(grads, tx.init(params), params)[1], params)[0]

    muon, expected = second_update(optimizer(config)), second_update(rest)
    left, _, right = np.linalg.svd(grads["mlp"]["kernel"], full_matrices=False)
    size = -config.learning_rate * 0.2 * np.sqrt(10)
    along = left.T @ np.asarray(muon["mlp"].pop("kernel")) @ right.T / size
    np.testing.assert_allclose(along, np.eye(6) * along.diagonal(), atol=0.01)
    assert (along.diagonal() > 0.6).all() and (along.diagonal() < 1.3).all()
    expected["mlp"].pop("kernel")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), muon, expected)


def test_every_step_moves_the_weights():
    """The warm-up's first step and the cosine's last one too, and the only step of a training."""
    config = TrainConfig(steps=100, batch_size=1, learning_rate=3.0)
    rates = np.asarray([learning_rates(config)(i) for i in range(100)])
    np.testing.assert_allclose(rates[:5], [0.75, 1.5, 2.25, 3, 3], rtol=1e-6)
    cosine = 1.5 * (1 + np.cos(np.pi * np.arange(96) / 96))
    np.testing.assert_allclose(rates[4:], cosine, rtol=1e-4)
    assert rates.min() > 0 and learning_rates(config)(100) == pytest.approx(0, abs=1e-6)
    for name in OPTIMIZERS:
        params = {"kernel": jnp.ones((2, 3))}
        for steps_in_all in (1, 2, 3):
            tx = optimizer(replace(config, steps=steps_in_all, optimizer=name))
            state = tx.init(params)
            for _ in range(steps_in_all):
                updates, state = tx.update(params, state, params)
                assert float(jnp.abs(updates["kernel"]).min()) > 0


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"optimizer must be one of .*got 'sgd'"):
        TrainConfig(steps=1, batch_size=1, optimizer="sgd")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TrainConfig(steps=1, batch_size=0)
    with pytest.raises(ValueError, match="learning_rate must be positive and finite, got -1"):
        TrainConfig(steps=1, batch_size=1, learning_rate=-1.0)
    with pytest.raises(ValueError, match="learning_rate must be positive and finite, got inf"):
        TrainConfig(steps=1, batch_size=1, learning_rate=float("inf"))
    for decay in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"weight_decay .* at least 0 and finite, got {decay}"):
            TrainConfig(steps=1, batch_size=1, weight_decay=decay)
