"""`metrics.jsonl` of a run: one JSON object per line, with its `iteration`; an evaluation's also has its name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_convert.storage.sources import Limit, open_file

METRICS = "metrics.jsonl"
MOST = 2**53  # iterations: a float does not hold every larger number

LONG = 100  # digits

Row = dict[str, Any]


def read_rows(file: Path) -> Iterator[tuple[bytes, Row]]:
    """Yield the rows of a file, each with its line; a line that is torn, foreign or too long is skipped."""
    with open_file(file, grows=True) as lines:
        begun, longest = False, Limit.LINE.nbytes
        while line := lines.readline(longest):
            continued, begun = begun, not line.endswith(b"\n") and len(line) == longest
            if continued or begun:
                continue
            try:
                row = json.loads(line.decode(errors="replace"), parse_int=_number)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("iteration")) is int and 0 <= row["iteration"] < MOST:
                yield line, row


def _number(digits: str) -> float:
    """Return an integer, or infinity if it has so many digits that it may be beyond the range of a float."""
    if len(digits) < LONG:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf
