"""The command from prompts to a drafter: killed at any moment, dry, and given bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jflash import load_pair
from jflash.cli import main, training_run
from jflash.cli import train as train_command
from jflash.cli.interrupts import first_interrupt
from jflash.records.decoding import GREEDY, Decoding, Sampling
from jflash.system.hosts import Hosts
from jflash.system.lines import appended
from jflash.system.locks import locked
from jflash.training.answers import answer_into, read_answers
from jflash.training.curve import metric_names
from jflash.training.data import Conversation, load_conversations, save_conversations
from jflash.training.drafter import default_mask_token_id
from jflash.training.recipe import WHOLE, Share
from jflash.training.records import read_records, split_held_out, without_long
from jflash.training.trainer import LOCK, Trained
from tests.evals.test_evaluate import Board
from tests.support.pairs import prompts
from tests.support.small_checkpoints import edit_config, edit_tensors, make_pair
from tests.training.test_answers import PAIR

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/train_drafter.py"
QUESTIONS = [f"{what} {i}?" for i in range(20) for what in ("how many", "why not", "say it")]
SIZES = {
    "--num-layers": 1, "--block-size": 4, "--anchors": 6, "--row-length": 96, "--batch": 2,
    "--max-new-tokens": 40, "--answer-batch": 1, "--steps": 60, "--checkpoint-every": 4,
    "--held-out": 2, "--eval-every": 20, "--intermediate-size": 24, "--loss": "tv",
    "--position-weights": "dpace",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    make_pair(folder)
    lines = [json.dumps({"prompt": question}) for question in QUESTIONS]
    (folder / "empty.jsonl").write_text("\n")
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "x" * 220}) + "\n")
    for name, missing in (("bare", "tokenizer*"), ("base", "tokenizer_config.json")):
        shutil.copytree(folder / "target", folder / name, ignore=shutil.ignore_patterns(missing))
    shutil.copytree(folder / "drafter", folder / "other")
    edit_config(folder / "other", vocab_size=301)
    for name in ("cut", "itself"):
        shutil.copytree(folder / "drafter", folder / name)
    os.truncate(folder / "cut/model.safetensors", 1000)
    (folder / "odd.jsonl").write_text(lines[0] + '\n{"prompt_ids": [1, 300]}\n')
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


MANY = 10**11
FLAG = object()  # of an option without a value
NO_LOOK: dict[str, object] = {"eval_every": 0, "held_out": None}


def arguments(place: Path, output: str, changes: dict[str, object]) -> list[str]:
    given = {"--target": place / "target", "--data": place / "prompts.jsonl"} | SIZES
    given |= {"--output": place / output}
    given |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    kept = [pair for pair in given.items() if pair[1] is not None]
    return [str(x) for pair in kept for x in pair if x != FLAG]


def test_a_host_of_other_settings_is_named(place, monkeypatch, capsys):
    """It would answer its share for itself, and the first host would learn nothing."""
    board = Board()
    monkeypatch.setattr(train_command, "answered", lambda *_: None)
    for index in (1, 0):
        changes = {"answer_temperature": 0.5} if index else {}
        hosts = Hosts(index, 2, board)
        monkeypatch.setattr(train_command, "joined", lambda *_, hosts=hosts: nullcontext(hosts))
        argv = arguments(place, f"of-host-{index}", changes)
        assert main.run("train", argv) == (0 if index else 2)
    why = "host 1 has answer_temperature [0.5], host 0 has [0.0]"
    assert why in capsys.readouterr().err


def start(place: Path, output: str) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(place / "cache"),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments(place, output, {})],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(run: subprocess.Popen) -> str:
    out, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors[-3000:]
    return out


def kill_when(run: subprocess.Popen, ready, delay: float) -> None:
    """SIGKILL, a moment after something was seen on the disk; a run that ended first is no kill."""
    while not ready():
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.01)
    time.sleep(delay)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert run.returncode == -signal.SIGKILL


def lines(work: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in work.glob("answers-*.jsonl"))


def newest(work: Path) -> int:
    """The last step of which a whole checkpoint lies there, 0 without one."""
    steps = [p.name for p in (work / "training/checkpoints").glob("*") if p.name.isdigit()]
    return max(map(int, steps), default=0)


@pytest.mark.long
def test_killed_at_any_moment_it_gives_the_same_bits(place, capsys):
    """While it answers, then while it trains; the unbroken run is of this process."""
    assert command(place, "whole") == 0
    whole = capsys.readouterr().out
    work, rng = place / "killed-work", random.Random()
    delays = [rng.uniform(0, 0.3) for _ in range(2)]
    print(f"killed after {delays}")  # what a failure needs to be seen again

    kill_when(start(place, "killed"), lambda: lines(work) >= 3, delays[0] / 3)
    assert 3 <= lines(work) < len(QUESTIONS)
    kill_when(start(place, "killed"), lambda: newest(work) > 0, delays[1])
    assert lines(work) == len(QUESTIONS)
    assert 0 < newest(work) < SIZES["--steps"]
    resumed = finish(start(place, "killed"))

    a, b = (load_file(place / name / "model.safetensors") for name in ("whole", "killed"))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name
    curves = [
        json.loads((place / f"{n}-work/training/curve.json").read_text())
        for n in ("whole", "killed")
    ]
    assert curves[0] == curves[1]
    assert [r["step"] for r in curves[0] if "tau" in r] == [20, 40, 60]
    assert {"loss", "accuracy", "tau", "accepted"} <= set(metric_names(curves[0]))
    assert all(len(r["accepted"]) == 3 and r["tau"] >= 1 for r in curves[0] if "tau" in r)
    assert (place / "killed-work/training/curve.png").stat().st_size > 1000
    for said in ("memory of each of", "ms a step"):
        assert said in whole and said in resumed
    assert "answers were made before" not in whole
    config = json.loads((place / "whole/config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == 259  # the first that no text has
    assert "mask token: id 259, which the tokenizer lacks" in whole
    assert config["intermediate_size"] == 24


def command(place: Path, output: str, *more: str, **changes: object) -> int:
    """The same in this process."""
    return main.run("train", arguments(place, output, changes) + list(more))


NO_FORM: dict[str, object] = {"num_layers": None, "block_size": None, "intermediate_size": None}


def test_a_drafter_is_trained_on(place, capsys):
    """Steps of nearly nothing leave it as it was; then it is another run than from new weights."""
    changes: dict[str, object] = {"init_from": place / "drafter", "steps": 2} | NO_LOOK
    changes |= NO_FORM | {"learning_rate": 1e-9, "max_new_tokens": 20, "answer_batch": 64}
    assert command(place, "on", **changes) == 0
    before, after = (load_pair(place / "target", place / name) for name in ("drafter", "on"))
    assert before.models.drafter == after.models.drafter
    leaves = jax.tree.leaves(before.params.drafter)
    for was, now in zip(leaves, jax.tree.leaves(after.params.drafter), strict=True):
        np.testing.assert_allclose(now, was, rtol=2**-8, atol=1e-7)  # written in bfloat16
    run = json.loads((place / "on-work/training/run.json").read_text())
    width = before.models.drafter.config.intermediate_size
    assert run["layers"][0]["mlp"]["intermediate_size"] == width != SIZES["--intermediate-size"]

    with (place / "drafter/model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\x40")  # the last weight is another: 2
    shutil.rmtree(place / "on")
    assert command(place, "on", **changes) == 2
    assert "holds a run with {'start_crc32'" in capsys.readouterr().err


def test_another_target_at_the_same_path_answers_and_teaches_anew(place, tmp_path, capsys):
    target = tmp_path / "target"
    shutil.copytree(place / "target", target)
    changes: dict[str, object] = {"target": target, "steps": 2} | NO_LOOK
    changes |= {"max_new_tokens": 20, "answer_batch": 64}
    assert command(tmp_path, "new", data=place / "prompts.jsonl", **changes) == 0
    said, config = capsys.readouterr().out, json.loads((tmp_path / "new/config.json").read_text())
    assert "memory of each of" in said and "ms a step" in said
    assert "mask token: id 259, which the tokenizer lacks" in said
    assert "answers were made before" not in said
    assert config["dflash_config"]["mask_token_id"] == 259  # the first that no text has
    assert config["intermediate_size"] == 24
    shutil.rmtree(tmp_path / "new")
    file = target / "model.safetensors"
    whole = bytearray(file.read_bytes())
    for i in range(len(whole) // 2, len(whole), 2):  # bfloat16 weights of the other sign
        whole[i + 1] ^= 0x80
    file.write_bytes(whole)
    assert command(tmp_path, "new", data=place / "prompts.jsonl", **changes) == 2
    assert "target_crc32" in capsys.readouterr().err
    made = list((tmp_path / "new-work").glob("answers-*.npz"))
    assert len(made) == 2  # the answers of one target are none of the other's


def test_folders_may_be_links_and_overwrite_empties_them(place, tmp_path, capsys):
    """As to a larger disc: the new training lies there too, and nothing of the old one."""
    (place / "linked-work").symlink_to(tmp_path)
    shutil.copytree(place / "drafter", place / "linked")
    (tmp_path / "training").mkdir()
    (tmp_path / "training/curve.json").write_text("[]")
    (tmp_path / "answers-of-old.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    short = {"steps": 2, "data": place / "few.jsonl", "overwrite": FLAG} | NO_LOOK
    (place / "few.jsonl").write_text(json.dumps({"prompt": QUESTIONS[0]}) + "\n")
    assert command(place, "linked", **short) == 0, capsys.readouterr().err
    assert (place / "linked-work").is_symlink()
    assert not (tmp_path / "answers-of-old.jsonl").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"  # of somebody else: it stays
    assert [r["step"] for r in json.loads((tmp_path / "training/curve.json").read_text())] == [2]
    for name in ("later", "later-work"):  # links to folders that are not there yet
        (place / name).symlink_to(tmp_path / name)
    assert command(place, "later", **short) == 0, capsys.readouterr().err
    assert (tmp_path / "later/config.json").is_file() and (
        tmp_path / "later-work/training"
    ).is_dir()


def test_dry_run_says_what_it_takes_and_leaves_nothing(place, capsys):
    """Of a target without a tokenizer, by ids alone."""
    ids = [json.dumps({"prompt_ids": list(question.encode())}) for question in QUESTIONS]
    ids[0] = ids[0].replace("}", ', "answer_ids": [1, 2]}')
    (place / "ids.jsonl").write_text("\n".join(ids))
    (place / "long-ids.jsonl").write_text(json.dumps({"prompt_ids": [1] * 201}) + "\n" + ids[1])
    changes = {"target": place / "bare", "data": place / "ids.jsonl"}
    assert command(place, "dry", "--dry-run", **changes) == 2
    assert "give --mask-token-id" in capsys.readouterr().err
    changes |= {"answer_temperature": "0,1", "keep_answers": FLAG}
    changes |= {"mask_token_id": 299, "eval_prompts": place / "long-ids.jsonl"}
    changes |= {"held_out": None}
    assert command(place, "dry", "--dry-run", **changes) == 0
    out = capsys.readouterr().out
    assert "long-ids.jsonl: 1 prompts are too long for 201 tokens: left out" in out
    assert "activations and gradients" in out and "minutes for 60 steps" in out
    assert "attention of the training: xla; objective: loss tv, weights dpace" in out
    # One has an answer, and one is among the prompts of the evaluation.
    assert "1 of 60 prompts are held out: not learnt" in out
    assert f"answers: {2 * (len(QUESTIONS) - 2)} of at most 40 tokens" in out
    assert not (place / "dry").exists() and not (place / "dry-work").exists()


def test_bad_input_is_a_line(place, capsys):
    tiny, own = {"row_length": 3, "anchors": 2}, {"held_out": None}
    for changes, complaint in [
        ({"decay": -1, "position_weights": None}, "decay must be positive, got -1"),
        ({"batch": 0}, "--batch 0: at least 1"),
        ({"checkpoint_every": 0}, "--checkpoint-every 0: at least 1"),
        ({"held_out": -3}, "--held-out -3: 0 or more"),
        ({"eval_every": -1}, "--eval-every -1: 0 or more"),
        ({"minutes": "nan"}, "--minutes nan: 0 or more"),
        ({"decay": 3}, "--decay without --position-weights decay"),
        (NO_LOOK | {"held_out": 2}, "--held-out with --eval-every 0: nothing would be"),
        (NO_LOOK | {"eval_batch": 8}, "--eval-batch with --eval-every 0: nothing would be"),
        (NO_LOOK | {"eval_prompts": place / "odd.jsonl"}, "--eval-prompts with --eval-every 0"),
        ({"eval_prompts": place / "odd.jsonl"}, "--held-out with --eval-prompts: these are"),
        ({"eval_prompts": place / "none"}, "none: no such file"),
        ({"data": place}, f"{place.name} is a folder or a pipe: give a file"),
        (
            own | {"eval_prompts": place / "long.jsonl"},
            "long.jsonl: all 1 prompts are too long for 201",
        ),
        (own | {"eval_prompts": place / "odd.jsonl"}, "odd.jsonl:2: token id 300 is outside"),
        (
            own | {"eval_prompts": place / "prompts.jsonl"},
            "all 60 prompts are held out: none is left",
        ),
        ({"data": place / "empty.jsonl"}, "empty.jsonl holds no record"),
        (tiny, "all 60 prompts are too long for 3 tokens"),
        ({"max_new_tokens": 240}, "--max-new-tokens 240: the target has 240 positions in all"),
        ({"selector_rank": 8}, "--selector-rank without --drafter dflash2"),
        ({"selector_weight": 2}, "--selector-weight without --drafter dflash2"),
        ({"loss": "ce", "ce_share": 0.5}, "--ce-share without --loss tv"),
        ({"position_weights": "decay", "dpace_alpha": 0.2}, "--dpace-alpha without --position-w"),
        ({"answers_per_prompt": 2}, "--answers-per-prompt 2 at temperature 0: greedy answers"),
        ({"answer_temperature": "0,1,0.0"}, "--answer-temperature has 0 twice: greedy answers"),
        ({"training_attention": "cudnn"}, "cudnn attention needs an NVIDIA GPU"),
        ({"answer_part": "2/2"}, "--answer-part: 2/2: of N parts, at least 1, I is within 0 …"),
        ({"answer_part": "0/0"}, "--answer-part: 0/0: of N parts, at least 1, I is within"),
        ({"answer_part": "0/2", "overwrite": FLAG}, "--overwrite with --answer-part"),
        ({"answer_temperature": "-1"}, "temperature"),
        ({"mask_token_id": 300}, "mask_token_id 300"),
        ({"row_length": 0}, "--row-length 0: at least 1"),
        ({"steps": MANY}, f"steps must be at most 2147483647, got {MANY}"),
        ({"batch": MANY}, f"{MANY} rows of 96 tokens"),
        ({"num_layers": MANY}, f"--num-layers {MANY}: a whole number from 1 to 1024"),
        ({"block_size": 1025}, "--block-size 1025: a whole number from 0 to 1024"),
        ({"intermediate_size": 10**9}, "the drafter's training takes"),
        ({"target_layer_ids": "1,1"}, "target_layer_ids [1, 1] repeat a layer"),
        ({"num_layers": 9}, "num_layers 9: for a target of 2 layers the published rule gives"),
        ({"init_from": place / "drafter"}, "--num-layers: the drafter of --init-from is as it is"),
        (NO_FORM | {"init_from": place / "target"}, "Qwen3ForCausalLM"),
        (NO_FORM | {"init_from": place / "drafter", "selector_weight": 2}, "is of version 1, with"),
        (NO_FORM | {"init_from": place / "other"}, "vocab_size is 301 in the drafter, 300 in"),
        (NO_FORM | {"init_from": place / "cut"}, "corrupt or truncated"),
        ({"held_out": 60}, "60 of 60 different prompts held out leave none"),
        ({"target": place / "base"}, "prompts.jsonl:1: the tokenizer has no chat template: pass"),
        (tiny | {"target": place / "base", "no_chat_template": FLAG}, "(the shortest has 9)"),
        (tiny, "(the shortest has 11)"),
        ({"target": place / "bare", "mask_token_id": 9}, "prompts.jsonl:1: the target holds no to"),
    ]:
        assert command(place, "bad", **changes) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]
    assert command(place, "..") == 2
    assert "/..: give a folder's name" in capsys.readouterr().err
    assert command(place, "prompts.jsonl") == 2  # before anything is answered or learnt
    assert "prompts.jsonl is a file: the drafter gets a folder" in capsys.readouterr().err
    for nowhere in ("/proc/drafter", "/proc/a/b"):  # where root too makes no folder
        assert command(place, nowhere, data=place / "odd.jsonl") == 2
        told = f"--output {nowhere}: /proc takes no file: No such file or directory\n"
        assert capsys.readouterr().err == f"train_drafter.py: {told}"
    assert command(place, "prompts.jsonl/x") == 2
    assert "prompts.jsonl is a file, no folder: give another" in capsys.readouterr().err
    (place / "taken-work").write_text("")
    assert command(place, "taken") == 2
    assert "taken-work is a file, where its answers would lie: move it" in capsys.readouterr().err
    itself = NO_FORM | {"init_from": place / "itself", "overwrite": FLAG}
    assert command(place, "itself", **itself) == 2
    assert "itself is both read and written: choose another" in capsys.readouterr().err
    assert command(place, "target", overwrite=FLAG) == 2  # the target stays as it is
    assert "target is both read and written: choose another" in capsys.readouterr().err
    (place / "itself-work/training").mkdir(parents=True)
    with locked(place / "itself-work/training" / LOCK, place):  # a training that runs
        assert command(place, "itself", overwrite=FLAG) == 2
    assert "itself-work is in use by another process" in capsys.readouterr().err
    assert (place / "itself/config.json").exists()
    assert not (place / "bad").exists() and not (place / "bad-work").exists()


def test_a_drafter_that_cannot_be_trained_further_is_refused_first(place, capsys, monkeypatch):
    """One with an embedding or a head of its own, or in no form that is written: by its config."""
    loaded = []
    monkeypatch.setattr(training_run, "load_weights", lambda *_, **__: loaded.append(1))
    layer = json.loads((place / "drafter/config.json").read_text())
    table = np.zeros((layer["vocab_size"], layer["hidden_size"]), np.float32)
    own = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 2]}
    own |= {"block_size": layer["block_size"], "mask_token_id": 299}
    norms = ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")
    bad = "brings an embedding or a head is not trained further"
    for kind, drop, tensors, said in (
        ("qwen3", (), {"embed_tokens.weight": table}, bad),
        ("qwen3", (), {"lm_head.weight": table}, bad),
        ("llama", norms, {}, "only models of Qwen3's shape can be written"),
    ):
        shutil.rmtree(place / "brings", ignore_errors=True)
        shutil.copytree(place / "drafter", place / "brings")
        edit_config(place / "brings", **own, transformer_layer_config=layer | {"model_type": kind})
        edit_tensors(place / "brings", drop, **tensors)
        assert command(place, "bad", **NO_FORM | {"init_from": place / "brings"}) == 2
        err = capsys.readouterr().err
        assert said in err.splitlines()[-1] and err.count("\n") == 1
    assert not loaded and not (place / "bad").exists()


def test_ctrl_c_ends_where_all_is_saved(place, capsys, monkeypatch):
    def answered(*_) -> list[Conversation]:
        return [Conversation([i], [1, 2]) for i in range(9)]

    def train(*_, should_stop, **__) -> Trained:
        assert not should_stop(0)
        signal.raise_signal(signal.SIGINT)
        assert should_stop(4)
        return Trained({}, 4, [])

    monkeypatch.setattr(train_command, "answered", answered)
    monkeypatch.setattr(train_command, "train_drafter", train)
    with pytest.raises(SystemExit) as ended:
        command(place, "stopped")
    assert ended.value.code == 130
    assert "stopped at step 4 of 60; the same command goes on" in capsys.readouterr().out

    def pressed(*_):  # pytest's own processes ignore the signal
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "answered", pressed)
    assert command(place, "stopped") == 130
    assert capsys.readouterr().err.endswith("\ninterrupted; the same command goes on\n")

    with first_interrupt() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sampled_answers_are_shared_out(tmp_path, capsys):
    """Two shares make what one process makes alone, each its own; a third call finds them all."""
    asked = prompts(5, low=3, high=20)

    decoding = Decoding(max_new_tokens=12, stop_token_ids=(0,), seed=3)
    both_ways = [GREEDY, Sampling(temperature=1.0)]

    def answers(
        folder: Path, share: Share = WHOLE, ways=both_ways, asked=asked
    ) -> list[list[int]] | None:
        folder.mkdir(exist_ok=True)
        return answer_into(
            folder, "a", PAIR, asked, [replace(decoding, sampling=way) for way in ways],
            batch_size=2, share=share,
        )  # fmt: skip

    alone, both = answers(tmp_path / "alone"), tmp_path / "both"
    assert alone and len(alone) == 10
    assert answers(both, Share(1, 2)) is None
    # Of fewer prompts, too: what was made of the others is none of these.
    assert answers(both, Share(1, 2), asked=asked[:1]) is None
    assert capsys.readouterr().out == ""
    assert set(read_answers(both / "a-1-of-2.jsonl")) == {2, 3, 6, 7}
    assert answers(both, Share(0, 2)) == alone
    assert set(read_answers(both / "a-0-of-2.jsonl")) == {0, 1, 4, 5, 8, 9}
    assert answers(both) == alone and (both / "a.jsonl").read_bytes() == b""
    assert answers(tmp_path / "greedy", ways=[GREEDY]) == alone[::2]
    assert sum(a != b for a, b in zip(alone[::2], alone[1::2], strict=True)) >= 4


def test_half_a_line_is_taken_off(tmp_path):
    file = tmp_path / "answers.jsonl"
    assert read_answers(file) == {}
    whole = '{"index": 3, "answer_ids": [1, 2]}\n'
    file.write_text(whole + '{"index": 4, "answer_')
    assert read_answers(file) == {3: [1, 2]}
    with appended(file):
        pass
    assert read_answers(file) == {3: [1, 2]}
    assert file.read_text() == whole
    wrong = [{"text": "x"}, [1], {"index": "4", "answer_ids": [1]}]  # '4' < 5 was a TypeError
    wrong += [{"index": 4, "answer_ids": ids} for ids in ("x", [], [1.5], [2**40], None)]
    for other in map(json.dumps, wrong):
        file.write_text(f"{whole}{other}\n")
        with pytest.raises(ValueError, match=r"answers.jsonl line 2 is no answer: .* is removed"):
            read_answers(file)


def test_answers_that_were_damaged_are_named(tmp_path):
    file = tmp_path / "answers.npz"
    save_conversations(file, [Conversation([1, 2], [3])])
    os.truncate(file, 100)
    damaged = file.read_bytes()
    with file.open("wb") as opened:
        np.save(opened, np.arange(3))
    array = file.read_bytes()
    ones = np.ones(1, np.int32)
    np.savez(file, tokens=np.arange(3), prompt_lengths=ones, answer_lengths=ones)
    for content in (file.read_bytes(), array, damaged):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"answers.npz cannot be read: .* makes it anew"):
            load_conversations(file)


def test_a_finished_training_without_its_curve_is_reported(capsys):
    for history in ([], [{"step": 60}], [{"step": 60, "loss": "x", "acceptance_length": 1.0}]):
        train_command.report(Path("drafter"), history)
        assert capsys.readouterr().out == "drafter: saved\n"


class FullTokenizer:
    """All ids in use, some of them for tokens that texts do not hold."""

    mask_token_id = None
    eos_token_id = 9
    chat_template = "<start>{{ m }}"

    def __init__(self, *special: str) -> None:
        class Token(str):
            special = True

        self.added_tokens_decoder = {7 + i: Token(text) for i, text in enumerate(special)}
        self.vocabulary = {f"t{i}": i for i in range(12)}

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def test_mask_token_of_a_full_vocabulary_is_one_without_a_part():
    choose = default_mask_token_id
    assert choose(FullTokenizer("<file>", "<start>", "<end>", "<empty>", "<last>"), 12) == 11
    assert choose(FullTokenizer("<file>", "<start>", "<end>", "<reserved_0>", "<last>"), 12) == 10
    with_gap = FullTokenizer()
    del with_gap.vocabulary["t3"]
    assert choose(with_gap, 12) == choose(with_gap, 13) == 3  # 11, as many as it has, is a token
    assert choose(FullTokenizer(), 13) == 12
    with pytest.raises(ValueError, match="uses all 12 ids"):
        choose(FullTokenizer(), 12)
    with pytest.raises(ValueError, match="uses all 12 ids"):
        choose(FullTokenizer("x<start>"[1:], "<start>", "<end>"), 12)


def test_a_record_ends_at_a_newline_alone(tmp_path):
    """Prompts hold what str.splitlines would break at."""
    texts = ["one\u2028two", "a\x0bb\x0cc", "d\x85e"]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_text("\n".join([*lines[:1], "", *lines[1:]]) + "\n", encoding="utf-8")
    asked = []
    read_records(file, lambda text: asked.append(text) or [1], lambda text: [], 2)
    assert asked == texts
    file.write_text("\n".join([*lines, "{"]), encoding="utf-8")
    with pytest.raises(ValueError, match="jsonl:4 is not JSON"):
        read_records(file, lambda text: [1], lambda text: [], 2)


def test_records_are_left_out_and_held_out():
    records = [Conversation([i] * (1 + i % 5), [i]) for i in range(30)]
    records += records[:3]
    kept, dropped = without_long(records, 5)
    assert dropped == 6 and all(len(r.prompt_ids) < 5 for r in kept)
    learnt, held = split_held_out(kept, 4, seed=1)
    names = {tuple(h.prompt_ids) for h in held}
    assert len(names) == 4 and not any(tuple(r.prompt_ids) in names for r in learnt)
    assert {tuple(r.prompt_ids) for r in learnt} | names == {tuple(r.prompt_ids) for r in kept}
    assert split_held_out(kept, 4, seed=1) == (learnt, held)
    assert split_held_out(kept, 4, seed=2)[1] != held
