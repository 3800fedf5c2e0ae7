"""Programs that are read by name: without a trace, and only where the name tells all of them."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jflash.compiled import program_names, programs, stored
from jflash.compiled.shape import Shape
from jflash.generate import generate
from jflash.proof.faults import FAULTS, planted
from jflash.serving.calls import programs as engines
from jflash.serving.engine import Engine
from jflash.serving.request import Request
from jflash.system import sources
from pallas_kernels.matmul import tiles
from pallas_kernels.matmul.few_rows import Tile
from pallas_kernels.matmul.kept.quantised import Quantised
from pallas_kernels.matmul.tiles import Product
from tests.conftest import jax_options
from tests.support.pairs import one_arithmetic, prompts, random_pair


def by_two(x):
    return 2 * x


def by_three(x):
    return 3 * x


def lower(function, size):
    return jax.jit(function, donate_argnums=0).lower(jax.ShapeDtypeStruct((size,), jnp.float32))


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Programs are kept as on a GPU, and JAX keeps none of these; all that was traced, and where
    the files are."""
    traced = []

    def settled(lower):
        traced.append(lower)
        return lower()

    monkeypatch.setattr(stored, "settled", settled)
    monkeypatch.setattr(stored, "_suits", lambda: True)
    monkeypatch.setattr(program_names, "OURS", (*program_names.OURS, "tests"))
    with jax_options(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=1e6,
    ):
        folder = tmp_path / stored.FOLDER
        yield SimpleNamespace(traced=traced, folder=folder, files=lambda: sorted(folder.iterdir()))


def call(function=by_two, size=3) -> float:
    """Runs the program once; what it takes is donated, read or compiled."""
    with ThreadPoolExecutor(1) as pool:
        program = stored.compiling(pool.submit, lower, function, size).result()
    x = jnp.full(size, 5.0)
    out = program(x)
    assert x.is_deleted()
    return float(out[-1])


def test_a_program_is_traced_once(kept):
    assert call() == call() == 10 and len(kept.traced) == 1
    assert call(size=4) == 10 and call(by_three) == 15 and len(kept.traced) == 3
    assert call(size=4) == 10 and call(by_three) == 15 and len(kept.traced) == 3
    assert len(kept.files()) == 3
    assert {f.stat().st_mode & 0o777 for f in kept.files()} == {0o600}
    assert kept.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", ["sources", "versions", "tiles", "settings", "environment"])
def test_of_other_things_it_is_another_program(kept, monkeypatch, change):
    call()
    if change == "sources":
        monkeypatch.setattr(sources, "_digest", lambda: "another")
    elif change == "versions":
        machine = program_names._machine()
        monkeypatch.setattr(program_names, "_machine", lambda: (*machine, "another"))
    elif change == "tiles":
        monkeypatch.setattr(tiles, "_preferred", {})
        tiles.prefer(Product.of("matmul", 9, 64, 64, 1), Tile(rows=16, columns=16, depth=64))
    elif change == "environment":
        monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    settings = {"jax_default_matmul_precision": "highest"} if change == "settings" else {}
    with jax_options(**settings):
        assert call() == call() == 10 and len(kept.traced) == 2 and len(kept.files()) == 2
    if change != "tiles":
        monkeypatch.undo()


@pytest.mark.parametrize("damage", ["cut", "changed", "moved", "others", "empty"])
def test_a_file_that_is_not_whole_is_none(kept, damage):
    call()
    [file] = kept.files()
    data = file.read_bytes()
    if damage == "moved":
        call(by_three)
        [other] = set(kept.files()) - {file}
        other.rename(file)  # as that of other versions, say
        kept.traced.pop()
    elif damage == "others":
        file.chmod(0o622)
    else:
        changed = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        file.write_bytes({"cut": data[:99], "changed": changed, "empty": b""}[damage])
    assert call() == 10 and len(kept.traced) == 2
    assert call() == 10 and len(kept.traced) == 2  # written whole again
    assert stat_mode(file) == 0o600


def stat_mode(file) -> int:
    return file.stat().st_mode & 0o777


def test_a_program_that_does_not_load_is_compiled(kept, monkeypatch):
    call()
    monkeypatch.setattr(stored.pickle, "loads", lambda _: 1 / 0)
    assert call() == 10 and len(kept.traced) == 2


def test_a_program_that_jax_has_read_is_not_kept(kept, monkeypatch):
    """Serialised again, it would fail when it runs."""
    lowered = lower(by_two, 3)

    def compile():
        jax.monitoring.record_event(stored.HIT)
        return lowered.compile()

    monkeypatch.setattr(stored, "settled", lambda _: SimpleNamespace(compile=compile))
    assert call() == 10 and not kept.files()
    monkeypatch.setattr(stored, "settled", lambda lower: lower())
    assert call() == 10 and len(kept.files()) == 1


def test_tiles_that_were_timed_meanwhile_give_no_file(kept, monkeypatch):
    monkeypatch.setattr(tiles, "_preferred", {})

    def settled(lower):
        tiles.prefer(Product.of("matmul", 9, 64, 64, 1), Tile(rows=16, columns=16, depth=64))
        return lower()

    monkeypatch.setattr(stored, "settled", settled)
    assert call() == 10 and not kept.files()
    assert call() == 10 and len(kept.files()) == 1


@pytest.mark.parametrize("why", ["off", "nowhere", "remote", "none", "open", "linked", "full"])
def test_elsewhere_nothing_is_kept(kept, monkeypatch, tmp_path, capsys, why):
    options = {
        "off": {"jax_enable_compilation_cache": False},
        "nowhere": {"jax_compilation_cache_dir": None},
        "remote": {"jax_compilation_cache_dir": "gs://bucket/folder"},
        "none": {"jax_compilation_cache_max_size": 0},
    }.get(why, {})
    if why == "open":
        kept.folder.mkdir(mode=0o755)
    elif why == "linked":
        (tmp_path / "real").mkdir(mode=0o700)
        kept.folder.symlink_to(tmp_path / "real")
    elif why == "full":

        def full(*_):
            raise OSError("no space left on device")

        monkeypatch.setattr(stored, "write_bytes", full)
    with jax_options(**options):
        assert call() == call() == 10 and len(kept.traced) == 2
    assert not kept.folder.exists() or not kept.files()
    assert capsys.readouterr().err.count("not this user's alone") == (why in ("open", "linked"))


def test_other_peoples_folders_and_files_are_left_alone(kept, monkeypatch):
    call()
    monkeypatch.setattr(os, "geteuid", lambda: kept.folder.stat().st_uid + 1)
    assert call() == 10 and len(kept.traced) == 2
    [file] = kept.files()
    assert stored._read(file, "a name") is None


def test_what_was_not_read_for_longest_goes_first(kept):
    call()
    [first] = kept.files()
    call(size=4)
    [second] = set(kept.files()) - {first}
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    call()  # reads the first
    room = 2 * max(f.stat().st_size for f in kept.files()) + 99
    with jax_options(jax_compilation_cache_max_size=room):
        call(by_three)
    assert first in kept.files() and second not in kept.files() and len(kept.files()) == 2


def named(function, *given):
    return program_names.name_of(function, given)


def test_a_name_tells_every_field():
    pair, shape = random_pair(), Shape.of(1, 256)
    models, params = pair.models, jax.tree.map(jax.typeof, pair.params)
    one = named(programs.lower_prefill, models, params, shape)
    assert one and one == named(programs.lower_prefill, models, params, shape)
    head = params.target["head"]
    leaf = lambda x: params._replace(target=params.target | {"head": x})  # noqa: E731
    kept = lambda group: Quantised(head, head, None, group)  # noqa: E731
    others = [
        (programs._lower_run_of, models, params, shape),
        (programs.lower_prefill, replace(models, block_size=7), params, shape),
        (programs.lower_prefill, replace(models, rows=None, sampled=True), params, shape),
        (programs.lower_prefill, one_arithmetic(pair).models, params, shape),
        (programs.lower_prefill, models.of_dtype("bfloat16"), params, shape),
        (programs.lower_prefill, models, params, shape._replace(chunk=64)),
        (programs.lower_prefill, models, leaf(head.update(weak_type=True)), shape),
        (programs.lower_prefill, models, leaf(head.update(dtype=jnp.dtype("int32"))), shape),
        (programs.lower_prefill, models, leaf(kept(16)), shape),
        (programs.lower_prefill, models, leaf(kept(32)), shape),
    ]
    assert len({one, *(named(*other) for other in others)} - {None}) == 11


def test_what_cannot_be_told_has_no_name(monkeypatch):
    models = random_pair().models

    class Own(type(models.target)):
        pass

    here = Own(models.target.config)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("model",))
    assert named(engines.run, models)
    for other in (
        replace(models, mesh=mesh),
        replace(models, target=here),
        *(planted(models, fault) for fault in FAULTS),
        lambda: None,
        functools.partial(here.best, 3),
        jnp.zeros(3),
        np.zeros(3),
        object(),
    ):
        assert named(engines.run, other) is None
    assert named(lambda: None, models) is None
    with jax.default_matmul_precision("highest"):  # for this thread alone
        assert named(engines.run, models) is None
    monkeypatch.setenv("XLA_FLAGS", "flags.txt")
    assert named(engines.run, models) is None


def test_sources_that_changed_since_the_process_began_have_no_digest(monkeypatch, tmp_path):
    file = tmp_path / "package" / "one.py"
    file.parent.mkdir()
    file.write_text("a = 1")
    monkeypatch.setattr(sources, "ROOTS", (file.parent,))
    monkeypatch.setattr(sources, "_BEGAN", sources._look())
    monkeypatch.setattr(sources, "_digest", sources._digest.__wrapped__)
    before, times = sources.digest(), file.stat()
    assert before
    file.write_text("a = 2")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had changed it
    assert sources.digest() is None
    monkeypatch.setattr(sources, "_BEGAN", sources._look())  # of another process
    assert sources.digest() not in (None, before)
    (file.parent / "two.py").write_text("")
    assert sources.digest() is None


def test_all_programs_are_read_and_their_texts_are_the_same(kept, compilations):
    pair = one_arithmetic(random_pair(intermediate_size=41))  # no other test compiles it
    asked = prompts(2, seed=1)

    def texts() -> list[list[int]]:
        engines.forget()
        programs._compiling_prefill.cache_clear()
        programs._compiling_run.cache_clear()
        alone = [one.token_ids for one in generate(pair, asked, max_new_tokens=9)]
        how = {"max_batch": 2, "max_context": 256, "prefill_chunk": 64, "kinds": ("drawn",)}
        with Engine(pair, **how) as engine:  # which run greedy requests too
            requests = [Request(prompt_ids=ids, max_tokens=9) for ids in asked]
            served = [one.token_ids for one in engine.generate(requests)]
        assert served == alone
        return alone

    first, files = texts(), kept.files()
    traced, compiled = len(kept.traced), len(compilations)
    assert traced == len(files) >= 6
    assert texts() == first
    assert len(kept.traced) == traced and kept.files() == files
    assert len(compilations) - compiled <= compiled - traced  # what has no name, such as new states
