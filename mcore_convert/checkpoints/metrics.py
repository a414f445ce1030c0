"""`metrics.jsonl` of a run: a JSON object a line, with its `iteration`; an evaluation's has its name, too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_convert.storage.sources import Limit, open_file

METRICS = "metrics.jsonl"
MOST = 2**53  # iterations: more are no number that a float holds

LONG = 100  # digits

Row = dict[str, Any]


def read_rows(file: Path) -> Iterator[tuple[bytes, Row]]:
    """Yield the rows of a file, each with its line; what is torn, foreign or longer than a line is left out."""
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
    """Return an integer, or infinity where it is so long that it may be beyond what a float holds."""
    if len(digits) < LONG:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf
