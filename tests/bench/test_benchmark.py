"""The benchmark: what it counts and what it times."""

import json
import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflash.bench.floors import Rates, add, draft_work, floor_seconds, verify_work
from jflash.bench.shapes import SHAPES, model_shape
from jflash.bench.steps import case as benchmark_case
from jflash.bench.steps.case import Task, run_task, save_pair
from jflash.bench.steps.report import case_text, collect
from jflash.bench.steps.time import busy_state, rewound, time_run, window_around
from jflash.compiled.programs import compile_run
from jflash.compiled.shape import Shape
from jflash.devices.backends import with_backends
from jflash.devices.structs import param_structs
from jflash.generate import Pair
from jflash.io import PairFiles, load, load_pair
from jflash.layers.cache import DeltaCache
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter, with_context_kernel
from jflash.models.params import abstract_params, random_weights
from jflash.pair import Models, Params
from jflash.speculative import speculative_step
from jflash.state import State
from jflash.system.embedded import EMBEDDED_PAIR
from pallas_kernels.gated_delta import CHUNK
from pallas_kernels.matmul.kept.fragments import Fragments
from tables.cells import Result
from tables.documents import with_tables
from tests.support import described_gpu
from tests.support.described_gpu import device_mesh
from tests.support.small_checkpoints import make_pair

H200 = Rates(4.17e12, 790e12)
TASK = Task(
    shape="tiny", target=None, drafter=None, batch=2, context=200, capacity=512, widths=(4,),
    only_step=False, dtype="float32", backends={}, steps=9, repeats=2, prompts=(),
    max_new_tokens=12, stop_token_ids=(),
)  # fmt: skip


def tiny() -> tuple[Models, Params]:
    shape = model_shape("tiny")
    models = Models(Target(shape.target), Drafter(shape.drafter), shape.drafter.block_size)
    target, drafter = random_weights(list(shape))
    return models, Params(target, with_context_kernel(models.drafter, drafter))


def test_a_real_pairs_weights_lie_as_the_named_kernels_read_them(monkeypatch):
    """By itself an H200 has a float8 drafter's in fragments, for the canonical products alone."""
    [h200] = device_mesh(described_gpu.H200).devices.flat

    def suited(models: Models, dtype: str, _, **asked: str) -> Models:
        return with_backends(models, dtype, h200, **asked)

    def loaded(files: PairFiles) -> Pair:
        return Pair(files.models, param_structs(files.models))

    for module in (load, benchmark_case):
        monkeypatch.setattr(module, "with_backends", suited)
    monkeypatch.setattr(benchmark_case, "load_weights", loaded)
    pair = {name: str(EMBEDDED_PAIR / name) for name in ("target", "drafter")}
    own = dict(shape=None, batch=1, context=20, capacity=256, dtype="bfloat16")
    task = replace(TASK, **pair, **own, drafter_dtype="float8")
    for backends, lie in (({}, True), ({"matmul_backend": "xla"}, False)):
        models = benchmark_case.task_models(replace(task, backends=backends))
        window = window_around(task.context, task.capacity, models.block_size, 1, 1)
        drafter = benchmark_case.prepare(task, models, Shape.of(1, 256), window)[1].drafter
        assert jax.tree.structure(drafter) == jax.tree.structure(param_structs(models).drafter)
        assert isinstance(drafter["context_kernel"], Fragments) == lie


def in_bfloat16(name: str):
    return [replace(config, dtype="bfloat16") for config in model_shape(name)]


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_shapes_have_the_published_sizes(name, entries):
    target = model_shape(name).target
    assert sum(x.size for x in jax.tree.leaves(abstract_params(target))) == entries


@pytest.mark.parametrize("name", SHAPES)
def test_every_matrix_is_counted_as_often_as_it_is_applied(name):
    target, drafter = in_bfloat16(name)
    target = replace(target, layers=target.layers[:6])  # of every kind that the shape has
    leaves = jax.tree.leaves(abstract_params(target))
    matrices = sum(x.size for x in leaves if len(x.stored) == 2 and x.axes[0] != "experts")
    matrices -= 0 if target.tie_embeddings else target.vocab_size * target.hidden_size
    experts = sum(x.size for x in leaves if x.axes[0] == "experts" and len(x.stored) == 3)
    shares = {moe.experts_per_token / moe.num_experts for moe in target.experts} or {0}
    (chosen,) = shares
    work = verify_work(target, 2, 4, 100.0)
    read = 1 - (1 - chosen) ** 8  # by one of 8 rows or more
    assert work.weight_bytes == pytest.approx(2 * (matrices + read * experts), rel=1e-12)
    assert work.weight_operations == pytest.approx(2 * 8 * (matrices + chosen * experts), rel=1e-12)

    leaves = jax.tree.leaves(abstract_params(drafter))
    codebooks = drafter.vocab_size, getattr(drafter, "selector_rank", 0)  # looked up, not applied
    matrices = sum(x.size for x in leaves if len(x.stored) == 2 and x.shape != codebooks)
    head = target.vocab_size * target.hidden_size
    twice = drafter.hidden_size * sum(mixer.kv_width for mixer in drafter.mixers)
    assert draft_work(drafter, 1, 8, 100.0).weight_bytes == 2 * (matrices + head + twice)


