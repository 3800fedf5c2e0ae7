"""soak and check-load: what they refuse before anything is read, and what reaches the server."""

import pytest

from jflash.cli import check_load
from jflash.cli.command import Parser
from jflash.cli.main import main
from jflash.cli.options import serve, soak
from jflash.cli.options.check_load import PAGE
from jflash.cli.options.pair import model_options
from jflash.cli.soak import server_options
from jflash.proof.soak import GROWTH, Soak, problems_of
from jflash.serving.calls.layout import STEPS_OF_SMALL, STEPS_PER_CALL
from pallas_kernels import block_attention

MANY = 10**11
WORDS = (
    "--target T --drafter D --dtype float32 --quantised dequantised --drafter-dtype float8 "
    "--attention-backend xla --block-size 4 --verify-rows 9 --tensor-parallel 2 "
    "--experts-over devices "
    "--max-batch 3 --max-context 99"
)


def test_soak_gives_its_server_every_option_of_the_models():
    asks, serves, models = (Parser(name, "") for name in ("soak", "serve", "models"))
    soak.declare(asks)
    serve.declare(serves)
    model_options(models.add_argument_group())
    defaults = vars(models.parse_args([])) | {"max_batch": None, "max_context": None}
    del defaults["version"]
    asked = asks.parse_args(WORDS.split())
    got = serves.parse_args(server_options(asked))
    for name, default in defaults.items():
        assert getattr(got, name) == getattr(asked, name) != default, name
    assert got.steps_per_call is None


def test_help_names_the_steps_that_an_engine_takes():
    serve.declare(serves := Parser("serve", ""))
    said = f"default {STEPS_PER_CALL}, of a small target on a GPU {STEPS_OF_SMALL}:"
    assert said in " ".join(serves.format_help().split())


@pytest.mark.parametrize(
    ("gained", "why"),
    [
        ((0, 0), []),
        ((GROWTH, GROWTH), []),
        ((GROWTH + 1, 0), [f"the server grew from 100 to {101 + GROWTH} bytes"]),
        ((0, GROWTH + 1), [f"the device's memory grew from 100 to {101 + GROWTH} bytes"]),
    ],
)
def test_a_soak_sees_memory_that_grows(gained, why):
    """Not what a call takes while it runs, nor what the first minutes take."""
    server, device = gained
    result = Soak(minutes=1.0, clients=1)
    result.resident = [0] * 4 + [100] * 8 + [100 + server] * 8
    result.device_bytes = [0] * 4 + [100, 9 * GROWTH] * 4 + [100 + device, 9 * GROWTH] * 4
    assert problems_of(result) == why


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--context 11", "--context 11: at least 12"),
        ("--context 257 --pages 4", "--pages 4: a request of 257 tokens needs 5"),
        ("--prefill-chunk 0", "--prefill-chunk 0: at least 1"),
        ("--steps-per-call 0", "--steps-per-call 0: at least 1"),
        ("--target T", "--target T needs --drafter"),
        ("--drafter random:x", "--drafter random:x: give a seed"),
        ("--layers 2", "--layers 2 without --pair"),
        ("--pair qwen3-8b --layers 37", "--layers 37: qwen3-8b has 36"),
        ("--pair qwen9", "--pair qwen9: use qwen3-8b, "),
        ("--pair=", "--pair '': use qwen3-8b, "),
        ("--pair qwen3-8b --block-size 4", "--pair qwen3-8b beside --block-size 4"),
        (
            "--pair qwen3-8b --drafter-dtype float8 --tensor-parallel 2",
            "beside --drafter-dtype float8: not for devices that share the pair",
        ),
    ],
)
def test_check_load_refuses(capsys, options, why):
    assert PAGE == block_attention.PAGE
    assert main(["check-load", *options.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (f"--context {MANY} --pages {MANY}", f"--context {MANY}: the pair has 2048 positions"),
        (f"--prefill-chunk {MANY}", f"--prefill-chunk {MANY}: the pair has 2048 positions"),
        (f"--batch {MANY}", f"{MANY} slots"),
        (f"--pages {MANY}", f"{MANY} pages do not fit"),
    ],
)
def test_check_load_refuses_before_it_reads_weights(capsys, monkeypatch, options, why):
    monkeypatch.setattr(check_load, "device_memory", lambda: 10**9)
    monkeypatch.setattr(check_load, "loaded", None)
    assert main(["check-load", "--dtype", "float32", *options.split()]) == 2
    assert why in capsys.readouterr().err
