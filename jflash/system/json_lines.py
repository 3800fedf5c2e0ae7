"""Files of JSON objects that somebody else wrote, one a line."""

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

from jflash.system.files import UTF_8


def json_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file or a .gz, each after its place, 'FILE:LINE', for errors about it.

    ValueError for a file that cannot be read, and naming a line that is no object.
    """
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode(UTF_8)
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
        except RecursionError:
            raise ValueError(f"{where} is not JSON here: it is nested too deep") from None
        except ValueError as error:
            if line.strip() != text.strip() and _is_json(text):  # mostly a list over several lines
                raise ValueError(f"{file} is JSON as a whole: give an object a line") from None
            raise ValueError(f"{where} is not JSON: {error}") from None
        if "\\ud" in line.lower():
            check_characters(record, where)
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a JSON object: {line.strip()[:40]}")
        found.append((where, record))
    return found


def _is_json(text: str) -> bool:
    """Whether the whole text is one value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def check_characters(value: Any, where: str) -> None:
    """ValueError for JSON with half a character, which no tokenizer and no file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is not valid UTF-8: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(number: str) -> float:
    """The number; a larger one than floats hold would be infinite, and no line could keep it."""
    if math.isinf(float(number)):
        raise ValueError(f"{number:.40} is too large a number")
    return float(number)
