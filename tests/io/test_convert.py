"""The Orbax form: the same bits as what it was made from, accepted wherever a folder is."""

import contextlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jflash.cli import main
from jflash.io import (
    convert,
    load_drafter,
    load_target,
    load_tokenizer,
    open_checkpoint,
    random_drafter,
    save_checkpoint,
    whole_folder,
)
from jflash.io.whole_folder import write_whole
from tests.support.small_checkpoints import (
    DRAFTER,
    Folders,
    edit_config,
    make_pair,
    unit_gain_params,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Folders:
    folders = make_pair(tmp_path_factory.mktemp("pair"))
    (folders.target / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    return folders


@pytest.fixture(scope="module")
def converted(pair, tmp_path_factory) -> Folders:
    folders = Folders(*(tmp_path_factory.mktemp("converted") / f.name for f in pair))
    for source, destination in zip(pair, folders, strict=True):
        assert main.run("convert", [str(source), str(destination)]) == 0
    return folders


def same_bits(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_identical(pair, converted, dtype):
    same_bits(load_target(pair.target, dtype)[1], load_target(converted.target, dtype)[1])
    same_bits(load_drafter(pair.drafter, dtype)[1], load_drafter(converted.drafter, dtype)[1])
    assert load_target(pair.target)[0] == load_target(converted.target)[0]
    assert load_drafter(pair.drafter)[0] == load_drafter(converted.drafter)[0]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_stored_dtype_is_kept_unless_told_otherwise(tmp_path, stored):
    folders = make_pair(tmp_path, dtype=stored)
    for dtype in (None, "bfloat16"):
        destination = tmp_path / f"converted-{dtype}"
        options = [] if dtype is None else ["--dtype", dtype]
        assert main.run("convert", [str(folders.drafter), str(destination), *options]) == 0
        got = open_checkpoint(destination).check(DRAFTER)(None, False)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {dtype or stored}
        said = json.loads((destination / "config.json").read_text())["torch_dtype"]
        assert said == (dtype or stored)
        want = load_drafter(folders.drafter, "bfloat16")[1]
        same_bits(load_drafter(destination, "bfloat16")[1], want)


def test_companions_travel_and_weights_do_not(pair, converted):
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in converted.target.iterdir()} == {*names, "orbax", "orbax.crc32.json"}
    for name in names:
        assert (converted.target / name).read_bytes() == (pair.target / name).read_bytes()
    assert {p.name for p in converted.drafter.iterdir()} == {
        "config.json",
        "orbax",
        "orbax.crc32.json",
    }


def test_further_chat_templates_travel(pair, tmp_path):
    """As transformers writes them beside the default one; the server's tools take one of them."""
    source, destination = tmp_path / "source", tmp_path / "converted"
    shutil.copytree(pair.target, source)
    (source / "additional_chat_templates").mkdir()
    (source / "chat_template.jinja").write_text("default")
    (source / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    assert main.run("convert", [str(source), str(destination)]) == 0
    templates = load_tokenizer(destination).chat_template
    assert templates == {"default": "default", "tool_use": "with tools"}


def test_either_form_generates_the_same(pair, converted, capsys):
    results = []
    for target in (pair.target, converted.target):
        for drafter in (pair.drafter, converted.drafter):
            argv = ["--target", str(target), "--drafter", str(drafter), "--max-new-tokens", "20"]
            assert main.run("generate", ["hello", *argv, "--json"]) == 0
            captured = capsys.readouterr()
            assert captured.err == ""  # nothing of Orbax's warnings
            results.append(json.loads(captured.out))
    assert len({(r["text"], *r["token_ids"], *r["acceptance_lengths"]) for r in results}) == 1


def test_the_orbax_form_configures_random_drafters(pair, converted):
    same_bits(random_drafter(converted.drafter, 3)[1], random_drafter(pair.drafter, 3)[1])


def test_the_orbax_form_converts_again(converted, tmp_path, capsys):
    assert main.run("convert", [str(converted.target), str(tmp_path / "again")]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"wrote {tmp_path / 'again'}\n", "")
    same_bits(load_target(tmp_path / "again")[1], load_target(converted.target)[1])


def test_overwrite_replaces_a_converted_checkpoint(pair, converted, tmp_path):
    folder = Path(shutil.copytree(converted.target, tmp_path / "drafter"))
    (folder / "old").write_text("of the target")
    assert main.run("convert", [str(pair.drafter), str(folder), "--overwrite"]) == 0
    same_bits(load_drafter(folder)[1], load_drafter(pair.drafter)[1])
    assert not (folder / "old").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_a_model_saved_over_a_converted_one_is_read(pair, tmp_path):
    """As `jflash train --overwrite` does; other files stay."""
    folder = tmp_path / "drafter"
    assert main.run("convert", [str(pair.drafter), str(folder)]) == 0
    (folder / "README.md").write_text("mine")
    new = unit_gain_params(DRAFTER, 5)
    save_checkpoint(folder, DRAFTER, new, "float32")
    jax.tree.map(np.testing.assert_array_equal, new, load_drafter(folder, "float32")[1])
    assert {f.name for f in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("old", [False, True])
def test_a_second_run_to_a_destination_is_refused(
    pair, converted, tmp_path, monkeypatch, capsys, old
):
    """It leaves what the first one has written, which then goes on to its end."""
    destination = tmp_path / "a" / "dst"
    if old:
        shutil.copytree(converted.target, destination)
    argv, save, codes = ["convert", str(pair.drafter), str(destination)], convert.save_orbax, []

    def slow(part, params):
        before = contents(tmp_path)
        codes.append(main.run(argv[0], [*argv[1:], *["--overwrite"] * old]))
        assert contents(tmp_path) == before and (part / "config.json").exists()
        save(part, params)

    monkeypatch.setattr(convert, "save_orbax", slow)
    assert main.run(argv[0], [*argv[1:], *["--overwrite"] * old]) == 0 and codes == [2]
    out, err = capsys.readouterr()
    assert out == f"wrote {destination}\n"
    why = f"{destination} is in use by another process: wait for its end, or give another place"
    assert err.endswith(f": {why}\n") and err.count("\n") == 1
    same_bits(load_drafter(destination)[1], load_drafter(pair.drafter)[1])
    assert list(destination.parent.iterdir()) == [destination]


def test_a_destination_that_came_before_the_lock_was_had_stays(tmp_path, monkeypatch):
    destination, lock = tmp_path / "dst", whole_folder.sole_writer

    def late(place):
        place.mkdir()
        (place / "config.json").write_text("of the run before")
        return lock(place)

    monkeypatch.setattr(whole_folder, "sole_writer", late)
    with pytest.raises(ValueError, match="exists already"):
        write_whole(destination, False, lambda part: (part / "config.json").write_text("new"))
    assert (destination / "config.json").read_text() == "of the run before"
    assert list(tmp_path.iterdir()) == [destination]


def test_a_part_left_by_a_killed_run_is_no_obstacle(pair, tmp_path):
    (tmp_path / ".dst.lock").touch()
    stale = tmp_path / ".dst.part"
    stale.mkdir()
    (stale / "orbax").write_text("half")
    assert main.run("convert", [str(pair.drafter), str(tmp_path / "dst")]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["dst"]


def test_what_a_killed_run_had_moved_away_comes_back(pair, tmp_path, capsys):
    """Between its two renames the destination is not there; without --overwrite it then stays."""
    destination, old = tmp_path / "dst", tmp_path / ".dst.old"
    shutil.copytree(pair.target, old)
    shutil.copytree(pair.drafter, tmp_path / ".dst.part")
    argv = [str(pair.drafter), str(destination)]
    assert main.run("convert", argv) == 2
    told = capsys.readouterr().err
    assert "dst exists already: a run was killed" in told and "--overwrite" in told
    same_bits(load_target(destination)[1], load_target(pair.target)[1])
    assert not old.exists()
    destination.rename(old)
    assert main.run("convert", [*argv, "--overwrite"]) == 0
    same_bits(load_drafter(destination)[1], load_drafter(pair.drafter)[1])
    assert list(tmp_path.iterdir()) == [destination]


def test_what_was_replaced_is_never_half_there(tmp_path, monkeypatch):
    """It would come back so; what a run left that was killed when it had ended goes too."""
    destination, old = tmp_path / "dst", tmp_path / ".dst.old"
    for folder in (destination, old):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    removed, rmtree = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda at, **how: removed.append(at) or rmtree(at, **how))
    write_whole(destination, True, lambda part: (part / "config.json").write_text("new"))
    assert {folder.name for folder in removed} == {".dst.part"}
    assert list(tmp_path.iterdir()) == [destination]


def test_parents_are_made_and_a_link_is_followed(pair, tmp_path):
    deep = tmp_path / "a" / "b" / "dst"
    assert main.run("convert", [str(pair.drafter), str(deep)]) == 0
    (tmp_path / "link").symlink_to(deep)
    assert main.run("convert", [str(pair.drafter), str(tmp_path / "link"), "--overwrite"]) == 0
    assert (tmp_path / "link").is_symlink() and (deep / "config.json").exists()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path, monkeypatch, error):
    old = tmp_path / "dst"
    old.mkdir()
    (old / "config.json").write_text("old")
    rename = Path.rename

    def failing(self, other):
        if self.name == ".dst.part":
            raise error
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    told = (ValueError, KeyboardInterrupt)
    with pytest.raises(told, match=r"cannot write .*Input/output error|^$"):
        write_whole(old, True, lambda part: (part / "config.json").write_text("new"))
    assert [p.name for p in tmp_path.iterdir()] == ["dst"]
    assert (old / "config.json").read_text() == "old"


def test_nothing_stays_that_is_written_after_the_error(tmp_path):
    """As threads of a save do: some files come after the error, each with its folders."""

    def fill(part: Path) -> None:
        def write() -> None:
            for name in "abcd":
                time.sleep(0.1)
                with contextlib.suppress(FileNotFoundError):  # removed in between
                    part.mkdir(parents=True, exist_ok=True)
                    (part / name).write_text("late")

        writer = threading.Thread(target=write)
        writers.append(writer)
        writer.start()
        raise OSError(28, "No space left on device")

    writers: list[threading.Thread] = []
    with pytest.raises(ValueError, match="No space left on device"):
        write_whole(tmp_path / "a" / "b" / "dst", False, fill)
    assert not writers[0].is_alive() and list(tmp_path.iterdir()) == []


def test_an_orbax_form_that_does_not_fit_its_config(converted, tmp_path):
    folder = Path(shutil.copytree(converted.drafter, tmp_path / "drafter"))
    edit_config(folder, num_hidden_layers=2, intermediate_size=64)
    with pytest.raises(ValueError, match="missing: layers_1/") as error:
        load_drafter(folder)
    assert "wrong shape: layers_0/mlp/down/kernel is (48, 32), expected (64, 32)" in str(
        error.value
    )


def biggest(folder: Path) -> Path:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("damage", ["data", "manifest.ocdbt", "_METADATA"])
def test_a_damaged_orbax_form(converted, tmp_path, damage, capsys):
    folder = Path(shutil.copytree(converted.drafter, tmp_path / "drafter"))
    orbax = folder / "orbax"
    file = biggest(orbax) if damage == "data" else orbax / damage
    os.truncate(file, file.stat().st_size // 2)
    argv = ["a", "--target", str(converted.target), "--drafter", str(folder)]
    assert main.run("generate", [*argv, "--max-new-tokens", "2"]) == 2
    err = capsys.readouterr().err
    assert "orbax is corrupt" in err and err.count("\n") == 1 and len(err) < 600
