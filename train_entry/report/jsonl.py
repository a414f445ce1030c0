"""`metrics.jsonl`: every step and evaluation of a run, one per line, over all its resumptions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.metrics import read_rows
from mcore_convert.storage.disk import write_whole
from train_entry.report.metrics import Evaluation, Interval
from train_entry.report.rows import Row


class Jsonl:
    """The open file. Lines are written whole and unbuffered: a killed run leaves at most one torn line."""

    def __init__(self, path: Path, *, start: int) -> None:
        """Continue a file after step `start`: its later steps, which the run will repeat, are dropped."""
        _cut_after(path, start)
        self._file = path.open("ab", buffering=0)

    def steps(self, interval: Interval, rows: Sequence[Row]) -> None:
        """Append the steps."""
        self._append(rows)

    def evaluation(self, evaluation: Evaluation, row: Row) -> None:
        """Append the evaluation."""
        self._append([row])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, rows: Sequence[Row]) -> None:
        data = memoryview("".join(f"{json.dumps(_finite(row), allow_nan=False)}\n" for row in rows).encode())
        while data:  # the file is unbuffered, so it may take only a part
            data = data[self._file.write(data) :]


def read(path: Path) -> list[Row]:
    """Return the rows of a file, without a torn last line."""
    return [row for _, row in _rows(path)]


def _rows(path: Path) -> list[tuple[bytes, Row]]:
    return [(line, row) for line, row in read_rows(path) if line.endswith(b"\n")]


def _cut_after(path: Path, start: int) -> None:
    """Drop later steps and torn lines atomically: the file is the old one or the new one at any moment."""
    if not path.exists():
        return
    kept = b"".join(line for line, row in _rows(path) if row["iteration"] <= start)
    if len(kept) != path.stat().st_size:
        write_whole(path, kept)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
