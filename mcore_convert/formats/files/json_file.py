"""JSON files: objects alone, read strictly and written as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.views import open_error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UnreadableCheckpoint: the file is missing, or is not one.
    """
    try:
        content = json.loads(path.read_bytes(), parse_constant=_no_json)
    except OSError as error:
        raise open_error(path, error) from error
    except ValueError as error:
        raise UnreadableCheckpoint(f"`{path}` is not JSON: {error}") from error
    except RecursionError as error:
        raise UnreadableCheckpoint(f"`{path}` is nested too deeply") from error
    if not isinstance(content, dict):
        raise UnreadableCheckpoint(f"`{path}` is not a JSON object")
    return content


def _no_json(word: str) -> None:
    """NaN and Infinity, which Python would read."""
    raise ValueError(f"it says {word}")


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
