"""A checkpoint, opened once: a safetensors folder, an Orbax folder or a GGUF file.

Each form reads its config, and its tokenizer and stop ids if it has them. Its `check` compares the
headers with a config and returns the function that fills the parameters.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jflash.io.families.variants import MASK_ROW
from jflash.io.folder import Fill
from jflash.io.foreign import one_line
from jflash.io.hf_values import shown
from jflash.io.orbax_checkpoint import PARAMS, Orbax, is_orbax
from jflash.io.safetensors_checkpoint import TWICE, Safetensors
from jflash.records.config import DrafterConfig, TargetConfig
from jflash.records.specs import Kept


@runtime_checkable
class Checkpoint(Protocol):
    """The common form of Safetensors, Orbax and Gguf."""

    @property
    def path(self) -> Path: ...

    def config[C: TargetConfig | DrafterConfig](self, read: Callable[[dict[str, Any]], C]) -> C:
        """The config through one of hf_config's readers."""
        ...

    def companions(self) -> dict[str, bytes]:
        """The files that describe the model in Hugging Face's form, by name."""
        ...

    def has_tokenizer(self) -> bool: ...

    def tokenizer(self) -> Any: ...

    def stop_ids(self, tokenizer: Any = None) -> list[int]: ...

    @property
    def quantised(self) -> str | None:
        """How the file's weights are quantised, by the name in its config; None if they are not."""
        ...

    def kept(self, config: TargetConfig | DrafterConfig) -> Mapping[str, Kept | None]:
        """How the quantised kernels may stay so in memory, by path; None: not at all."""
        ...

    def check(self, config: TargetConfig | DrafterConfig) -> Fill:
        """The function that reads the parameters; ValueError with all that does not fit."""
        ...


HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", f"{PARAMS}/*"]
HUB_FILES += [MASK_ROW]  # it is not read, so it must be seen to be refused
# Some models lie in a repository twice: gpt-oss's again in `original`, as large as before, and
# Mistral's in one file, under its own names.
HUB_PASSED = ["original/*", "metal/*", "onnx/*", f"{TWICE}*"]


def open_checkpoint(source: str | Path) -> Checkpoint:
    """The checkpoint at a folder, a GGUF file or a hub id; ValueError if there is none."""
    path = resolve(source)
    if not path.is_dir():
        from jflash.io.gguf.checkpoint import open_gguf  # its library is an extra, "gguf"

        return open_gguf(path)
    return Orbax(path) if is_orbax(path) else Safetensors(path)


def resolve(source: str | Path) -> Path:
    """A checkpoint's folder or GGUF file: `source` itself, or a hub id's folder, downloaded.

    ValueError for any other source, and if the download fails.
    """
    if not str(source):  # which is the folder of the process for Path
        raise ValueError("the source '' is empty: give a folder, a .gguf file or a hub id")
    path = Path(source)
    if path.is_dir():
        if not any(path.iterdir()):
            raise ValueError(f"{path} is an empty folder")
        _refuse_dead_links(path)
        _refuse_folder_of_gguf(path)
        return path
    if path.suffix == ".gguf":
        if not path.exists():
            raise ValueError(f"{path}: no such file")
        return path
    if path.exists():
        raise ValueError(f"{path} is a file, expected a checkpoint folder or a .gguf file")
    if not HUB_ID.fullmatch(str(source)):
        raise ValueError(f"{source}: no such folder, and not a hub id (organisation/name)")
    return _download(str(source))


def _refuse_dead_links(folder: Path) -> None:
    """ValueError for links to files that are gone, such as those of a hub's cache that was pruned:
    a file that may be absent, such as generation_config.json, would be passed over."""
    links = (link for link in folder.iterdir() if link.is_symlink() and not link.exists())
    links = (link for link in links if not any(map(link.match, HUB_PASSED)))
    read = (link.name for link in links if any(map(link.match, HUB_FILES)))
    if names := ", ".join(map(shown, sorted(read))):
        raise ValueError(
            f"{folder}: links to files that are not there: {names}: download the checkpoint again"
        )


def _refuse_folder_of_gguf(folder: Path) -> None:
    """ValueError for a folder with GGUF files and no config.json: each file is a checkpoint."""
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if files and not (folder / "config.json").exists():
        raise ValueError(f"{folder} is no checkpoint folder: give a file of it, {shown(files[0])}")


def _download(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_PASSED
        )
        return Path(folder)
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{hub_id}: no such folder, and the hub cannot be reached: "
            "download it where there is a network, then give its folder"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"{hub_id}: no such folder, and the hub answers: {error}") from None
    except Exception as error:  # such as an answer that breaks off: of whatever HTTP library
        why = f"{hub_id}: no such folder, and the hub's answer cannot be read: {one_line(error)}"
        raise ValueError(why) from None


def load_tokenizer(source: str | Path | Checkpoint) -> Any:
    """The tokenizer of a checkpoint, as transformers'; ValueError if none loads."""
    return opened(source).tokenizer()


def stop_token_ids(source: str | Path | Checkpoint, tokenizer: Any = None) -> list[int]:
    """The checkpoint's ids that end a text, else the tokenizer's, else none."""
    return opened(source).stop_ids(tokenizer)


def opened(source: str | Path | Checkpoint) -> Checkpoint:
    """`source`, opened if it is a name; ValueError for what is neither."""
    if isinstance(source, str | Path):
        return open_checkpoint(source)
    if not isinstance(source, Checkpoint):
        raise ValueError(f"the source {source!r:.80} is no folder, .gguf file or hub id")
    return source