def test_the_floors_of_the_goals():
    target, drafter = in_bfloat16("qwen3-8b")

    def floor(batch: int, context: float) -> float:
        work = add(verify_work(target, batch, 16, context), draft_work(drafter, batch, 16, context))
        return 1e3 * floor_seconds(work, H200)

    found = [floor(1, 1024.0), floor(8, 1024.0), floor(32, 1024.0), floor(1, 32768.0)]
    np.testing.assert_allclose(found, [4.5, 4.8, 13.3, 5.8], atol=0.15)
    plain = 1e3 * floor_seconds(verify_work(target, 1, 1, 1024.0), H200)
    assert plain == pytest.approx(3.66, abs=0.03)


def test_behind_a_window_nothing_is_read():
    full, near = (in_bfloat16(name)[1] for name in ("qwen3-8b", "qwen3-8b-window"))
    for context, read in ((1000.0, 5 * 1000), (32768.0, 4 * 2047 + 32768)):
        work = draft_work(near, 2, 16, context)
        written = draft_work(full, 2, 16, 0.0).attention_bytes
        assert work.attention_bytes - written == 2 * read * 2 * 8 * 128 * 2
        assert work.weight_bytes == draft_work(full, 2, 16, context).weight_bytes


def test_operations_agree_with_the_compilers_count():
    """XLA's einsum attends to every slot, so the context counted here is the whole capacity."""
    models, params = tiny()
    window = window_around(200, 512, 8, 4, 1)
    state = busy_state(models, Shape(2, 512, 128, 16), window)
    step = jax.jit(lambda p, s: speculative_step(models, p, s)).lower(params, state).compile()
    target, drafter = models.target.config, models.drafter.config
    work = add(
        verify_work(target, 2, 8, 512.0 - 8), draft_work(drafter, 2, 8, 512.0 - 8)
    )  # fmt: skip
    assert work.operations == pytest.approx(step.cost_analysis()["flops"], rel=0.1)


def test_the_window_is_centred_or_as_close_as_the_capacity_allows():
    window = window_around(1024, 2048, 16, 65, 3)
    assert window.context == 1024
    full = window_around(32768, 32768, 16, 64, 3)
    assert full.start + 64 + 16 == 32768 and full.context == full.start - 1 + 31.5
    with pytest.raises(ValueError, match="64 steps at context 8 do not fit"):
        window_around(8, 256, 16, 64, 1)


def test_the_timed_steps_run_at_the_context_over_full_caches():
    models, params = tiny()
    window = window_around(200, 512, 8, 9, 2)
    state = busy_state(models, Shape(2, 512, 128, 16), window)
    for leaf in jax.tree.leaves((state.target_cache, state.drafter_cache)):
        assert abs(float(jnp.std(leaf)) - 1) < 0.02 and not (leaf == 0).any()
    before = jax.tree.map(np.asarray, state.target_cache)
    compiled, _ = compile_run(models, params, state)
    seconds, state = time_run(compiled, params, state, window)
    assert len(seconds) == 2 and all(s > 0 for s in seconds)
    assert state.sequences.length.tolist() == [window.start + 9] * 2
    assert state.sequences.acceptance_lengths[:, :9].tolist() == [[1] * 9] * 2
    written = np.array([np.abs(a - b).max((0, 2, 3)) > 0 for a, b in
                        zip(jax.tree.leaves(before), jax.tree.leaves(state.target_cache),
                            strict=True)])  # fmt: skip
    slots = np.flatnonzero(written.all(0))
    assert slots.tolist() == list(range(window.start - 1, window.start - 1 + 9 + 8 - 1))
    assert window.context == np.mean(range(window.start - 1, window.start - 1 + 9))


def test_a_delta_nets_rows_are_a_models_and_begin_where_a_step_leaves_them():
    models = Models(Target(model_shape("tiny-hybrid").target), None, 8)
    window = window_around(68, 256, 8, 9, 1)
    state = busy_state(models, Shape(2, 256, 64, 16), window)
    assert window.start == 65  # its step begins at position 64, the last one began at 63
    later = State(state.sequences, tuple(map(_further, state.target_cache)), ())
    for one in (state, rewound(later, window)):
        assert one.target_cache[0].memory.base.tolist() == [48, 48]
    k, _, g, beta = state.target_cache[0].memory.rows
    np.testing.assert_allclose(jnp.linalg.norm(k, axis=-1), 1, rtol=1e-5)
    assert (g < 0).all() and (beta > 0).all() and (beta < 1).all()


def _further(cache):
    if not isinstance(cache, DeltaCache):
        return cache
    return cache._replace(memory=cache.memory._replace(base=cache.memory.base + 2 * CHUNK))


