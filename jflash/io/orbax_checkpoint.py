"""Our own form of a checkpoint: parameters by Orbax beside the config and tokenizer files."""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from tqdm import tqdm

from jflash.config import DrafterConfig, TargetConfig
from jflash.io.checksums import check_small_files, compared, write_checksums
from jflash.io.foreign import named, one_line
from jflash.io.hf_config import read_json
from jflash.io.names import abstract_params

PARAMS = "orbax"  # the folder inside a checkpoint that marks it as ours
METADATA = "_METADATA"  # Orbax's file in it
GROUP = 2**30  # bytes restored at a time: a step of the progress bar, and enough to be fast
QUIET, LONGEST = 0.5, 10.0  # seconds without a late write until a failed save is over, at most


def is_orbax(folder: Path) -> bool:
    """Whether a folder holds parameters in our form, rather than a folder of that name."""
    return (folder / PARAMS / METADATA).is_file() or (
        (folder / PARAMS).is_dir() and not any(folder.glob("*.safetensors"))
    )


def write_whole(destination: Path, overwrite: bool, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside `destination` and renames it when whole; nothing half-written stays.

    ValueError if `destination` exists and `overwrite` is not set, or cannot be written.
    """
    check_destination(destination, overwrite)
    destination = destination.resolve()
    part = destination.with_name(f".{destination.name}.part")
    old = destination.with_name(f".{destination.name}.old")
    try:
        made = [folder for folder in part.parents if not folder.exists()]
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            fill(part)
            _swap(part, destination, old)
        except BaseException:
            _remove(part, made)
            raise
    except (OSError, ValueError) as error:
        # tensorstore says "no space left" by a ValueError, and appends all its settings.
        said = str(error).split(" [tensorstore_spec=")[0]
        raise ValueError(f"cannot write {destination}: {said}") from error


def _remove(part: Path, made: list[Path]) -> None:
    """Removes `part`, and the folders made for it, the innermost first.

    A save that failed may have writes in the air, and Orbax does not wait for them; they make their
    folders anew, and on a full disc find the room that the removal gave. So until none comes.
    """
    begun = last = time.monotonic()
    while (now := time.monotonic()) - last < QUIET and now - begun < LONGEST:
        if part.exists():
            shutil.rmtree(part, ignore_errors=True)
            last = now
        time.sleep(0.02)
    for folder in made:  # one that others use by now stays
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_destination(destination: Path, overwrite: bool) -> None:
    """ValueError unless a checkpoint may be written there; what is no checkpoint is never replaced.

    Costs nothing: ask before the weights are read.
    """
    try:
        if not destination.exists():
            return
        empty = destination.is_dir() and not any(destination.iterdir())
        if not empty and not (destination / "config.json").exists():
            raise ValueError(f"{destination} exists and is no checkpoint: give another DST")
    except OSError as error:
        raise ValueError(f"cannot write {destination}: {error}") from error
    if not overwrite:
        raise ValueError(f"{destination} exists already: pass --overwrite to replace it")


def _swap(part: Path, destination: Path, old: Path) -> None:
    """Puts `part` in the place of `destination`, which is put back if that fails."""
    if not destination.exists():
        part.rename(destination)
        return
    shutil.rmtree(old, ignore_errors=True)
    destination.rename(old)
    try:
        part.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)


def save_orbax(folder: Path, params: Any) -> None:
    """Writes parameters under `folder`."""
    with _checkpointer() as checkpointer:
        checkpointer.save(_path(folder), params)
    write_checksums(_path(folder))


def load_orbax(
    folder: Path, config: TargetConfig | DrafterConfig, dtype: str | None, progress: bool = False
) -> dict:
    """Parameters as device arrays of `dtype`, None keeping the stored one.

    ValueError naming every leaf that does not fit `config`.
    """
    with _checkpointer() as checkpointer:
        stored = _stored(checkpointer, folder, config)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape, dtype or stored[_name(path)].dtype, sharding=device
        ),
        abstract_params(config),
    )
    bar = tqdm(
        total=_bytes(wanted), desc=f"loading {folder.name}", unit="B", unit_scale=True,
        disable=not progress,
    )  # fmt: skip
    params = {}
    with _checkpointer(ocp.PyTreeCheckpointer) as checkpointer, compared(_path(folder)), bar:
        for part in _groups(wanted):
            params |= _restore(checkpointer, _path(folder), part)
            bar.update(_bytes(part))
    return params


def _restore(checkpointer: ocp.Checkpointer, path: Path, part: dict) -> dict:
    """The subtrees of a checkpoint that `part` asks for; ValueError if its files are damaged."""
    how = ocp.checkpoint_utils.construct_restore_args(part)
    asked = ocp.args.PyTreeRestore(part, restore_args=how, partial_restore=True)
    try:
        return checkpointer.restore(path, args=asked)
    except Exception as error:
        # A damaged file is a ValueError or an OSError, but Orbax raises what it meets while it
        # reads an array as the cause of a bare Exception. All else, such as no memory, is not ours.
        reason = error.__cause__ if type(error) is Exception else error
        if not isinstance(reason, (OSError, ValueError)):
            raise
        said = one_line(reason).split(" [")[0]
        raise ValueError(f"{path} is corrupt or truncated: {said}") from None


def _groups(wanted: dict) -> Iterator[dict]:
    """The subtrees of a tree in groups of at least GROUP bytes, but for the last."""
    group = {}
    for name, subtree in wanted.items():
        group[name] = subtree
        if _bytes(group) >= GROUP:
            yield group
            group = {}
    if group:
        yield group


def check_orbax(folder: Path, config: TargetConfig | DrafterConfig) -> None:
    """The errors of load_orbax, by the stored metadata alone."""
    with _checkpointer() as checkpointer:
        _stored(checkpointer, folder, config)


def _stored(
    checkpointer: ocp.Checkpointer, folder: Path, config: TargetConfig | DrafterConfig
) -> dict[str, Any]:
    """What is stored of each leaf, by its path; ValueError unless exactly the config's leaves."""
    check_small_files(_path(folder))
    with named(f"{_path(folder)} is corrupt"):
        read_json(_path(folder) / METADATA)
        metadata = checkpointer.metadata(_path(folder)).item_metadata
        if metadata is None:
            raise ValueError("it has no metadata")
        stored = _flat(metadata.tree)
    expected = _flat(abstract_params(config))
    problems = [f"missing: {name}" for name in expected if name not in stored]
    problems += [f"unknown: {name}" for name in stored if name not in expected]
    problems += [
        f"wrong shape: {name} is {tuple(stored[name].shape)}, expected {leaf.shape}"
        for name, leaf in expected.items()
        if name in stored and tuple(stored[name].shape) != leaf.shape
    ]
    if problems:
        raise ValueError(f"{folder} does not fit: " + "; ".join(problems))
    return stored


@contextlib.contextmanager
def _checkpointer(
    kind: Callable[[], ocp.Checkpointer] = ocp.StandardCheckpointer,
) -> Iterator[ocp.Checkpointer]:
    """A checkpointer that is silent: whatever goes wrong is raised, its log says it again."""
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


def _name(path: tuple) -> str:
    return "/".join(str(getattr(entry, "key", entry)) for entry in path)


def _flat(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
