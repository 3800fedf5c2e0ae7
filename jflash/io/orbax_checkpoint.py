"""The converted form of a checkpoint: Orbax parameters beside the config and tokenizer files."""

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm

from jflash.io.assemble import nest
from jflash.io.checksums import SUFFIX, check_small_files, compared, write_checksums
from jflash.io.folder import Fill, Folder, Place, as_it_lies
from jflash.io.foreign import named, one_line, without_notes
from jflash.io.hf_config import read_json
from jflash.io.problems import check_problems
from jflash.models.params import leaf_paths
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import Kept

PARAMS = "orbax"  # the folder inside a checkpoint that marks this form
METADATA = "_METADATA"  # Orbax's file in it
GROUP = 2**30  # bytes restored at a time: a step of the progress bar, and enough to be fast


def is_orbax(folder: Path) -> bool:
    """Whether a folder holds Orbax parameters, and not just a folder of that name."""
    return (folder / PARAMS / METADATA).is_file() or (
        (folder / PARAMS).is_dir() and not any(folder.glob("*.safetensors"))
    )


def save_orbax(folder: Path, params: Any) -> None:
    """Writes parameters under `folder`."""
    with _checkpointer() as checkpointer:
        checkpointer.save(_path(folder), params)
    write_checksums(_path(folder))


def remove_orbax(folder: Path) -> None:
    """Removes Orbax parameters under `folder`, if it holds some.

    Without their metadata, which go first, nothing takes the rest for parameters.
    """
    if (metadata := folder / PARAMS / METADATA).is_file():
        metadata.unlink()
        shutil.rmtree(folder / PARAMS)
        (folder / (PARAMS + SUFFIX)).unlink(missing_ok=True)


@dataclass(frozen=True)
class Orbax(Folder):
    """A folder in the converted form."""

    def kept(self, config: TargetConfig | DrafterConfig) -> dict[str, Kept | None]:
        """None: the weights are whole."""
        return {}

    def check(self, config: TargetConfig | DrafterConfig) -> Fill:
        """The function that reads the parameters of `config`.

        The metadata is enough to refuse: ValueError with every leaf that does not fit.
        """
        return functools.partial(_fill, self.path, _stored(self.path, config), config)


def _fill(
    folder: Path,
    stored: dict[str, Any],
    config: TargetConfig | DrafterConfig,
    dtype: str | None,
    progress: bool,
    place: Place = as_it_lies,
) -> dict:
    """Parameters as device arrays."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = nest(
        {
            path: jax.ShapeDtypeStruct(
                leaf.stored, leaf.dtype or dtype or stored[path].dtype, sharding=device
            )
            for path, leaf in leaf_paths(config).items()
        }
    )
    bar = tqdm(
        total=_bytes(wanted), desc=f"loading {folder.name}", unit="B", unit_scale=True,
        disable=not progress,
    )  # fmt: skip
    params = {}
    with _checkpointer(ocp.PyTreeCheckpointer) as checkpointer, compared(_path(folder)), bar:
        for part in _groups(wanted):
            leaves = _flat(_restore(checkpointer, _path(folder), part))
            params |= {path: place(path, leaves.pop(path)) for path in list(leaves)}
            bar.update(_bytes(part))
    return nest(params)


def _restore(checkpointer: ocp.Checkpointer, path: Path, part: dict) -> dict:
    """The subtrees of a checkpoint that `part` asks for; ValueError if its files are damaged."""
    how = ocp.checkpoint_utils.construct_restore_args(part)
    args = ocp.args.PyTreeRestore(part, restore_args=how, partial_restore=True)
    try:
        return checkpointer.restore(path, args=args)
    except Exception as error:
        # A damaged file gives a ValueError or an OSError, sometimes as the cause of a bare
        # Exception. All other errors, such as lack of memory, pass through.
        reason = error.__cause__ if type(error) is Exception else error
        if not isinstance(reason, (OSError, ValueError)):
            raise
        text = without_notes(one_line(reason))
        raise ValueError(f"{path} is corrupt or truncated: {text}") from None


def _groups(wanted: dict) -> Iterator[dict]:
    """The subtrees of a tree in groups; each but the last has at least GROUP bytes."""
    group = {}
    for name, subtree in wanted.items():
        group[name] = subtree
        if _bytes(group) >= GROUP:
            yield group
            group = {}
    if group:
        yield group


def _stored(folder: Path, config: TargetConfig | DrafterConfig) -> dict[str, Any]:
    """The stored leaves' metadata, by path; ValueError unless they are exactly the config's."""
    check_small_files(_path(folder))
    with named(f"{_path(folder)} is corrupt"):
        read_json(_path(folder) / METADATA)
        with _checkpointer() as checkpointer:
            metadata = checkpointer.metadata(_path(folder)).item_metadata
        if metadata is None:
            raise ValueError("it has no metadata")
        stored = _flat(metadata.tree)
    expected = leaf_paths(config)
    problems = [f"missing: {name}" for name in expected if name not in stored]
    problems += [f"unknown: {name}" for name in stored if name not in expected]
    problems += [
        f"wrong shape: {name} is {tuple(stored[name].shape)}, expected {leaf.stored}"
        for name, leaf in expected.items()
        if name in stored and tuple(stored[name].shape) != leaf.stored
    ]
    check_problems(folder, problems)
    return stored


@contextlib.contextmanager
def _checkpointer(
    kind: Callable[[], ocp.Checkpointer] = ocp.StandardCheckpointer,
) -> Iterator[ocp.Checkpointer]:
    """A checkpointer without its log, which only repeats the errors that it raises."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with kind() as checkpointer:
            yield checkpointer
    finally:
        log.setLevel(level)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _path(folder: Path) -> Path:
    return (folder / PARAMS).absolute()


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(getattr(key, "key", key)) for key in path): x for path, x in leaves}
