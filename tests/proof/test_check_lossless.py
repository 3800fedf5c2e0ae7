"""check_lossless.py: the whole command, what fails it, and what it refuses."""

import json
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.bench.shapes import SHAPES
from jflash.bench.shapes.parts import ModelShape
from jflash.cli import check_lossless, main
from jflash.compiled.shape import new_state
from jflash.proof import cases as lossless_cases
from jflash.proof import check as lossless_check
from jflash.proof.lossless import CORRUPTION
from jflash.proof.pairs import PAIRS
from jflash.records.config import Drafter2Config
from tests.support.lossless_case import small_case
from tests.support.virtual_devices import result, start

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_lossless.py"


@pytest.fixture(scope="module")
def case():
    return small_case()


def run_command(capsys, *argv: str) -> tuple[int, str, str]:
    code = main.run("check-lossless", ["--pairs", "tiny-math", *argv])
    out, err = capsys.readouterr()
    return code, out, err


SMALL = (
    "--checks",
    "oracle",
    "--batches",
    "2",
    "--tokens",
    "100",
    "--min-count",
    "2",
    "--min-distinct",
    "20",
)
CAUGHT = {"pair": "small", "capacity": 4096, "splits": 4, "prompt_tokens": [9]} | {
    half: {"differences": count, "first_difference": None}
    for half, count in (("without", 0), ("with", 1))
}


@pytest.mark.long
def test_the_embedded_pair_is_lossless_here(as_users, tmp_path):
    """The whole command without options: all the bits of plain decoding, every fault caught.

    In small in test_law, by programs that are compiled soon.
    """
    file = tmp_path / "result.json"
    done = as_users(SCRIPT, "--dtype", "float32", "--json", file)
    assert done.returncode == 0, done.stderr
    found, lines = json.loads(file.read_text()), done.stdout.splitlines()
    assert json.loads(lines[-1]) == found
    assert lines[-2].startswith("LOSSLESS: ")
    assert found["failures"] == []
    (law,) = found["law"]
    assert (law["pair"], law["promised"], law["differences"]) == ("tiny-math", True, 0)
    assert law["tokens"] >= 360
    assert len(law["compared"]) == 7  # the halves among them
    for each in law["compared"]:
        assert each["compared_logits_rows"] > 100 and each["compared_kv_rows"] > 400
    assert [fault["caught"] for fault in law["faults"]] == [True] * 4


