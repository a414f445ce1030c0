"""Outliers among weights, described in words: NaN and infinities, zeros, and norms unlike those of other layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.errors import counted, fold
from mcore_convert.inspection.statistics import WeightStatistics
from mcore_convert.spec.names import PARAM
from mcore_convert.text.grouping import folded

# A norm is an outlier when its logarithm lies this many robust standard deviations from the value expected from the
# neighbouring layers, and differs by this factor at least. The deviation is at least 5 %, as the spread of nearly equal
# layers is no measure. Norms often grow or fall with depth, so the neighbours are extrapolated along a line.
ROBUST_Z = 3.5
LEAST_FACTOR = 1.25
LEAST_DEVIATION = 0.05
LEAST_LAYERS = 5
AROUND = 6  # layers
MAD_TO_SIGMA = 1.4826  # of a normal distribution

PEAK = 50.0  # largest magnitude over the rms; of a million normal values it is about 5
PEAK_ELEMENTS = 1000  # of fewer elements no single one is an outlier
ZEROS = 0.1  # share of zeros that is worth a note
SHOWN_RANGES = 4


Words = Callable[[WeightStatistics], str]


@dataclass(frozen=True)
class Outlier:
    """Something that a user should look at. `names` are the tensors concerned, `layers` their layers."""

    kind: str
    weight: str
    state: str
    names: tuple[str, ...]
    layers: tuple[int, ...]
    text: str


def find_outliers(weights: Sequence[WeightStatistics]) -> Iterator[Outlier]:
    """Yield the outliers, the worst first: NaN and infinities, zeros, norms, single elements."""
    parameters = [weight for weight in weights if weight.state == PARAM]
    yield from _folded("nan", [w for w in weights if w.num_nan], _nan)
    yield from _folded("inf", [w for w in weights if w.num_inf], _inf)
    yield from _folded("zero", [w for w in parameters if w.zeros == w.numel], lambda _: "all zero")
    yield from _folded("dead rows", [w for w in parameters if w.dead_rows and w.zeros < w.numel], _dead)
    sparse = [w for w in parameters if ZEROS <= w.share_of_zeros < 1 and not w.dead_rows]
    yield from _folded("zeros", sparse, lambda w: f"{w.share_of_zeros:.0%} of its elements are zero")
    yield from _norms(weights)
    yield from _peaks(parameters)


def _one(kind: str, members: Sequence[WeightStatistics], text: str) -> Outlier:
    first = members[0]
    layers = tuple(dict.fromkeys(member.layer for member in members if member.layer is not None))
    return Outlier(kind, first.weight, first.state, tuple(member.name for member in members), layers, text)


def _folded(kind: str, statistics: Sequence[WeightStatistics], words: Words) -> Iterator[Outlier]:
    """Yield one outlier per weight, its layers folded; where their texts differ, that of the first is given."""
    for members in folded(statistics):
        names = fold(member.name for member in members)
        texts = list(dict.fromkeys(map(words, members)))
        text = texts[0] if len(texts) == 1 else f"{texts[0]} in the first of {len(members)}"
        yield _one(kind, members, f"{names[0]}: {text}")


def _nan(weight: WeightStatistics) -> str:
    return f"{counted(weight.num_nan, 'element is', 'elements are')} NaN{_at(weight)}"


def _inf(weight: WeightStatistics) -> str:
    return f"{counted(weight.num_inf, 'element is', 'elements are')} infinite{_at(weight)}"


def _at(weight: WeightStatistics) -> str:
    if weight.first_bad is None:
        return ""
    return f", {'at' if weight.num_nan + weight.num_inf == 1 else 'the first at'} {list(weight.first_bad)}"


def _dead(weight: WeightStatistics) -> str:
    rows, count = weight.dead_rows, weight.num_dead_rows
    total = weight.shape[0]
    if len(rows) == 1 and rows[0].stop == total:
        return f"the last {counted(count, 'row', 'rows')} of {total} are zero, as padding is"
    spans = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in rows[:SHOWN_RANGES])
    more = ", ..." if len(rows) > SHOWN_RANGES else ""
    return f"{counted(count, 'row', 'rows')} of {total} {'is' if count == 1 else 'are'} zero: {spans}{more}"


def _norms(weights: Sequence[WeightStatistics]) -> Iterator[Outlier]:
    """Yield weights whose norm is not the one expected from the same weight in the neighbouring layers."""
    for siblings in folded(weight for weight in weights if weight.layer is not None and weight.norm > 0):
        expected = _expected(siblings)
        if expected is None:
            continue
        far = np.log([weight.norm for weight in siblings]) - expected
        deviation = max(MAD_TO_SIGMA * float(np.median(np.abs(far))), LEAST_DEVIATION)
        for weight, log in zip(siblings, map(float, far), strict=True):
            z = log / deviation
            if abs(z) > ROBUST_Z and abs(log) > math.log(LEAST_FACTOR):
                others = "neighbouring layers" if weight.expert is None else "the experts of neighbouring layers"
                words = f"{math.exp(log):.3g} times what {others} suggest (robust z = {z:+.1f})"
                yield _one("norm", [weight], f"{weight.name}: norm {weight.norm:.3g}, {words}")


def _expected(siblings: Sequence[WeightStatistics]) -> NDArray[np.float64] | None:
    """Return the logarithm of each norm as expected from the neighbouring layers; None if there are too few layers.

    A layer of experts counts by the median of its experts, which is also used for these experts themselves.
    """
    by_layer: dict[int, list[float]] = {}
    for weight in siblings:
        by_layer.setdefault(weight.layer or 0, []).append(math.log(weight.norm))
    if len(by_layer) < LEAST_LAYERS:
        return None
    layers = np.array(sorted(by_layer))
    medians = np.array([float(np.median(by_layer[layer])) for layer in layers])
    own = {int(layer): len(by_layer[layer]) > 1 for layer in layers}
    line = {int(layer): _continued(layers - layer, medians, with_own=own[int(layer)]) for layer in layers}
    return np.array([line[weight.layer or 0] for weight in siblings])


def _continued(away: NDArray[Any], values: NDArray[np.float64], *, with_own: bool) -> float:
    """Return the value at distance 0 on a line through the nearest others, robust to outliers (Theil and Sen)."""
    others = np.flatnonzero((away != 0) | with_own)
    nearest = others[np.argsort(np.abs(away[others]), kind="stable")[:AROUND]]
    x, y = away[nearest], values[nearest]
    first, second = np.triu_indices(len(nearest), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    return float(np.median(y - slope * x))


def _peaks(weights: Sequence[WeightStatistics]) -> Iterator[Outlier]:
    """Yield weights with an element far larger than all of its others."""
    for weight in weights:
        if weight.peak > PEAK and weight.numel >= PEAK_ELEMENTS and weight.largest_at is not None:
            what = f"{weight.largest:.3g} at {list(weight.largest_at)}"
            yield _one("peak", [weight], f"{weight.name}: {what} is {weight.peak:.0f} times its rms")
