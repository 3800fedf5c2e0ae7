"""Options by their names, as Ray Serve gives those of `jflash serve`."""

import pytest

from jflash.cli.jax_setup import platform_options
from jflash.cli.main import make_parser
from jflash.cli.options.by_name import argv_of, refuse_of_ray, with_absolute_places


@pytest.fixture
def parser():
    parser = make_parser("serve")
    platform_options(parser)
    return parser


@pytest.mark.parametrize(
    ("given", "argv"),
    [
        ({"max_batch": "2", "target": "a/b"}, ["--max-batch", "2", "--target", "a/b"]),
        ({"api_key": ["k", "l"]}, ["--api-key", "k", "--api-key", "l"]),
        ({"no_cuda_graphs": "true", "no_preallocation": False}, ["--no-cuda-graphs"]),
        ({"no_cuda_graphs": True}, ["--no-cuda-graphs"]),
        ({"autotune": "False"}, ["--no-autotune"]),
        ({"autotune": "true"}, ["--autotune"]),
        ({"no_autotune": False}, ["--autotune"]),
        ({"help": False}, []),
    ],
)
def test_names_become_a_command_line_that_the_parser_reads(parser, given, argv):
    assert argv_of(parser, given) == argv
    parser.parse_args(argv)


def test_a_flag_is_true_or_false(parser):
    with pytest.raises(ValueError, match="--no-cuda-graphs 1: true or false"):
        argv_of(parser, {"no_cuda_graphs": 1})


def test_where_ray_serve_listens_is_its_own_to_say():
    with pytest.raises(ValueError, match="--port 9000: Ray Serve listens as its http_options say"):
        refuse_of_ray({"max_batch": 2, "port": 9000})
    refuse_of_ray({"max_batch": 2})


def test_places_that_are_here_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    (tmp_path / "keys").write_text("k\n")
    given = {"target": "target", "drafter": "random:3:drafter", "api_key_file": "keys"}
    here = {name: value.replace(value.split(":")[-1], str(tmp_path / value.split(":")[-1]))
            for name, value in given.items()}  # fmt: skip
    assert with_absolute_places(given | {"port": 1}) == here | {"port": 1}
    other = {"target": "owner/name", "drafter": "random:0", "api_key_file": "nothere"}
    assert with_absolute_places(other) == other
