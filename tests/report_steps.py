"""A run's configuration and steps, and a clock that ticks, for tests of reports."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from tests.unit.test_flops import GPT2
from train_entry.config.schema import Config
from train_entry.report.metrics import StepMetrics
from train_entry.report.report import Report


class Ticks:
    """A clock that is set by hand; marks after `reached` lie ahead of it, as those of a busy GPU do."""

    def __init__(self) -> None:
        self.time = 0.0
        self.reached = math.inf
        self.waited = False

    def now(self) -> float:
        return self.time

    def is_past(self, mark: float) -> bool:
        return mark <= self.reached

    def seconds(self, start: float, end: float) -> float:
        self.waited = self.waited or end > self.reached
        return end - start


def config_of(folder: Path, *, steps: int = 30, **logging: Any) -> Config:
    logging = {"tensorboard": False, "plot": False, "interval": 10} | logging
    return Config(run_dir=folder / "run").with_values(logging=logging, training={"steps": steps})


def step_of(iteration: int, **values: Any) -> StepMetrics:
    """Return a step of 8 samples in half a second, whose loss is its number."""
    given = {
        "loss": float(iteration),
        "grad_norm": 1.5,
        "lr": 3e-4,
        "num_tokens": 8 * 1024,
        "num_samples": 8,
        "seconds": 0.5,
    }
    return StepMetrics(iteration=iteration, **(given | values))


def run_until(config: Config, until: int, *, start: int = 0, offset: float = 0.0) -> None:
    with Report(config, GPT2, start=start, stream=io.StringIO()) as report:
        for iteration in range(start + 1, until + 1):
            report.step(step_of(iteration, loss=iteration + offset))
            if iteration % 5 == 0:
                report.evaluation(iteration, "valid", iteration + offset)
