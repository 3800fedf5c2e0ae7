"""The memory budget: exact where it can be, an upper estimate of the rest, and what fits it."""

import functools
import json
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jflash import memory
from jflash.bench.shapes import SHAPES, quantised
from jflash.cli import generate as cli
from jflash.cli import main
from jflash.compiled.programs import run
from jflash.compiled.shape import Shape, capacity_for, make_request, new_state
from jflash.devices.backends import with_backends
from jflash.io import load_pair
from jflash.memory import (
    check_memory,
    device_memory,
    largest_that_fit,
    memory_budget,
    shape_for,
)
from jflash.models.decoder import Target
from jflash.models.dflash import Drafter
from jflash.models.params import decoding_params
from jflash.pair import Models, Params
from jflash.prefill import prefill
from jflash.records.decoding import Decoding
from jflash.records.kernels import Kernels
from jflash.temporaries import WORKSPACE
from tests.conftest import ON_GPU, jax_options
from tests.support.described_gpu import H200, compile_for, device_mesh
from tests.support.small_checkpoints import edit_config, make_pair

COMPILED_FULLY = True  # its temporaries are what is looked at
GB = 10**9


def published(
    name: str, layers: int | None = None, backend: str = "xla", dtype: str = "bfloat16"
) -> Models:
    """Models of a published shape, or only the first layers of them."""
    target, drafter = SHAPES[name]
    if layers is not None:
        ids = tuple(range(layers))
        target = replace(target, layers=target.layers[:layers])
        drafter = replace(
            drafter,
            layers=drafter.layers[:layers],
            num_target_layers=layers,
            target_layer_ids=ids,
        )
    models = Models(Target(target), Drafter(drafter), drafter.block_size, Kernels(backend))
    return models.of_dtype(dtype)


def without_drafter(models: Models) -> Models:
    return models.plain()


def sized(batch: int = 1, capacity: int = 2048) -> Shape:
    return Shape(batch, capacity, 128, 16)


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


PUBLISHED = [  # parameters as their model cards give them
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-4b", 4_022_468_096),
    ("llama-3.1-8b", 8_030_261_248),
    ("qwen3-coder-30b", 30_532_122_624),
]


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED)
def test_weights_of_published_models(name, parameters):
    models = published(name)
    assert memory_budget(without_drafter(models), sized()).weights == 2 * parameters
    models = models.of_dtype("float32")
    assert memory_budget(without_drafter(models), sized()).weights == 4 * parameters


def test_the_drafter_and_its_context_kernel_count():
    models = published("qwen3-8b")
    extra = (
        memory_budget(models, sized()).weights
        - memory_budget(without_drafter(models), sized()).weights
    )
    context = 5 * 2 * 8 * 128 * 4096 * 2  # keys and values of five layers, once more
    assert 2.09 * GB < extra - context < 2.11 * GB


@pytest.mark.parametrize(("batch", "capacity"), [(1, 2048), (8, 2048), (3, 40960)])
def test_caches_of_a_published_pair(batch, capacity):
    got = memory_budget(published("qwen3-8b"), sized(batch, capacity)).caches
    slots = batch * capacity * (36 + 5) * 2 * 8 * 128 * 2
    assert slots < got < 1.001 * slots + 1000  # and the tokens


def windowed(models: Models, *windows: int | None) -> Models:
    """The same pair with these windows in the drafter's layers."""
    assert models.drafter is not None
    sights = [dict(window=w, causal=w is not None) for w in windows]
    return replace(models, drafter=Drafter(models.drafter.config.attending(*sights)))


def test_a_window_takes_a_ring_however_long_the_context():
    full, slot = published("qwen3-8b"), 2 * 8 * 128 * 2  # bytes of a layer's slot
    mixed = windowed(full, 2048, 2048, 2048, 2048, None)
    for batch, capacity in [(1, 4096), (2, 40960)]:
        shape = sized(batch, capacity)
        saved = memory_budget(full, shape).caches - memory_budget(mixed, shape).caches
        ring = 2112  # 2048 + 15, rounded up to 64
        assert saved == batch * 4 * (capacity - ring) * slot
    short = sized(1, 2048)  # of which nothing is ever outside the window
    assert memory_budget(mixed, short) == memory_budget(full, short)


def test_rings_alone_keep_the_drafters_part_as_it_is():
    models = windowed(published("qwen3-8b", backend="mosaic_gpu"), *[2048] * 5)
    plain = without_drafter(models)
    taken = [
        memory_budget(models, sized(1, capacity)).caches
        - memory_budget(plain, sized(1, capacity)).caches
        for capacity in (4096, 40960)
    ]
    assert taken[0] == taken[1] == 5 * 2112 * 2 * 8 * 128 * 2


