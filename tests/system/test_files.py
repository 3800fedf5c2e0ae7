"""What replaces a file replaces it whole or leaves it alone."""

import fcntl
import os
import resource
import subprocess
import sys

import pytest

from jflash.system.files import replacing, write_json
from jflash.system.lines import appended, kept_lines, read_lines, whole_file
from jflash.system.locks import locked, sole_writer

KILLED = """
import os, signal, sys
from pathlib import Path
from jflash.system.lines import kept_lines
with kept_lines(Path(sys.argv[1]), True, print) as write:
    write("a")
    write("b")
    part, = Path(sys.argv[1]).parent.glob(".*.part")
    with part.open("a") as torn:
        torn.write("c, of which no more")
    os.kill(os.getpid(), int(sys.argv[2]))
"""


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


def test_writers_of_one_file_do_not_mix(tmp_path):
    """Each has its own place; the file is the last one's, whole, with the mode of any new file."""
    file, other = tmp_path / "a.json", tmp_path / "other"
    with replacing(file) as first, first.open("w") as begun:
        begun.write("the first, ")
        with replacing(file) as second:
            second.write_text("the second")
        begun.write("whole")
    assert file.read_text() == "the first, whole" and list(tmp_path.iterdir()) == [file]
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode


def test_a_place_of_a_killed_writer_is_removed_a_day_later(tmp_path):
    file = tmp_path / "a"
    with replacing(file) as part:
        part.touch()
        killed = tmp_path / f".a.{'0' * 16}.part"
        others = [tmp_path / name for name in (".a.part", ".a.jsonl.part", f".b.{'0' * 16}.part")]
        for each in (*others, killed):
            each.touch()
            os.utime(each, (0, 0))
        write_json(file, 1)
        assert set(tmp_path.iterdir()) == {file, part, *others}


def test_a_lock_is_one_process_s_and_ends_with_it(tmp_path):
    """A killed process leaves no lock; while it lives, the second one is refused by name."""
    lock = tmp_path / "run.lock"
    code = "import sys, time; from pathlib import Path; from jflash.system.locks import locked\n"
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


@pytest.mark.parametrize("end", ["removed", "renamed"])
def test_a_lock_is_of_the_file_that_has_the_name(tmp_path, monkeypatch, end):
    """A file that its holder removed after it was opened here locks nobody out."""
    lock, flock, ends = tmp_path / "run.lock", fcntl.flock, [end]

    def late(file, how):
        if ends:
            lock.unlink() if ends.pop() == "removed" else lock.rename(tmp_path / "other")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(lock, tmp_path):
        assert not ends and lock.exists()
        with pytest.raises(ValueError, match="in use"):
            locked(lock, tmp_path).__enter__()


@pytest.mark.parametrize("way", [whole_file, lambda *place: kept_lines(*place, print)])
def test_a_second_writer_is_refused_and_touches_nothing(tmp_path, way, capsys):
    file = tmp_path / "out.jsonl"
    with way(file, False) as write:
        write("a")
        before = {each: each.read_bytes() for each in tmp_path.iterdir()}
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=rf"^{file} is in use by another process: wait"):
                way(file, overwrite).__enter__()
        assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
        write("b")
    assert file.read_text() == "a\nb\n" and list(tmp_path.iterdir()) == [file]
    assert capsys.readouterr().out == ""


def test_a_file_that_came_while_the_lock_was_waited_for_stays(tmp_path, monkeypatch):
    file, flock = tmp_path / "out.jsonl", fcntl.flock

    def late(*how):
        file.write_text("of the run before")
        flock(*how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="exists already"):
        whole_file(file, False).__enter__()
    assert file.read_text() == "of the run before" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("signal", ["9", "15"])
def test_the_lines_of_a_killed_process_are_kept(tmp_path, signal):
    """As those of a block that failed are: the first run of later finds them, and says where."""
    file, said = tmp_path / "out.jsonl", []
    first, second = (tmp_path / f"out.jsonl.unfinished{end}" for end in ("", ".2"))

    def killed() -> None:
        done = subprocess.run([sys.executable, "-c", KILLED, str(file), signal], cwd=tmp_path)
        assert done.returncode == -int(signal)

    killed()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{first} has the lines of a run that did not end"):
            kept_lines(file, False, said.append).__enter__()
        assert list(tmp_path.iterdir()) == [first] and first.read_text() == "a\nb\n"
    assert said == []
    first.write_text("mine")
    killed()
    with pytest.raises(ValueError, match=f"^{first} has"):
        kept_lines(file, False, said.append).__enter__()
    with kept_lines(file, True, said.append) as write:
        assert said.pop() == f"{second} has the lines of a run that did not end"
        write("new")
    assert said == [] and file.read_text() == "new\n"
    assert first.read_text() == "mine" and second.read_text() == "a\nb\n"
    assert set(tmp_path.iterdir()) == {file, first, second}


def test_a_block_that_fails_keeps_its_lines_beside_older_ones(tmp_path):
    file, said = tmp_path / "out.jsonl", []
    first = tmp_path / "out.jsonl.unfinished"
    first.write_text("older")
    with pytest.raises(KeyboardInterrupt), kept_lines(file, True, said.append) as write:
        write("a")
        raise KeyboardInterrupt
    second = tmp_path / f"{first.name}.2"
    assert said == [f"{second} has the lines of a run that did not end"]
    assert first.read_text() == "older" and second.read_text() == "a\n"
    assert set(tmp_path.iterdir()) == {first, second}


def test_a_writer_leaves_no_lock_behind(tmp_path):
    with sole_writer(tmp_path / "dst"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"cannot write .*dst: No such file or directory"):
        sole_writer(tmp_path / "nowhere" / "dst").__enter__()


def test_a_full_disc_is_told_with_the_file_that_was_appended_to(tmp_path):
    """Closing fails once more, as the rest of the line waits; the whole lines stay."""
    file, before = tmp_path / "lines.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        told = r"cannot write .*/lines.jsonl: File too large"
        with pytest.raises(ValueError, match=told), appended(file) as add:
            add({"index": 0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
            add({"index": 1, "text": "x" * 64})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_lines(file) == [{"index": 0}]


def test_a_full_disc_is_told_with_the_file_that_was_replaced(tmp_path):
    file, before = tmp_path / "a.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_json(file, "old")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
        with pytest.raises(OSError, match=r"File too large: '.*/a\.json'$"):
            write_json(file, "x" * 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == '"old"\n' and list(tmp_path.iterdir()) == [file]
    other = OSError(5, "not of the place", "other")
    with pytest.raises(OSError, match="other"), replacing(file):
        raise other
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"'.*/folder'$"), replacing(tmp_path / "folder") as part:
        part.write_text("a")


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
    with pytest.raises(
        ValueError, match=r"answers\.jsonl line 2 is broken.*a line anew that is removed"
    ):
        read_lines(file)


def test_json_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "run.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": file})
    assert file.read_text() == '{\n "a": 1\n}\n' and list(tmp_path.iterdir()) == [file]
