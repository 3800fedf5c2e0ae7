"""The tests leave the user's caches alone, and what they do does not depend on them."""

import os
import tempfile
from pathlib import Path

import jax

_FOLDER = tempfile.TemporaryDirectory(prefix="jflash-tests-")
os.environ["XDG_CACHE_HOME"] = _FOLDER.name  # of the processes that tests start
jax.config.update("jax_enable_compilation_cache", False)  # in this one all is compiled

# JAX's CUDA plugin is here to compile for a GPU (tests/test_gates.py). Where there is none, every
# process would complain that the plugin cannot start.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def pytest_sessionstart() -> None:
    """Sets XLA's flags as a command would, before any test touches a device.

    Not sooner: jaxtyping's checks reach only what is imported after pytest has started.
    """
    from jflash.platform import configure

    configure()
