"""The tests leave the user's caches alone, and what they do does not depend on them."""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

ON_GPU = Path("/dev/nvidia0").exists()
ROOT = Path(__file__).parents[1]
# XLA's older emitters of CPU code, in one part: a third less CPU for a file that compiles much; and
# vectors of 128 bits: an eighth less for a pair's programs.
# They would join bfloat16 by AVX-512's instruction for it, which takes subnormal numbers for 0.
HASTE = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_max_isa=AVX512_VNNI "
    "--xla_cpu_prefer_vector_width=128"
)
SOON = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # JAX's variable for compiling soon and badly
MOST_PROCESSES = 4  # each takes a core and up to 4.5 GB
gc.set_threshold(100_000, 20, 50)  # compiled programs are many objects, and stay
# Arrays have the shapes and dtypes that signatures name, unless JFLASH_SHAPES is 0. Other modules
# have nothing that pyright does not see, and to wrap them takes seconds of every process.
if os.environ.get("JFLASH_SHAPES") != "0":
    _SOURCES = [x for name in ("jflash", "pallas_kernels") for x in (ROOT / name).rglob("*.py")]
    _TYPED = [x for x in _SOURCES if "\nfrom jaxtyping import " in x.read_text("utf-8")]
    _NAMES = [".".join(x.relative_to(ROOT).with_suffix("").parts) for x in _TYPED]
    install_import_hook([x.removesuffix(".__init__") for x in _NAMES], "beartype.beartype")
# Processes of a run share a folder, with locks, for their caches and for those of processes that
# tests start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _FOLDER = tempfile.TemporaryDirectory(prefix="jflash-tests-")
    os.environ["XDG_CACHE_HOME"] = _FOLDER.name
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**34)  # a bound makes JAX lock the folder
jax.config.update("jax_enable_compilation_cache", False)  # in this one all is compiled
# No operation carries the lines that it comes from, which are a twentieth of a serving file's time.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# JAX's CUDA plugin is here to compile for a GPU (tests/proof/test_gates.py). Where there is none,
# every process would complain that the plugin cannot start.
if not ON_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    os.environ.setdefault("XLA_FLAGS", HASTE)


pytest_plugins = [
    f"tests.support.{x}"
    for x in ("durations", "compilations", "interpreter", "long_tests", "mappings")
]
pytest.register_assert_rewrite(
    *(f"tests.support.{x}" for x in ("attention_checks", "logits", "reference", "refusals"))
)


@pytest.hookimpl(tryfirst=True)  # before xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Processes share the files of a whole run, unless -n says how many; a file stays in one, and
    so do the files of one server.

    Most of the time goes to compiling, which keeps one core busy. A GPU's memory is for one process
    alone, and a run of files that were named has little to share, unless a mark chooses among them.
    """
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    whole = not named or config.option.markexpr
    own = hasattr(config, "workerinput") or config.option.usepdb or config.option.collectonly
    if ON_GPU or own or not whole or not config.pluginmanager.hasplugin("xdist"):
        return
    if config.option.numprocesses is None:
        # As many as cores: one more works while tests wait, for other processes and for files, but
        # compiles again what the others have, and two took less time on two cores than three.
        config.option.numprocesses = min(MOST_PROCESSES, max(2, os.cpu_count() or 1))
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests are left out of runs that choose by no mark, as .ci/run's first one."""
    if config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        """The files of tests/server go to one process, which starts one server for them."""

        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/server" if file.startswith("tests/server/") else file

    return ByFile(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A collection in a test looks at no object that was there before: an engine begins with one,
    which takes up to two seconds in a process that has compiled the programs of many files."""
    gc.freeze()


@pytest.fixture
def refused(capsys, caplog, tmp_path):
    """Runs a command that must refuse; see tests/support/refusals.py, which needs jflash."""
    from tests.support.refusals import refuser

    return refuser(capsys, caplog, tmp_path)


@contextlib.contextmanager
def jax_options(**options):
    """JAX's configuration with other values, for a while."""
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def compiled_soon(request):
    """On a CPU programs are compiled soon and badly, which is most of what the suite waits for,
    but in files that say COMPILED_FULLY: because the compiler's work is what they look at, or
    because they run long what they compile. Processes that a test starts do the same."""
    soon = not ON_GPU and not getattr(request.module, "COMPILED_FULLY", False)
    with jax_options(jax_disable_most_optimizations=soon), pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOON, str(int(soon)))
        yield


@pytest.fixture
def as_users(compiled_soon):
    """Runs Python as users do: its programs are made by XLA's own settings."""

    def run(*argv: object, path: Path = ROOT, **how) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(path)}
        environment.pop(SOON, None)
        if not ON_GPU and environment.get("XLA_FLAGS") == HASTE:
            del environment["XLA_FLAGS"]
        command = [sys.executable, *map(str, argv)]
        return subprocess.run(command, capture_output=True, env=environment, text=True, **how)

    return run


@pytest.fixture
def compiled_once():
    """What was compiled before in this run is taken from a folder, as JAX does for users: for
    tests that make the same programs of new pairs, or in other processes, again and again."""
    from jax.experimental.compilation_cache import compilation_cache

    from jflash.system.program_cache import cache_folder

    with jax_options(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(cache_folder()),  # that of processes that tests start
        jax_compilation_cache_max_size=2**34,
        jax_persistent_cache_min_compile_time_secs=0.1,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        compilation_cache.reset_cache()  # or JAX does not look at the options again
        yield
    compilation_cache.reset_cache()


def pytest_sessionstart() -> None:
    """Sets XLA's flags as a command would, before any test touches a device.

    Not sooner: what is imported before the hook above is not checked.
    """
    from jflash.system.platform import configure

    configure()