DEVICES = """
import sys
from jflash.cli.main import run
sys.exit(run("check-lossless", ["--pairs", "tiny-math", "--checks", "devices", "--dtype",
                                "bfloat16", "--tensor-parallel", "1,2,4", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("here", "usual"), [(2, (2,)), (3, (2,)), (8, (2, 4))])
def test_the_usual_numbers_of_devices_are_those_that_are_here(monkeypatch, here, usual):
    """Two GPUs were refused for want of four."""
    monkeypatch.setattr(jax, "local_devices", lambda: [None] * here)
    monkeypatch.setattr(jax, "local_device_count", lambda: here)
    with pytest.raises(ValueError, match=f"over 9 devices: this host has {here}"):
        check_lossless.numbers_of_devices(Namespace(tensor_parallel=(2, 9)))
    checked = list[int]()
    monkeypatch.setattr(check_lossless, "tensor_mesh", checked.append)
    assert check_lossless.numbers_of_devices(Namespace(tensor_parallel=None)) == usual
    assert checked == [usual[-1]]


@pytest.mark.long
@pytest.mark.parametrize("form", ["", "fp8"])
def test_devices_that_share_the_embedded_pair_give_the_bits_of_one(form: str):
    """The whole command on 4 virtual devices. In small, and of each kind of layer, in
    test_tensor_parallel."""
    found = result(start(DEVICES, *(["--quantised", form] if form else [])))
    assert found.get("quantised", "") == form
    assert found["failures"] == []
    [each] = found["devices"]
    assert [x["devices"] for x in each["compared"]] == [2, 4] and each["planted"]["devices"] == 4
    assert all(x["tokens"] == x["kv_rows"] == 0 for x in each["compared"])
    assert each["planted"]["kv_rows"] > 1000


@pytest.mark.long
def test_every_drafter_is_compared_with_the_oracle(case, capsys, monkeypatch):
    """In one program: all modes equal, every acceptance length seen, the fault caught."""
    for module in (lossless_cases, lossless_check):
        monkeypatch.setattr(module, "FAULT_CAPACITY", 1024)
    monkeypatch.setattr(check_lossless, "load_case", lambda *_: case)
    code, out, _ = run_command(capsys, *SMALL)
    found = json.loads(out.splitlines()[-1])
    assert (code, found["failures"], found["differences"]) == (0, [], 0)
    assert found["tokens"] >= 100
    assert len(found["replay_histogram"]) == 8
    assert min(found["replay_histogram"]) >= 2
    (result,) = found["checks"]
    assert list(result["modes"]) == ["random drafter", "another random drafter", "replay"]
    for name, mode in result["modes"].items():
        times = result["replays"] if name == "replay" else 1
        assert mode["tokens"] == times * result["tokens"]
        assert mode["logits_rows"] == times * (result["tokens"] - result["sequences"])
    fault = found["planted_fault"]
    assert fault["without"]["differences"] == 0
    assert fault["with"]["differing_logits_rows"] > 0
    assert fault["with"]["first_difference"]["largest_difference"] > 0
    assert [w["pair"] for w in found["width_1"]] == ["small"]


def test_a_real_difference_is_printed_and_fails(case, capsys, monkeypatch):
    """One mode's target differs a little: exit code 1, and both tokens with both logits."""
    faithful = lossless_check.modes_of
    norm = case.params.target["norm"]["scale"]
    target = case.params.target | {"norm": {"scale": norm * (1 + 0.3 * jnp.arange(32) / 32)}}

    def modes_of(*args):
        for mode in faithful(*args):
            wrong = mode.name == "another random drafter"
            yield mode._replace(params=mode.params._replace(target=target)) if wrong else mode

    monkeypatch.setattr(check_lossless, "load_case", lambda *_: case)
    monkeypatch.setattr(check_lossless, "planted_fault", lambda *_: CAUGHT)
    monkeypatch.setattr(lossless_check, "modes_of", modes_of)
    code, out, _ = run_command(capsys, *SMALL, "--batches", "1,3")
    assert code == 1
    found = json.loads(out.splitlines()[-1])
    assert [c["batch"] for c in found["checks"]] == [1, 3]
    assert all(c["tokens"] >= 25 * c["batch"] for c in found["checks"])
    assert [w["batch"] for w in found["width_1"]] == [3]
    first = found["checks"][0]["first_difference"]
    assert first["mode"] == "another random drafter"
    assert "first difference: another random drafter against the oracle, sequence " in out
    tokens = [first[which]["token"] for which in ("oracle", "other")]
    for which in ("oracle", "other"):
        for token in tokens:
            assert f"{token}: {first[which]['logits'][str(token)]:.9g}" in out
    assert "FAILED: not lossless" in out
    clean = [m for n, m in found["checks"][0]["modes"].items() if n != "another random drafter"]
    assert not any(count for mode in clean for kind, count in mode.items() if "differing" in kind)


def test_a_fault_that_nobody_sees(case, monkeypatch):
    """The right attention in the fault's place shows nothing, and the check then fails (below)."""
    for module in (lossless_cases, lossless_check):  # the command above runs the real one
        monkeypatch.setattr(module, "FAULT_CAPACITY", 1024)
    monkeypatch.setattr(lossless_check, "planted", lambda models, _: models)
    fault = lossless_check.planted_fault(case, 0)
    assert fault["with"]["differences"] == fault["without"]["differences"] == 0
    assert fault["with"]["logits_rows"] > 0


def test_too_little_shown_fails():
    """Each threshold by itself, on a result that is otherwise fine."""
    found = {
        "differences": 0, "planted_fault": CAUGHT, "replay_histogram": [30, 31, 30, 99],
        "distinct_tokens": 68,
    }  # fmt: skip
    enough = Namespace(min_count=30, min_distinct=68)
    assert check_lossless.failures(found, enough) == []
    short = check_lossless.failures(found, Namespace(min_count=31, min_distinct=68))
    assert short == ["acceptance lengths seen less than 31 times: 1 (30), 3 (30)"]
    few = check_lossless.failures(found, Namespace(min_count=30, min_distinct=69))
    assert few == ["the outputs have 68 distinct tokens, less than 69"]
    fault = CAUGHT | {"without": {"differences": 5}}
    worse = check_lossless.failures(found | {"planted_fault": fault}, enough)
    assert worse == ["not lossless at capacity 4096: 5 differences from the oracle"]
    unseen = CAUGHT | {"with": {"differences": 0}}
    (blind,) = check_lossless.failures(found | {"planted_fault": unseen}, enough)
    assert blind.startswith("the planted fault was not caught")


