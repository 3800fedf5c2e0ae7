"""What replaces a file replaces it whole or leaves it alone."""

import pytest

from jflash.files import replacing


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
