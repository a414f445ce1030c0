"""Sinks of the numbers of a run: one for each place where they are shown or kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from train_entry.report.metrics import Evaluation, Interval
from train_entry.report.rows import Row


class Sink(Protocol):
    """A place for numbers. `rows` and `row` are what is stored of the metrics beside them."""

    def steps(self, interval: Interval, rows: Sequence[Row]) -> None:
        """Take the steps since the last call."""

    def evaluation(self, evaluation: Evaluation, row: Row) -> None:
        """Take an evaluation."""

    def close(self) -> None:
        """Nothing more will come."""