def test_the_budget_is_what_a_loaded_pair_takes(tmp_path):
    pair = load_pair(*make_pair(tmp_path), dtype="float32")
    shape = sized(3, 512)
    budget = memory_budget(pair.models, shape)
    assert budget.weights == bytes_of(pair.params)
    assert budget.caches == bytes_of(new_state(pair.models, shape))
    assert budget.total == budget.weights + budget.caches + budget.temporaries


def abstract(models: Models) -> Params:
    """The shapes of what a pair, or a target alone, decodes with."""

    def shapes(config):
        leaves = decoding_params(config)
        return jax.tree.map(lambda leaf: leaf.struct, leaves)

    return Params(*(shapes(config) for config in models.configs))


def temporaries(models: Models, shape: Shape, compile_it, step_alone: bool = False) -> int:
    """Bytes of the larger of both programs, or of the step, as compiled."""
    params = abstract(models)
    state = jax.eval_shape(lambda: new_state(models, shape))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.random.key(0)
    request = jax.eval_shape(lambda: make_request(shape, [0], Decoding(), 0, key))
    cancel = jax.ShapeDtypeStruct((shape.batch,), jnp.bool_)
    first = functools.partial(prefill, models, (shape.chunk,))
    programs = [compile_it(functools.partial(run, models), params, state, number, cancel)]
    if not step_alone:
        programs.append(compile_it(first, params, state, number, request))
    return max(program.memory_analysis().temp_size_in_bytes for program in programs)


def for_the_cpu(function, *args):
    """What LLVM makes of the code takes no part in what is allocated."""
    soon = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, donate_argnums=1).lower(*args).compile(compiler_options=soon)


