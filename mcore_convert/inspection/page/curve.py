"""The loss curve of a run, from the rows of its `metrics.jsonl` that have an `iteration` and a `loss`.

A row with `evaluation` holds the loss of an evaluation of that name.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.checkpoints.metrics import METRICS, read_rows

MOST_POINTS = 500  # of a curve; a longer one is drawn by the lowest and the highest of neighbours
SMOOTHED = 50  # steps of a run per step of the smoothing window to each side
LEAST_SMOOTHED = 20  # smallest number of steps with a smoothed curve
SPIKE = 1.3  # losses above this multiple of both the first and the common losses are cut off

Data = dict[str, Any]
Numbers = NDArray[np.float64]


@dataclass
class Metrics:
    """Iterations and losses of the training, and of evaluations by name. A loss that is not a number is NaN."""

    iterations: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)


def find_metrics(checkpoint: Path) -> Path | None:
    """Return the metrics of the run that a checkpoint belongs to: `RUN/metrics.jsonl` of `RUN/checkpoints/iter_*`."""
    folders = [checkpoint, *checkpoint.absolute().parents[:2]]
    return next((folder / METRICS for folder in folders if (folder / METRICS).is_file()), None)


def read_metrics(file: Path) -> Metrics:
    """Read a file line by line."""
    metrics = Metrics()
    for _, row in read_rows(file):
        iteration, loss = row["iteration"], _number(row.get("loss"))
        name = row.get("evaluation")
        if isinstance(name, str):
            metrics.evaluations.setdefault(name, {})[iteration] = loss
        elif "loss" in row:
            metrics.iterations.append(iteration)
            metrics.losses.append(loss)
    return metrics


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def curve_data(metrics: Metrics, iteration: int | None) -> Data | None:
    """Return the data that a page draws: points on a field of 0 to 1 in both directions, ticks, and values to read off.

    Args:
        iteration: iteration of the checkpoint, to be marked.
    """
    at, losses = _last_of_each(metrics)
    good = np.isfinite(losses)
    if not good.any():
        return None
    everything = [value for each in metrics.evaluations.values() for value in each.values() if math.isfinite(value)]
    left, right = float(at[0]), float(max(at[-1], at[0] + 1))
    low, high = _range(losses[good], everything)

    def x(values: Numbers) -> Numbers:
        return (values - left) / (right - left)

    def y(values: Numbers) -> Numbers:
        return np.clip((high - values) / (high - low), 0, 1)

    drawn = _thinned(at[good], losses[good])
    smooth = _smoothed(losses) if good.sum() >= LEAST_SMOOTHED else None
    spaced = np.unique(np.linspace(0, len(at) - 1, min(len(at), MOST_POINTS)).astype(int))
    bad = at[~good]
    return {
        "line": _points(x(drawn[0]), y(drawn[1])),
        "smooth": None if smooth is None else _points(x(at[spaced]), y(smooth[spaced])),
        "bad": [round(float(value), 4) for value in x(bad)[:MOST_POINTS]],
        "numBad": len(bad),
        "evaluations": [
            {
                "name": name,
                "points": [
                    [round(float((i - left) / (right - left)), 4), round(float(y(np.array(v))), 4), i, _digits(v)]
                    for i, v in sorted(each.items())
                    if math.isfinite(v) and left <= i <= right
                ],
                "last": _digits(each[max(each)]),
            }
            for name, each in metrics.evaluations.items()
        ],
        "xTicks": [
            {"at": round((t - left) / (right - left), 4), "label": f"{t:,.0f}"} for t in _ticks(left, right, 8, least=1)
        ],
        "yTicks": [{"at": round((high - t) / (high - low), 4), "label": f"{t:g}"} for t in _ticks(low, high, 5)],
        "read": [[int(at[i]), _digits(losses[i]), None if smooth is None else _digits(smooth[i])] for i in spaced],
        "first": _digits(losses[good][0]),
        "last": _digits(losses[good][-1]),
        "steps": len(at),
        "lastIteration": int(at[-1]),
        "mark": None
        if iteration is None or not left <= iteration <= right
        else round((iteration - left) / (right - left), 4),
        "iteration": iteration,
    }


def _last_of_each(metrics: Metrics) -> tuple[Numbers, Numbers]:
    """Return the iterations in order, each with its last loss: a resumed run may have written some twice."""
    at, losses = np.array(metrics.iterations), np.array(metrics.losses)
    unique, last = np.unique(at[::-1], return_index=True)
    return unique, losses[::-1][last]


def _range(losses: Numbers, evaluations: Sequence[float]) -> tuple[float, float]:
    """Return the range of losses to draw, with spikes cut off."""
    common = SPIKE * max(float(losses[0]), float(np.percentile(losses, 99)))
    low, high = float(losses.min()), float(losses.max())
    if low < common < high:
        high = common
    low, high = min([low, *evaluations]), max([high, *(value for value in evaluations if value < common)])
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _thinned(at: Numbers, losses: Numbers) -> tuple[Numbers, Numbers]:
    """Return the lowest and the highest of neighbours, in their order, if there are many points."""
    if len(at) <= MOST_POINTS:
        return at, losses
    kept: list[int] = []
    for part in np.array_split(np.arange(len(at)), MOST_POINTS // 2):
        kept += sorted({int(part[losses[part].argmin()]), int(part[losses[part].argmax()])})
    return at[kept], losses[kept]


def _smoothed(losses: Numbers) -> Numbers:
    """Return the mean of the neighbours of each step, without those that are not finite."""
    number = np.arange(len(losses))
    reach = np.minimum(max(2, len(losses) // SMOOTHED), np.minimum(number, number[::-1]))  # as many before as after
    good = np.isfinite(losses)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, losses, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    start, stop = number - reach, number + reach + 1
    lengths = np.maximum(counts[stop] - counts[start], 1)
    smooth: Numbers = (sums[stop] - sums[start]) / lengths
    return smooth


def _points(x: Numbers, y: Numbers) -> str:
    """Return a list of points for SVG, on a field of 1000 by 1000."""
    return " ".join(f"{1000 * a:.1f},{1000 * b:.1f}" for a, b in zip(x, y, strict=True))


def _ticks(low: float, high: float, most: int, *, least: float = 0.0) -> list[float]:
    """Return round numbers between two others, `least` apart or more."""
    raw = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
