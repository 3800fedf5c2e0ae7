"""scripts/bench_kernels.py without a GPU: refusals, cases and table. Times here mean nothing."""

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from jflash.bench.kernels import cases as kernel_cases
from jflash.bench.kernels.cases import Op, make_attention_case, make_case
from jflash.bench.kernels.times import COLUMNS, Case, Missing, measure, seconds_per_call, table
from jflash.cli import bench_kernels, main
from pallas_kernels.block_attention import triton
from pallas_kernels.shapes import (
    GATED_DELTA,
    GROUPED_MATMUL,
    LAYER,
    MATMUL,
    BlockShape,
    DeltaShape,
    GroupedShape,
    LayerShape,
    MatmulShape,
)
from tests.support.refusals import one_line

TINY = BlockShape(B=2, T=4, S=64, N=2, K=1, H=64, context=37)
QUICK = {"bandwidth": 1e9, "rounds": 1, "round_seconds": 1e-4}


@pytest.fixture
def few_copies(monkeypatch):
    monkeypatch.setattr("jflash.bench.kernels.times.MOST_COPIES", 2)


def tiny_case(shape: BlockShape = TINY, wrong: bool = False) -> Case:
    """The Triton kernel through its interpreter, or with a scale that is not the op's."""
    attend = functools.partial(
        triton.block_attention,
        causal=True, window=shape.window, scale=shape.H**-0.5 * (2 if wrong else 1),
        interpret=True,
    )  # fmt: skip
    calls = {"triton": lambda q, numbers, k, v: attend(q, k, v, *numbers)}
    return make_attention_case(("block_attention", "tiny", "float32", "triton"), shape, calls)


def test_a_case_becomes_a_row_and_a_line(few_copies):
    case = tiny_case()
    assert case.bytes == 4 * 2 * (2 * (37 + 4) * 64 + 2 * 4 * 2 * 64)
    row = measure(case, **QUICK)
    assert row["error"] < 1e-5 and row["us"] > 0
    assert row["share"] == pytest.approx(case.bytes / row["us"] * 1e6 / 1e9)
    assert row["note"] == "partly from the L2 cache"
    head, line = table([row]).split("\n")
    assert head == COLUMNS
    for part in ("block_attention", "tiny", "float32", "triton", f"{row['us']:.1f}"):
        assert part in line


def test_a_wrong_kernel_shows_in_the_error(few_copies):
    assert measure(tiny_case(wrong=True), **QUICK)["error"] > 0.01
    nan = tiny_case()._replace(error=lambda _: float("nan"))
    row = measure(nan, **QUICK)
    assert row["error"] is None and "not finite" in table([row])


def test_a_window_reads_less():
    assert tiny_case(TINY._replace(window=8)).bytes == 4 * 2 * (2 * (8 + 3) * 64 + 2 * 4 * 2 * 64)


def test_the_fastest_of_several_ways_is_reported(few_copies):
    case = tiny_case()._replace(
        calls={
            "slow": lambda q, _, k, v: jax.lax.fori_loop(0, 3000, lambda i, q: jnp.sin(q), q),
            "fast": lambda q, _, k, v: q + 1,
        },
        error=lambda _: 0.0,
    )
    assert measure(case, **QUICK)["note"].endswith("fast")


def test_time_is_per_call():
    """Twice the inputs, twice the calls of a turn, the same time a call."""
    case = tiny_case()
    inputs = [case.make_inputs(i) for i in range(4)]

    def call(q, _, k, v):
        return jax.lax.fori_loop(0, 2000, lambda i, q: jnp.sin(q), q)

    one, four = (
        min(seconds_per_call(call, case, some, 3, 0.02) for _ in range(3))
        for some in (inputs[:1], inputs)
    )
    assert one / 2.5 < four < one * 2.5


def test_what_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    flash = make_case("block_attention", "qwen3-b1-2k", "bfloat16", "flash-attn3")
    rows = [measure(flash, **QUICK)]
    if jax.default_backend() == "cpu":
        kernel = make_case("block_attention", "qwen3-b1-2k", "bfloat16", "triton")
        assert isinstance(kernel, Missing) and "this is a cpu device" in kernel.why
        gemm = make_case("matmul", "qwen3-8b-qkv-m16", "bfloat16", "canonical")
        assert isinstance(gemm, Missing) and "9.x" in gemm.why
        rows += [measure(kernel, **QUICK), measure(gemm, **QUICK)]
    text = table(rows)
    assert "flash-attn3    not installed" in text
    assert all(row["why"] in text and "us" not in row for row in rows)


def test_a_case_that_fails_is_a_row(few_copies):
    def refuse(*_):
        raise ValueError("a cache of 70 slots:\nnot so")

    row = measure(tiny_case()._replace(calls={"triton": refuse}), **QUICK)
    assert row["why"] == "a cache of 70 slots: not so"


@pytest.mark.parametrize("op,N", [("matmul", 32), ("gate_up", 64), ("head_argmax", 40)])
def test_matrix_products_have_cases(op, N, monkeypatch, few_copies):
    monkeypatch.setitem(MATMUL, "tiny", MatmulShape(op, 3, 64, N))
    case = make_case("matmul", "tiny", "float32", "xla")
    assert isinstance(case, Case)
    out = {"matmul": 3 * 32, "gate_up": 3 * 32, "head_argmax": 0}[op]
    assert case.bytes == 4 * (3 * 64 + 64 * N + out)
    assert measure(case, **QUICK)["error"] <= 1e-5
    assert case.calls["xla"](case.x, (), *case.make_inputs(0)).shape == case.x.shape


@pytest.mark.parametrize("op,columns", [("grouped_matmul", 32), ("grouped_gate_up", 16)])
def test_grouped_products_have_cases(op, columns, monkeypatch, few_copies):
    """Only experts that have rows are counted as read."""
    monkeypatch.setitem(GROUPED_MATMUL, "tiny", GroupedShape(op, 3, 2, 40, 64, 32))
    case = make_case("grouped_matmul", "tiny", "float32", "xla")
    assert isinstance(case, Case)
    (sizes,) = case.numbers
    used = int((sizes > 0).sum())
    assert int(sizes.sum()) == 6 and 2 <= used <= 6
    assert case.bytes == 4 * (6 * 64 + used * 64 * 32 + 6 * columns)
    assert measure(case, **QUICK)["error"] <= 1e-5
    if jax.default_backend() == "cpu":
        kernel = make_case("grouped_matmul", "tiny", "bfloat16", "triton")
        assert isinstance(kernel, Missing) and "needs an NVIDIA GPU" in kernel.why


def test_the_products_of_a_layer_have_cases(monkeypatch, few_copies):
    monkeypatch.setitem(LAYER, "tiny", LayerShape(3, 64, 32, 96, 128))
    case = make_case("layer", "tiny", "float32", "xla")
    assert isinstance(case, Case)
    weights = 64 * 96 + 32 * 64 + 64 * 256 + 128 * 64
    assert case.bytes == 4 * (weights + 3 * (96 + 32 + 5 * 64 + 2 * 128))
    assert measure(case, **QUICK)["error"] <= 1e-5
    if jax.default_backend() == "cpu":
        kernel = make_case("layer", "tiny", "bfloat16", "canonical")
        assert isinstance(kernel, Missing) and "needs an NVIDIA GPU" in kernel.why