def test_random_weights_are_no_zeros_and_the_same_each_time():
    configs = [replace(config, dtype="bfloat16") for config in model_shape("tiny")]
    first, again = random_weights(configs), random_weights(configs)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert a.dtype == jnp.bfloat16 and bool((a == b).all())
        if a.ndim == 2:
            assert float(jnp.std(a.astype(jnp.float32))) == pytest.approx(0.02, rel=0.1)
        else:
            assert bool((a == 1).all())


def test_a_case_and_the_saved_pair_hold_the_same_weights(tmp_path):
    task = save_pair(TASK, tmp_path)
    loaded = load_pair(task["target"], task["drafter"], dtype="float32")
    target, drafter = random_weights(list(model_shape("tiny")))
    stored = {name: loaded.params.drafter[name] for name in drafter}  # no context_kernel
    for a, b in zip(
        jax.tree.leaves((loaded.params.target, stored)),
        jax.tree.leaves((target, drafter)),
        strict=True,
    ):
        assert bool((a == b).all())
    assert len(task["prompts"][0]) + (task["max_new_tokens"] - 1) // 2 == TASK.context


@pytest.fixture(scope="module")
def case() -> dict:
    return run_task("time", replace(TASK, prefill=(40, 200), prefill_chunk=64))


def test_a_case_of_random_weights(case):
    assert case["shape"] == "tiny" and case["weights"].startswith("random")
    for name in ("plain", "verify", "draft", "step"):
        part = case[name]
        assert part["share_of_floor"] == pytest.approx(part["floor_ms"] / part["ms"])
    assert case["draft"]["ms"] == pytest.approx(case["step"]["ms"] - case["verify"]["ms"])
    assert case["draft"]["floor_ms"] < case["step"]["floor_ms"]
    assert case["draft"]["share_of_step"] == pytest.approx(case["draft"]["ms"] / case["step"]["ms"])
    assert [row["block_size"] for row in case["widths"]] == [4, 8]
    assert case["widths"][1]["ms"] == case["step"]["ms"]
    assert case["compile_seconds"]["from_nothing"] > 0
    entries = sum(x.size for c in model_shape("tiny") for x in jax.tree.leaves(abstract_params(c)))
    assert case["memory"]["weights_bytes"] == 4 * entries
    assert case["memory"]["caches_bytes"] == 4 * (3 + 1) * 2 * 2 * 512 * 2 * 64
    steps = {name: value for name, value in case.items() if name != "prefill"}
    assert "tokens_per_second" not in json.dumps(steps)
    short, long = case["prefill"]
    assert (short["tokens"], long["tokens"], long["chunks"]) == (40, 200, (64,))
    assert long["ms"] == pytest.approx(statistics.median(long["ms_of_repeats"]))
    assert long["tokens_per_second"] == pytest.approx(200e3 / long["ms"])
    assert f"200 tokens by 64: {long['ms']:.1f} ms, " in case_text(case)
    shown = with_tables(
        "<!-- table: steps -->\n<!-- end table -->", [Result("a.json", result(case))]
    )
    assert f"| {case['step']['ms']:.2f} ms | {case['step']['floor_ms']:.2f} |" in shown


def test_a_real_pair_is_measured(tmp_path):
    pair = make_pair(tmp_path, monotone=True)
    task = replace(
        TASK, shape=None, target=str(pair.target), drafter=str(pair.drafter), context=100,
        capacity=256, widths=(), only_step=True, prompts=((1, 2, 3), (4, 5)), batch=2,
    )  # fmt: skip
    speed = run_task("time", task)["measured_speed"]
    assert speed["how"].startswith("measured")
    # A pair that always agrees: 12 tokens are one of the prefill, then 4 + 4 + 3.
    assert speed["new_tokens"] == 24 and speed["mean_acceptance_length"] == pytest.approx(11 / 3)
    assert speed["endings"] == {"limit": 2}
    assert speed["same_text_as_plain"] == speed["prompts"] == 2
    ratio = speed["tokens_per_second"] / speed["plain_tokens_per_second"]
    assert speed["speed_up"] == pytest.approx(ratio)


def test_a_shape_that_does_not_fit_the_memory_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(benchmark_case, "device_memory", lambda: 20 * 10**9)
    monkeypatch.setattr(benchmark_case, "measure_rates", lambda dtype: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"takes 3\d\.\d GB .* more than the 20 GB"):
        run_task("time", replace(TASK, shape="qwen3-8b", batch=1))


@pytest.mark.parametrize("stage", ["time", "warm"])
@pytest.mark.parametrize("backend", ["attention", "heads", "matmul"])
def test_a_backend_that_cannot_run_is_refused_before_anything_is_made(backend, stage, monkeypatch):
    monkeypatch.setattr(benchmark_case, "prepare", None)
    name = {"attention": "triton", "heads": "triton", "matmul": "canonical"}[backend]
    with pytest.raises(ValueError, match=f"{backend} backend '{name}' .* cpu device: use 'cpu'"):
        run_task(stage, replace(TASK, dtype="bfloat16", backends={f"{backend}_backend": name}))


def result(case: dict, device: str = "GPU", **changes) -> dict:
    return collect([case | {"device": device} | changes], None)