def for_an_h200(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not autotuned
        return compile_for(H200, function, *args, donate=(1,))


COMPILED = [
    *(
        pytest.param("qwen3-8b", *sizes, "bfloat16", for_an_h200, marks=pytest.mark.long)
        for sizes in ((1, 8192), (8, 1024))
    ),
    ("tiny", 1, 4096, "float32", for_the_cpu),
    ("tiny", 16, 1024, "float32", for_the_cpu),
    ("tiny-moe", 16, 1024, "float32", for_the_cpu),
    ("tiny-dflash2", 16, 1024, "float32", for_the_cpu),
    ("tiny-hybrid", 16, 1024, "float32", for_the_cpu),  # its first layer is a delta net
]


@pytest.mark.parametrize(("name", "batch", "capacity", "dtype", "compile_it"), COMPILED)
def test_temporaries_are_an_upper_estimate(name, batch, capacity, dtype, compile_it):
    models, shape = published(name, layers=1, dtype=dtype), sized(batch, capacity)
    used = temporaries(models, shape, compile_it)
    estimate = memory_budget(models, shape).temporaries
    assert used <= estimate
    if compile_it is for_an_h200:
        assert estimate - WORKSPACE <= 3 * used  # and no wild guess


@pytest.mark.parametrize(
    ("name", "width", "batch"),
    [("qwen3-8b", 1, 1), pytest.param("llama-3.1-8b", 10, 8, marks=pytest.mark.long)],
)
def test_a_step_by_kernels_needs_no_more_than_is_estimated(name, width, batch, monkeypatch):
    """As an H200 decodes, with blocks that fill no tile of rows; the prompt is left out."""
    monkeypatch.setattr("jflash.temporaries._prefill_bytes", lambda *_: 0)
    models = replace(published(name, layers=1), drafter=None, block_size=width)
    models = with_backends(models, "bfloat16", device_mesh(H200).devices.flat[0])
    shape = sized(batch, 8192)
    used = temporaries(models, shape, for_an_h200, step_alone=True)
    assert 0 < used <= memory_budget(models, shape).temporaries


def test_kernels_need_less_than_einsums():
    shape = sized(8, 8192)
    einsums, kernels = (
        memory_budget(published("qwen3-8b", backend=backend), shape)
        for backend in ("xla", "mosaic_gpu")
    )
    assert kernels.temporaries < 0.2 * einsums.temporaries
    assert kernels[:2] == einsums[:2]


def test_gpt_oss_120b_fits_an_h200_with_its_experts_kept():
    """Codes of one byte; experts that no kernel reads as codes are made whole, or one at a time."""
    config = quantised(SHAPES["gpt-oss-120b"].target, "mxfp4")
    whole, shape = published("gpt-oss-120b"), sized(1, 8192)
    kept = replace(whole, target=Target(replace(config, dtype="bfloat16")))
    assert memory_budget(whole, shape).weights > 230 * GB
    kernels = with_backends(kept, "bfloat16", device_mesh(H200).devices.flat[0])
    assert memory_budget(kernels, shape).total < 0.92 * H200.memory
    largest = 2 * (2880 * 5760 * 4)  # bytes of two experts' first products in float32
    by_xla = [memory_budget(models, shape).temporaries for models in (whole, kept)]
    assert by_xla[1] - by_xla[0] == 128 * largest
    by_cpu = [replace(m, kernels=m.kernels._replace(experts="cpu")) for m in (whole, kept)]
    by_cpu = [memory_budget(models, shape).temporaries for models in by_cpu]
    assert by_cpu[1] - by_cpu[0] == largest


@pytest.mark.parametrize("limit", [22, 40, 100])
@pytest.mark.parametrize("batch", [1, 8, 100])
def test_the_largest_that_fit_do_and_nothing_larger_does(limit, batch):
    models, context, limit = published("qwen3-8b", backend="mosaic_gpu"), 9000, limit * GB

    def fits(batch: int, context: int, prompt: int) -> bool:
        new = context - prompt
        capacity = capacity_for(prompt, new, models.block_size, 128)
        shape = sized(batch, capacity)
        try:
            check_memory(models, shape, context, limit)
        except ValueError:
            return False
        return True

    largest = largest_that_fit(models, shape_for(models, sized(), batch, context), context, limit)
    n, b = largest
    if n is None:
        assert not fits(batch, 1, 1)
    else:
        assert fits(batch, n, 1) and fits(batch, n, n)
        positions = models.target.config.max_position_embeddings
        assert n == positions or not (fits(batch, n + 1, 1) or fits(batch, n + 1, n))
    if b is None:
        assert not fits(1, context, 1)
    else:
        assert b <= batch and fits(b, context, 7)
        assert b == batch or not fits(b + 1, context, 7)


def test_the_cases_above_are_of_every_kind():
    models = published("qwen3-8b", backend="mosaic_gpu")
    found = [
        largest_that_fit(models, shape_for(models, sized(), batch, 9000), 9000, limit * GB)
        for batch in (1, 8, 100)
        for limit in (22, 40, 100)
    ]
    contexts, batches = zip(*found, strict=True)
    assert None in contexts and 40960 in contexts and len(set(contexts)) > 3
    assert {1, 8} < set(batches) and max(batches) < 100


def test_the_error_says_what_is_missing_and_what_fits():
    models, context = published("qwen3-8b"), 40000
    shape = shape_for(models, sized(), 8, context)
    budget = memory_budget(models, shape)
    with pytest.raises(ValueError) as error:
        check_memory(models, shape, context, 50 * GB)
    largest = largest_that_fit(models, shape, context, 50 * GB)
    missing = f"{(budget.total - 50 * GB) / GB:.3g} GB more than the 50 GB"
    for part in (
        *("batch 8 with 40000 tokens", "weights 18.6 GB", missing),
        f"at batch 8 at most {largest.context} tokens",
        f"at 40000 tokens of context at most batch {largest.batch} fits",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="the weights by themselves do not fit"):
        check_memory(models, shape, context, 18 * GB)
    check_memory(models, shape, context, None)


def test_a_cpu_says_what_is_free():
    free = device_memory()
    assert free is not None and 2**20 < free < 2**50


# generate.py


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """With room for long texts."""
    made = make_pair(tmp_path_factory.mktemp("pair"))
    for folder in made:
        edit_config(folder, max_position_embeddings=4000)
    return made


def test_generate_refuses_before_weights_are_read(pair, capsys, monkeypatch, tmp_path):
    models = load_pair(*pair, dtype="float32").models
    limit = memory_budget(models, sized(2, 1024)).total
    monkeypatch.setattr(memory, "device_memory", lambda: limit)
    asked, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(json.dumps({"prompt_ids": [1, 2, 3]}) + "\n" + '{"prompt_ids": [4]}\n')

    def call(new: int) -> tuple[int, str]:
        argv = ["--target", str(pair.target), "--drafter", str(pair.drafter), "--overwrite"]
        argv += ["--prompts", str(asked), "--output", str(output), "--max-new-tokens", str(new)]
        code = main.run("generate", argv)
        return code, capsys.readouterr().err

    largest = 1024 - models.block_size
    weights = pair.target / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"not reached")
    for new in (largest - 3 + 1, 3000):
        code, err = call(new)
        assert code == 2 and err.count("\n") == 1 and not output.exists()
        assert f"at batch 2 at most {largest} tokens of context fit" in err
        assert f"batch 2 with {new + 3} tokens" in err
    assert f"at {new + 3} tokens of context no batch fits" in err
    weights.write_bytes(whole)
    monkeypatch.setattr(cli, "generate", only_look(models, 1024))
    with jax_options(jax_disable_most_optimizations=not ON_GPU):
        code, err = call(largest - 3)
    assert code == 0, err
    assert len(output.read_text().splitlines()) == 2


def only_look(models: Models, expected: int):
    """Decodes little, in the caches that were asked for."""
    honest = cli.generate

    def short(pair, prompts, decodings, *, capacity, **rest):
        assert capacity == expected
        return honest(pair, prompts, decodings, capacity=capacity, max_new_tokens=3, **rest)

    return short