@pytest.mark.parametrize(("T", "ahead", "moves"), [(16, 20, 16), (1, 8, 0)])
def test_the_delta_rule_has_cases_that_continue_each_state(
    T, ahead, moves, monkeypatch, few_copies
):
    monkeypatch.setitem(GATED_DELTA, "tiny", DeltaShape(2, T, 2, 4, 16, 32, ahead))
    case = make_case("gated_delta", "tiny", "bfloat16", "xla")
    assert isinstance(case, Case) and case.where[2] == "float32"
    kept = 2 * 16 + 4 * 32 + 2 * 4
    rows = T * (2 * 16 + 4 * 32) + (2 * T + ahead) * kept
    assert case.bytes == 4 * 2 * (2 * 4 * 16 * 32 + rows)
    assert measure(case, **QUICK)["error"] <= 1e-5
    inputs = [case.make_inputs(i) for i in range(2)]
    one = case.calls["xla"](case.x, (), *inputs[0])
    both = case.calls["xla"](one, (), *inputs[1])
    assert jax.tree.map(jnp.shape, both) == jax.tree.map(jnp.shape, case.x)
    assert (one.q != case.x.q).any()  # the next call waits for this one
    assert [m.base.tolist() for m in one.memories] == [[0, 0], [moves, moves]]
    for before, after in zip(case.x.memories, both.memories, strict=True):
        assert (after.base == before.base + moves).all()
        assert jnp.isfinite(after.state).all() and (after.rows.v != before.rows.v).any()
    if jax.default_backend() == "cpu":
        kernel = make_case("gated_delta", "tiny", "bfloat16", "triton")
        assert isinstance(kernel, Missing) and "needs an NVIDIA GPU" in kernel.why


def test_the_last_line_is_json_and_goes_to_the_file(monkeypatch, capsys, tmp_path, few_copies):
    def make(where, _):
        if where[3] != "triton":
            raise ValueError("not here")
        return tiny_case()

    tiny = Op({"tiny": TINY}, ("triton", "flash-attn3"), make)
    monkeypatch.setitem(kernel_cases.OPS, "tiny", tiny)
    monkeypatch.setattr(
        bench_kernels, "measure_rates", lambda dtype: {"bytes_per_second": 1e9, "array_bytes": 5}
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # else it refuses, as below
    file = tmp_path / "kernels.json"
    argv = ["--op", "tiny", "--dtype", "float32", "--rounds", "1", "--json", str(file)]
    assert main.run("bench-kernels", argv) == 0
    last = capsys.readouterr().out.strip().split("\n")[-1]
    assert file.read_text().strip() == last
    result = json.loads(last)
    assert {"device", "versions", "date", "bytes_per_second", "rows"} <= set(result)
    assert [row["backend"] for row in result["rows"]] == ["triton", "flash-attn3"]
    assert result["rows"][0]["share"] > 0 and result["rows"][1]["why"] == "not here"
    assert "missing_cases" not in result

    again = [*argv, "--overwrite"]
    monkeypatch.setattr(bench_kernels, "row_text", lambda row: row["why"])  # the first has none
    with pytest.raises(KeyError):
        main.run("bench-kernels", again)
    assert json.loads(file.read_text()) == result  # cut off before any row was whole
    monkeypatch.setattr(bench_kernels, "row_text", lambda row: str(1 / ("us" in row)))
    with pytest.raises(ZeroDivisionError):
        main.run("bench-kernels", again)
    cut = json.loads(file.read_text())
    assert (len(cut["rows"]), cut["missing_cases"]) == (1, 1)
    assert main.run("bench-kernels", argv) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv,message",
    [
        ([], "kernels run on a GPU"),
        (["--op", "softmax"], "no op is called 'softmax': use block_attention, matmul"),
        (["--shape", "qwen9"], "no shape is called 'qwen9': use corner-narrowest"),
        (["--op", "matmul", "--shape", "qwen3-b1-2k"], "no shape is called 'qwen3-b1-2k'"),
        (
            ["--backend", "cudnn"],
            "no backend is called 'cudnn': use flash-attn3, mosaic_gpu",
        ),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--overwrite"], "--overwrite without --json"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_refusals_are_one_line(argv, message, capsys):
    if not argv and jax.default_backend() == "gpu":
        pytest.skip("that refusal is for machines without a GPU")
    assert main.run("bench-kernels", argv) == 2
    one_line(capsys, message)
