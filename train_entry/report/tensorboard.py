"""Curves for TensorBoard, in `tensorboard/` of the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from train_entry.report.metrics import Evaluation, Interval
from train_entry.report.rows import Row, scalars_of


class TensorBoard:
    """Event file. TensorBoard hides the steps after `start` of earlier files in the directory."""

    def __init__(self, folder: Path, *, start: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def steps(self, interval: Interval, rows: Sequence[Row]) -> None:
        """Write and flush the steps."""
        for row in rows:
            self._add(row)
        self._writer.flush()

    def evaluation(self, evaluation: Evaluation, row: Row) -> None:
        """Write and flush the evaluation."""
        self._add(row)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, row: Row) -> None:
        for name, value in scalars_of(row).items():
            self._writer.add_scalar(name, value, row["iteration"])
