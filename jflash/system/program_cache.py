"""Compiled programs that are kept in a folder for the next process: JAX's persistent cache."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from jflash.system.files import replacing


def use_program_cache() -> list[str]:
    """Turns it on for all programs, small ones too; returns a line if it cannot be.

    What the environment says of its folder, or that there shall be none, stays.
    """
    import jax

    if not jax.config.jax_enable_compilation_cache:
        return []
    _write_whole_entries()
    if jax.config.jax_compilation_cache_dir:
        return []
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # it can be written
    except (OSError, RuntimeError) as error:
        return [f"compiled programs are not kept for the next run: {error}"]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return []


def leave_program_cache() -> None:
    """Compiles everything from here on, even programs in the cache.

    JAX reads this setting once, before it compiles its first program, so it has to be reset.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache as jax_cache

    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()


def cache_folder() -> Path:
    """The folder of compiled programs: below XDG_CACHE_HOME, by default ~/.cache.

    RuntimeError for a user without a home. The folder may be deleted at any time.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification ignores relative ones
        base = Path.home() / ".cache"
    return base / "jflash" / "compiled"


class _WholeFiles(type(Path())):
    """A folder whose files, written as bytes, appear whole or not at all."""

    def write_bytes(self, data: Any) -> int:
        with replacing(Path(self)) as part:
            return part.write_bytes(data)


@functools.cache  # once is enough
def _write_whole_entries() -> None:
    """JAX 0.11 writes an entry in place: of a full disc, or a process killed, half of one stays.

    It is never written again, so every later process would warn of it and compile the program.
    """
    from jax._src.lru_cache import LRUCache

    usual = LRUCache.__init__

    def opened(self: Any, *arguments: Any, **options: Any) -> None:
        usual(self, *arguments, **options)
        if self._is_local:
            self.path = _WholeFiles(self.path)

    LRUCache.__init__ = opened
