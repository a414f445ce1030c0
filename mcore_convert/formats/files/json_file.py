"""JSON files: only objects, read strictly and written as transformers writes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.sources import MEMORY, Limit, content_of
from mcore_convert.storage.views import open_error

# Upper bounds of Python's memory for parsed JSON, in bytes per occurrence of a character.
COSTS = {b"{": 190, b"[": 90, b",": 48, b":": 110, b'"': 25}
MOST = max(COSTS.values()) + 8  # for any character
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, limit: Limit = Limit.JSON) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        UnreadableCheckpoint: the file is missing, is not a JSON object, or is larger than its limit.
    """
    try:
        content = parsed(content_of(path, limit))
    except OSError as error:
        raise open_error(path, error) from error
    except ValueError as error:
        raise UnreadableCheckpoint(f"`{path}` is not JSON: {error}") from error
    except RecursionError as error:
        raise UnreadableCheckpoint(f"`{path}` is nested too deeply") from error
    if not isinstance(content, dict):
        raise UnreadableCheckpoint(f"`{path}` is not a JSON object")
    return content


def parsed(content: bytes, *, any_string: bool = False) -> Any:
    """Parse a JSON text; all of its strings are valid Unicode, so that they can be written again.

    Args:
        any_string: accept invalid Unicode in strings, for paths that are not UTF-8.

    Raises:
        ValueError: it is not JSON, or takes more memory than any file in use.
        RecursionError: it is nested too deeply.
    """
    cost = cost_of(content) if MOST * len(content) > MEMORY // 2 else 0  # a small text needs no count
    if cost > MEMORY:
        raise ValueError(f"it would take up to {cost:,} bytes of memory")
    text = content.decode(json.detect_encoding(content))
    value = DECODER.decode(text)
    if not any_string and SURROGATE.search(text):
        _check_text(value)
    return value


def cost_of(content: bytes) -> int:
    """Return an upper bound of the memory for parsing a JSON text, in bytes."""
    width = 1 if content.isascii() else 4  # of each character, in the text and in its strings
    return 4096 + 2 * width * len(content) + sum(content.count(part) * each for part, each in COSTS.items())


def _check_text(value: Any) -> None:
    """Check that there is no lone surrogate, which JSON can spell and UTF-8 cannot encode."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            part.encode()
        elif isinstance(part, dict):
            pending += [*part, *part.values()]
        elif isinstance(part, list):
            pending += part


def _constant(word: str) -> float:
    """Return Infinity, which is not JSON, but in the published configurations of Nemotron-H; NaN is refused."""
    if word != "Infinity":
        raise ValueError(f"it says {word}")
    return math.inf


DECODER = json.JSONDecoder(parse_constant=_constant)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return a JSON file as transformers writes it."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
