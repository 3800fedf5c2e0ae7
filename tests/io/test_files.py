"""What replaces a file replaces it whole or leaves it alone."""

import subprocess
import sys

import pytest

from jflash.files import appended, locked, read_lines, replacing, write_json


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    file = tmp_path / "a.json"
    with replacing(file) as part:
        part.write_text("first")
        assert not file.exists()
    with replacing(file) as part:
        part.write_text("second")
        assert file.read_text() == "first"
    assert file.read_text() == "second"
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_not_finished_leaves_nothing(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")
    for wrote in (True, False):
        with pytest.raises(KeyboardInterrupt), replacing(file) as part:
            if wrote:
                part.write_text("half")
            raise KeyboardInterrupt
        assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError), replacing(file):
        pass  # nothing was written: there is nothing to put in its place
    assert file.read_text() == "old"


def test_a_lock_is_one_process_s_and_ends_with_it(tmp_path):
    """A killed process leaves no lock; while it lives, the second one is refused by name."""
    lock = tmp_path / "run.lock"
    code = "import sys, time; from pathlib import Path; from jflash.files import locked\n"
    code += "with locked(Path(sys.argv[1]), Path()): print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(ValueError, match=f"{tmp_path} is in use by another process"):
        locked(lock, tmp_path).__enter__()
    holder.kill()
    holder.communicate()
    with locked(lock, tmp_path), pytest.raises(ValueError, match="in use"):
        locked(lock, tmp_path).__enter__()


def test_lines_are_appended_after_the_last_whole_one(tmp_path):
    file = tmp_path / "answers.jsonl"
    assert read_lines(file) == []
    with appended(file) as add:
        add({"index": 0})
        assert read_lines(file) == [{"index": 0}]  # while the file is open
    with file.open("a") as torn:
        torn.write('{"index": 1, "ans')
    assert read_lines(file) == [{"index": 0}]
    with appended(file) as add:
        add({"index": 2})
    assert file.read_text() == '{"index": 0}\n{"index": 2}\n'
    file.write_text('{"index": 0}\nhalf\n{"index": 2}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl line 2 is broken"):
        read_lines(file)


def test_json_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "run.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": file})
    assert file.read_text() == '{\n "a": 1\n}\n' and list(tmp_path.iterdir()) == [file]
