"""A quantised target on the command line: where its weights lie is said, or the command refuses."""

import pytest

from jflash.cli.command import Parser
from jflash.cli.generate import configured, loaded
from jflash.cli.options.generate import declare
from tests.support.quantised_files import CASES, quantise
from tests.support.refusals import decode
from tests.support.small_checkpoints import make_pair


@pytest.mark.parametrize(("how", "where"), [("kept", "kept as codes"), ("auto", "dequantised")])
def test_a_line_says_where_the_weights_lie(tmp_path, capsys, how, where):
    folders = make_pair(tmp_path)
    quantise(folders.target, CASES["fp8-tensor"])
    parser = Parser("generate", "")
    declare(parser)
    options = parser.parse_args(decode(folders, "--quantised", how))
    loaded(configured(options, 1), False)
    [line] = capsys.readouterr().err.splitlines()
    assert f"quantised (fp8): {where}" in line and "scales of activations are not applied" in line


def test_what_cannot_be_kept_is_refused_in_one_line(tmp_path, refused):
    folders = make_pair(tmp_path)
    refused(decode(folders, "--quantised", "kept"), "no quantised weights that may be kept")
    quantise(folders.target, CASES["awq"], drop=("model.layers.1.mlp.up_proj.scales",))
    for how in ("auto", "kept"):
        refused(decode(folders, "--quantised", how), "missing: model.layers.1.mlp.up_proj.scales")
