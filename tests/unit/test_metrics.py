"""The reader of `metrics.jsonl`: what is torn, foreign or endless is left out, for card, page and resumption."""

from __future__ import annotations

import math
from pathlib import Path

from mcore_convert.checkpoints.metrics import read_rows
from mcore_convert.checkpoints.runs import Run
from mcore_convert.inspection.page.curve import read_metrics
from mcore_convert.storage.sources import Limit
from train_entry.report.jsonl import read

LINES = (
    b'{"iteration": 1, "loss": 3.0}\n',
    b'{"iteration": 1, "loss": 2.5, "evaluation": "held out"}\n',
    b"\n",
    b'"a word"\n',
    b'{"iteration": true, "loss": 1.0}\n',
    b'{"iteration": -1, "loss": 1.0}\n',
    b'{"loss": 1.0}\n',
    b"[" * 10000 + b"\n",
    b" " * Limit.LINE.nbytes + b'{"iteration": 2, "loss": 1.0}\n',
    b'{"iteration": 2, "note": "\xff", "loss": 2.0}\n',
    b'{"iteration": 3, "loss": -1' + 400 * b"0" + b"}\n",
    b'{"iteration": 3, "loss": 1.5}',  # whole, but the end of its line was not written
)


def test_one_reader_for_all(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(LINES))
    rows = list(read_rows(file))
    assert [line for line, _ in rows] == [LINES[0], LINES[1], *LINES[9:]]
    assert [row["iteration"] for _, row in rows] == [1, 1, 2, 3, 3]
    assert rows[3][1]["loss"] == -math.inf
    assert Run(tmp_path, tmp_path).loss_at(3) == {"train": 1.5, "held out": 2.5}
    metrics = read_metrics(file)
    assert [*zip(metrics.iterations, metrics.losses, strict=True)] == [(1, 3.0), (2, 2.0), (3, -math.inf), (3, 1.5)]
    assert metrics.evaluations == {"held out": {1: 2.5}}
    assert [row["iteration"] for row in read(file)] == [1, 1, 2, 3]  # a run goes on after a whole line


def test_a_run_without_metrics_has_no_loss(tmp_path: Path) -> None:
    assert Run(tmp_path, tmp_path).loss_at(3) == {}
