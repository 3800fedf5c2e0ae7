"""What a process decides about JAX: flags, GPU memory, and programs kept for the next process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxlib import xla_client

from jflash.system import platform
from jflash.system.platform import Flag, autotunes, configure
from jflash.system.program_cache import cache_folder
from tests.support.small_checkpoints import make_pair

ROOT = Path(__file__).parents[2]
VARIABLES = ("XLA_FLAGS", *platform.MEMORY_FRACTION, platform.PREALLOCATE, "XDG_CACHE_HOME")


@pytest.fixture
def environment(monkeypatch):
    """os.environ without our variables, as it was afterwards; no device is in use, it seems."""
    before = dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    monkeypatch.setattr(platform, "_in_use", lambda: False)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# Flags and memory


def test_importing_decides_nothing_and_starts_no_device():
    code = (
        "import os, jax; before = dict(os.environ)\n"
        "import jflash, jflash.system.platform, jflash.cli.generate\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "changed = {k for k in before | os.environ if before.get(k) != os.environ.get(k)}\n"
        "assert not any('XLA' in k for k in changed), changed\n"
        "assert jax.config.jax_compilation_cache_dir is None\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_flags_of_the_table_come_before_the_users(environment, monkeypatch):
    table = (Flag("--xla_a", "1", "why"), Flag("--xla_b", "2", "why"))
    monkeypatch.setattr(platform, "XLA_FLAGS", table)
    assert configure() == [] and environment["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    assert configure() == [] and environment["XLA_FLAGS"] == "--xla_a=1 --xla_b=2"
    environment["XLA_FLAGS"] = " --xla_b=7  --xla_c"
    assert configure() == [] and environment["XLA_FLAGS"] == "--xla_a=1 --xla_b=7  --xla_c"


def test_what_the_user_sets_wins_and_a_line_says_so(environment):
    graphs = "--xla_gpu_enable_command_buffer"
    environment |= {"XLA_FLAGS": f"{graphs}=FUSION", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".4"
    before = {name: environment[name] for name in VARIABLES if name in environment}
    notices = configure(cuda_graphs=False, memory_fraction=0.9, preallocate=False)
    assert {name: environment[name] for name in VARIABLES if name in environment} == before
    assert [notice.split(" ")[0] for notice in notices] == [
        *("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION=.4", "XLA_PYTHON_CLIENT_PREALLOCATE=true")
    ]
    assert graphs in notices[0]


def test_autotuning_is_the_options_else_the_environments(environment, monkeypatch):
    monkeypatch.setenv("JFLASH_AUTOTUNE", "1")
    assert configure() == [] and autotunes()
    assert configure(autotune=False) == [] and not autotunes()
    assert configure(autotune=True) == [] and autotunes()


@pytest.mark.parametrize("value", ["true", "", "2"])
def test_autotuning_that_is_neither_on_nor_off(environment, monkeypatch, value):
    monkeypatch.setenv("JFLASH_AUTOTUNE", value)
    with pytest.raises(ValueError, match=f"JFLASH_AUTOTUNE is '{value}' in the .*: set it to 1 or"):
        configure()
    assert configure(autotune=True) == [] and autotunes()  # an option says otherwise


def test_flags_in_a_file_are_left_alone(environment):
    environment["XLA_FLAGS"] = "flags.txt"
    assert configure() == []
    [notice] = configure(cuda_graphs=False)
    assert environment["XLA_FLAGS"] == "flags.txt" and "flags.txt names a file" in notice


def test_memory_settings_reach_jax(environment):
    assert configure(memory_fraction=0.9, preallocate=False) == []
    options = xla_client.generate_pjrt_gpu_plugin_options()
    assert options["memory_fraction"] == 0.9 and options["preallocate"] is False


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_a_fraction_that_is_none(environment, fraction):
    with pytest.raises(ValueError, match=f"memory fraction {fraction}"):
        configure(memory_fraction=fraction)


def test_too_late_is_an_error_that_changes_nothing(environment, monkeypatch):
    jnp.zeros(1).block_until_ready()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"too late to set XLA_FLAGS, XLA_CLIENT_MEM_FRACTION"):
        configure(cuda_graphs=False, memory_fraction=0.5)
    assert not set(VARIABLES) & environment.keys()


GRAPHS = """
import pathlib, jax.numpy as jnp
from jflash.system.platform import configure
configure(cuda_graphs={graphs}, compilation_cache=False)
from tests.support.described_gpu import H200, compile_for
x = jnp.zeros((512, 512), jnp.bfloat16)
compile_for(H200, lambda a, b: jnp.sin(a @ b) @ b @ a, x, x)
thunks = [f.read_text() for f in pathlib.Path({dump!r}).iterdir() if "thunk_sequence" in f.name]
assert any(text.strip() for text in thunks)
print(any("kCommandBuffer" in text for text in thunks))
"""


@pytest.mark.parametrize("graphs", [True, False])
def test_the_switch_turns_cuda_graphs_off(tmp_path, graphs):
    """XLA also refuses flags that it does not know, so ours exist in the version installed."""
    code = GRAPHS.format(graphs=graphs, dump=str(tmp_path))
    done = python(code, XLA_FLAGS=f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(graphs)


def test_xla_refuses_flags_that_it_does_not_know():
    """Otherwise the test above could not tell."""
    code = "import jax.numpy as jnp; jnp.zeros(1)"
    assert python(code, XLA_FLAGS="--xla_gpu_enable_command_bufer=").returncode != 0


# Programs kept for the next process


def test_the_cache_lies_in_the_users_folder(environment):
    home = Path.home() / ".cache" / "jflash" / "compiled"
    assert cache_folder() == home
    environment["XDG_CACHE_HOME"] = "relative"
    assert cache_folder() == home
    environment["XDG_CACHE_HOME"] = "/somewhere"
    assert cache_folder() == Path("/somewhere/jflash/compiled")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Without a tokenizer, whose library takes seconds to import."""
    made = make_pair(tmp_path_factory.mktemp("pair"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made.target / name).unlink()
    return made


@pytest.fixture
def decode(pair, tmp_path):
    """Runs generate.py in a process whose caches lie in a folder; its JSON and its stderr."""

    def call(cache: Path, *options: str) -> tuple[dict, str]:
        argv = ["--prompt-ids", "1,2", "--target", str(pair.target), "--drafter", str(pair.drafter)]
        command = [sys.executable, str(ROOT / "scripts" / "generate.py"), *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
        done = subprocess.run(
            [*command, "--max-new-tokens", "8", "--json", *options],
            capture_output=True, env=environment, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return call


def entries(cache: Path) -> dict[str, bytes]:
    folder = cache / "jflash" / "compiled"
    return {file.name: file.read_bytes() for file in folder.glob("*-cache")}


def test_a_second_process_compiles_nothing(decode, tmp_path):
    first, err = decode(tmp_path)
    kept = entries(tmp_path)
    assert err == "" and {"jit_prefill", "jit_run"} <= {name.split("-")[0] for name in kept}
    second, err = decode(tmp_path)
    assert err == "" and entries(tmp_path) == kept
    assert second["token_ids"] == first["token_ids"]

    for file in (tmp_path / "jflash" / "compiled").glob("*-cache"):
        file.write_bytes(file.read_bytes()[:50])
    third, err = decode(tmp_path)
    assert third["token_ids"] == first["token_ids"] and "cache" in err


@pytest.mark.long
def test_no_cache_on_request(decode, tmp_path):
    decode(tmp_path, "--no-compilation-cache")
    assert not (tmp_path / "jflash").exists()


def test_an_unusable_folder_is_one_line(decode, tmp_path):
    (tmp_path / "jflash").write_text("not a folder")
    _, err = decode(tmp_path)
    assert err.count("\n") == 1 and str(tmp_path / "jflash") in err and "not kept" in err


LEAVES_THE_CACHE = """
import jax, jax.numpy as jnp
from jflash.system.platform import configure
from jflash.system.program_cache import leave_program_cache
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
def compile_again():
    jax.clear_caches()
    before = sum(hits)
    jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(8)).compile()
    return sum(hits) - before
configure()
compile_again()
kept = compile_again()
leave_program_cache()
print(kept > 0, compile_again())
"""


def test_the_cache_can_be_left_after_it_was_used(tmp_path):
    done = python(LEAVES_THE_CACHE, XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.split() == ["True", "0"], done.stderr


FULL_DISC = """
import resource, sys, jax, jax.numpy as jnp
from jflash.system.platform import configure
def compile_it():
    jax.clear_caches()
    jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(8)).compile()
configure()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
compile_it()
from jflash.system.program_cache import cache_folder
print(*cache_folder().iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
compile_it()
"""


def test_a_full_disc_leaves_no_half_of_a_program(tmp_path):
    """JAX would write no other in its place, and every later process would warn of it."""
    unbounded = python(FULL_DISC, XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_MAX_SIZE="-1")
    assert unbounded.returncode == 0 and unbounded.stdout == "\n", unbounded.stderr
    assert "File too large" in unbounded.stderr
    assert all(len(entry) > 100 for entry in entries(tmp_path).values()) and entries(tmp_path)
