"""Sinks of the metrics of a run: one per place where they are shown or stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from train_entry.report.metrics import Evaluation, Interval
from train_entry.report.rows import Row


class Sink(Protocol):
    """Destination of metrics. `rows` and `row` are the stored form of the metrics beside them."""

    def steps(self, interval: Interval, rows: Sequence[Row]) -> None:
        """Write the steps since the last call."""

    def evaluation(self, evaluation: Evaluation, row: Row) -> None:
        """Write an evaluation."""

    def close(self) -> None:
        """Close the sink."""