def test_pairs_of_random_weights_are_published_shapes_with_windows_that_are_passed(monkeypatch):
    assert set(PAIRS) - {"tiny-math"} < SHAPES.keys()
    target, drafter = SHAPES["tiny-dflash2"]
    sights = (dict(window=2048), *[dict()] * (drafter.num_layers - 1))
    far = [dict(window=1024), *[dict()] * (target.num_layers - 1)]
    shape = ModelShape(target.attending(*far), drafter.attending(*sights))
    monkeypatch.setitem(SHAPES, "tiny-window", shape)
    case = lossless_cases.load_case("tiny-window", "float32", 0, {}, 1)
    made = case.models.drafter
    assert made is not None and isinstance(made.config, Drafter2Config)
    assert made.config.windows == (lossless_cases.LONGEST_PROMPT, *[None] * (len(sights) - 1))
    state = new_state(case.models, lossless_cases.case_shape(case, 1))
    assert [cache.wraps for cache in state.drafter_cache] == [True] + [False] * (len(sights) - 1)
    assert [cache.wraps for cache in state.target_cache] == [True] + [False] * (len(far) - 1)
    one, other = (p.drafter["fc"]["kernel"] for p in (case.params, case.other_drafter))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--pairs", "tiny-math,gpt"], "no pair is called 'gpt'"),
        (["--pairs", "qwen3-coder-30b"], "qwen3-coder-30b takes days on a CPU: use --pairs tiny"),
        (["--pairs", "tiny-math", "--batches", "0,2"], "--batches: '0,2' is no list"),
        (["--pairs", "tiny-math", "--batches", "two"], "'two' is no list"),
        (["--pairs", "tiny-math", "--checks", "all"], "--checks all: of law,oracle"),
        (["--pairs", "tiny-math", "--tokens", "0"], "--tokens 0: at least 1"),
        (["--pairs", "tiny-math", "--min-count", "0"], "--min-count 0: at least 1"),
        (["--pairs", "tiny-math", "--seed", "-1"], "seed -1"),
        (["--pairs", "tiny-math", "--overwrite"], "--overwrite without --json"),
        (["--pairs", "tiny-math", "--json", "/nowhere/result.json"], "cannot write /nowhere"),
        (["--pairs", "tiny-math", "--attention-backend", "magic"], "no backend 'magic'"),
        (
            ["--pairs", "tiny-math", "--dtype", "bfloat16", "--matmul-backend", "canonical"],
            "use 'cpu'",
        ),
        (["--pairs", "tiny-math", "--heads-backend", "triton"], "this is a cpu device: use 'cpu'"),
        (["--pairs", "tiny-math", "--dtype", "float8"], "float8"),
        (["--batches", "2"], "--batches is for --checks oracle"),
        (["--checks", "ops", "--layers", "2"], "--layers is not for --checks ops"),
        (["--pairs", "tiny-math", "--layers", "2"], "--layers is for random weights"),
        (["--pairs", "qwen3-8b", "--layers", "37"], "--layers 37: qwen3-8b has 36"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, words):
    assert main.run("check-lossless", argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = [text for text in err.splitlines() if text.startswith("check_lossless.py: ")]
    assert len(line) == 1
    assert words in line[0]


def test_the_default_amount_shows_every_length_a_thousand_times():
    """Drawn with the corruption's own law: the rarest length, with the replays that are planned."""
    replays = lossless_check.replays_needed(100_000, 16, 1000)
    assert replays <= 8
    rng = np.random.default_rng(0)
    right = rng.random((100_000, 15)) >= CORRUPTION
    lengths = 1 + np.cumprod(right, axis=1).sum(axis=1)
    steps = np.searchsorted(np.cumsum(lengths), 100_000) * 0.95  # the rest ends sequences
    share = np.bincount(lengths, minlength=17)[1:] / len(lengths)
    assert replays * steps * share.min() > 1000
