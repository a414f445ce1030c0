"""Values in steps, for a row of small bars or of coloured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST_FACTOR = 4.0  # least ratio of the ends of a logarithmic scale, so that nearly equal values look nearly equal


def logarithmic(values: Sequence[float | None], steps: int) -> list[int | None]:
    """Return the step of each value, 1 to `steps`, from the smallest to the largest; 0 for zero, None for None and NaN.

    The scale spans at least LEAST_FACTOR around the middle of the values.
    """
    logs = [math.log(value) for value in values if value is not None and 0 < value < math.inf]
    if not logs:
        return [_without_scale(value, steps) for value in values]
    low, high = min(logs), max(logs)
    lacking = max(0.0, math.log(LEAST_FACTOR) - (high - low))
    low, high = low - lacking / 2, high + lacking / 2
    return [
        _without_scale(value, steps)
        if value is None or not 0 < value < math.inf
        else _step((math.log(value) - low) / (high - low), steps)
        for value in values
    ]


def linear(values: Sequence[float | None], steps: int, *, top: float | None = None) -> list[int | None]:
    """Return the same on a scale from 0 to `top`, which is the largest value unless given."""
    highest = top or max((value for value in values if value is not None and value < math.inf), default=0.0)
    return [
        _without_scale(value, steps)
        if value is None or not 0 < value < math.inf or not highest
        else _step(min(value / highest, 1.0), steps)
        for value in values
    ]


def _step(share: float, steps: int) -> int:
    return min(steps, 1 + int(share * steps))


def _without_scale(value: float | None, steps: int) -> int | None:
    """Return the step of a value without a logarithm: None or NaN, zero, infinity."""
    if value is None or math.isnan(value):
        return None
    return steps if value else 0
