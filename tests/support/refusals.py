"""Commands that must refuse: one line on stderr, exit code 2, no traceback, nothing written."""

from pathlib import Path

from jflash.cli.main import run
from tests.support.small_checkpoints import Folders


def listing(folder: Path) -> list[tuple[str, bytes | None]]:
    files = sorted(folder.rglob("*"))
    return [(str(file), file.read_bytes() if file.is_file() else None) for file in files]


def decode(pair: Folders, *options: str, prompt: str | None = "hi") -> list[str]:
    models = ["--target", str(pair.target), "--drafter", str(pair.drafter)]
    return [*models, "--max-new-tokens", "16", *options, *([] if prompt is None else [prompt])]


def one_line(capsys, *named: str) -> None:
    """Finds nothing on stdout, and one line with every one of `named` on stderr."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n"), captured.err
    assert "Traceback" not in captured.err
    for part in named:
        assert part in captured.err


def refuser(capsys, caplog, folder: Path):
    """A function that runs a command and finds every one of `named` in its one line.

    Nothing may be written to `folder`.
    """

    def call(argv: list[str], *named: str, command: str = "generate") -> None:
        before = listing(folder)
        capsys.readouterr()
        assert run(command, argv) == 2
        one_line(capsys, *named)
        assert not caplog.records
        assert listing(folder) == before

    return call
