"""The file and the last line of a command that measures: JSON, and the newest result."""

import json
import math
import shutil

import pytest

from jflash.cli.options.results import keep_newest


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_a_number_that_is_not_finite_is_null(tmp_path, capsys):
    def results():
        yield {"ms": 1.0}
        yield {"ms": [math.nan, -math.inf, 2.5], "parts": {"floor": (math.inf, "NaN", None, 3)}}
        return 7

    file = tmp_path / "result.json"
    assert keep_newest(file, results()) == 7
    for text in (file.read_text(), capsys.readouterr().out):
        assert json.loads(text, parse_constant=no_constant) == {
            "ms": [None, None, 2.5],
            "parts": {"floor": [None, "NaN", None, 3]},
        }


def test_a_result_that_cannot_be_written_is_printed(tmp_path, capsys):
    """It may have taken hours, and --help says that the last line is printed anyway."""
    file = tmp_path / "removed" / "result.json"
    file.parent.mkdir()

    def results():
        yield {"ms": 1.0}
        shutil.rmtree(file.parent)
        yield {"ms": 2.0}

    with pytest.raises(ValueError, match=rf"^cannot write {file}: No such file"):
        keep_newest(file, results())
    assert json.loads(capsys.readouterr().out) == {"ms": 2.0}


def test_a_second_run_into_a_file_of_results_is_refused_before_it_measures(tmp_path):
    """Also before the first one has a result: each would replace the other's."""
    file = tmp_path / "result.json"

    def second():
        raise AssertionError("it measures")
        yield {}

    def results():
        for ms in (1.0, 2.0):
            for overwrite in (False, True):
                with pytest.raises(ValueError, match=f"^{file} (is in use|exists)"):
                    keep_newest(file, second(), overwrite)
            yield {"ms": ms}

    keep_newest(file, results())
    assert json.loads(file.read_text()) == {"ms": 2.0} and list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match=f"^{file} exists already"):
        keep_newest(file, second())
    keep_newest(file, results(), overwrite=True)
