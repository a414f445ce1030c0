"""Heat maps of values: a row per weight, a column per layer, a choice of measures; weights without layer are apart.

Colours are steps on a scale; they are computed here, so that the page only paints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic

from mcore_convert.comparison.change import Change, total_relative
from mcore_convert.inspection.outliers import Outlier
from mcore_convert.inspection.statistics import WeightStatistics, total_rms
from mcore_convert.spec.names import PARAM
from mcore_convert.text.grouping import Described, folded, in_layers
from mcore_convert.text.scale import linear, logarithmic

STEPS = 9  # of the colour scale; a page has a colour for each
DIGITS = 5  # of a number in a page

Data = dict[str, Any]
Row = tuple[str, str]  # a weight and a state


@dataclass(frozen=True)
class Measure(Generic[Described]):
    """Measure to colour by: its `value` for the tensors of one weight in one layer (several with experts).

    `style` is the format of a value: `number`, `percent` or `count`; the last two are coloured on a linear scale,
    numbers on a logarithmic one. `per_row`: the scale compares the layers of one weight, not all weights.
    """

    key: str
    label: str
    style: str
    value: Callable[[Sequence[Described]], float]
    explained: str
    per_row: bool = False


def _norm(of: Sequence[WeightStatistics]) -> float:
    return math.hypot(*(weight.norm for weight in of))


def _share(parts: Iterable[int], of: Sequence[WeightStatistics] | Sequence[Change]) -> float:
    return sum(parts) / max(1, sum(each.numel for each in of))


STATISTICS: tuple[Measure[WeightStatistics], ...] = (
    Measure("rms", "rms", "number", total_rms, "root of the mean square", per_row=True),
    Measure("norm", "norm", "number", _norm, "L2 norm", per_row=True),
    Measure("largest", "largest", "number", lambda of: max(w.largest for w in of), "largest magnitude", per_row=True),
    Measure("zeros", "zeros", "percent", lambda of: _share((w.zeros for w in of), of), "elements that are zero"),
    Measure("bad", "NaN, inf", "count", lambda of: sum(w.num_nan + w.num_inf for w in of), "elements not finite"),
)
CHANGES: tuple[Measure[Change], ...] = (
    Measure("relative", "relative change", "number", total_relative, "norm of b - a over that of a"),
    Measure("share", "changed", "percent", lambda of: _share((c.num_changed for c in of), of), "elements that changed"),
    Measure("largest", "largest", "number", lambda of: max(c.largest for c in of), "largest change of an element"),
    Measure("bad", "NaN, inf", "count", lambda of: sum(c.num_bad[1] for c in of), "elements of b that are not finite"),
)


def heat_data(
    members: Sequence[Described], measures: Sequence[Measure[Described]], outliers: Sequence[Outlier] = ()
) -> Data:
    """Return the rows of a heat map, their values and steps, and the notes on single cells."""
    rows = {(of[0].weight, of[0].state): of for of in folded(members)}
    layers = list(in_layers(members))
    layered = {row: of for row, of in rows.items() if of[0].layer is not None}
    alone = {row: of for row, of in rows.items() if of[0].layer is None}
    held = {row: in_layers(of) for row, of in layered.items()}
    # several tensors with experts, none where a layer lacks the weight
    cells = {row: [of.get(layer, []) for layer in layers] for row, of in held.items()}
    values = {m.key: {row: [_value(m, cell) for cell in of] for row, of in cells.items()} for m in measures}
    steps = {measure.key: _steps(measure, values[measure.key]) for measure in measures}
    return {
        "steps": STEPS,
        "layers": layers,
        "measures": _measures(measures),
        "rows": [
            {
                "name": name,
                "state": state,
                "shape": layered[name, state][0].shape,
                "each": max(map(len, cells[name, state])),
                "values": {measure.key: [_short(v) for v in values[measure.key][name, state]] for measure in measures},
                "steps": {measure.key: steps[measure.key][name, state] for measure in measures},
                "notes": _notes(outliers, (name, state)),
            }
            for name, state in layered
        ],
        "alone": [
            {
                "name": name,
                "state": state,
                "shape": of[0].shape,
                "values": {measure.key: _short(_value(measure, of)) for measure in measures},
                "notes": [o.text for o in outliers if (o.weight, o.state) == (name, state)],
            }
            for (name, state), of in alone.items()
        ],
        "states": list(dict.fromkeys((PARAM, *(state for _, state in rows)))),
    }


def expert_data(
    members: Sequence[Described], measures: Sequence[Measure[Described]], outliers: Sequence[Outlier] = ()
) -> Data | None:
    """Return the heat maps of experts: for each of their weights, a row per layer and a column per expert.

    Each map has its own scale, over all of its layers. None without experts.
    """
    matrices = []
    for of in folded(each for each in members if each.expert is not None and each.layer is not None):
        layers = in_layers(of)
        count = 1 + max(each.expert or 0 for each in of)
        cells = [{each.expert: each for each in row} for row in layers.values()]
        values = {
            m.key: [[_value(m, [row[e]] if e in row else []) for e in range(count)] for row in cells] for m in measures
        }
        matrices.append(
            {
                "name": of[0].weight,
                "state": of[0].state,
                "shape": of[0].shape,
                "layers": list(layers),
                "count": count,
                "values": {key: [list(map(_short, row)) for row in rows] for key, rows in values.items()},
                "steps": {m.key: _scaled_together(m, values[m.key]) for m in measures},
                "notes": _expert_notes(outliers, {each.name: each for each in of}, of[0].state),
            }
        )
    return {"steps": STEPS, "measures": _measures(measures), "matrices": matrices} if matrices else None


def _measures(measures: Sequence[Measure[Described]]) -> list[Data]:
    return [
        {"key": m.key, "label": m.label, "style": m.style, "explained": m.explained, "perRow": m.per_row}
        for m in measures
    ]


def _expert_notes(outliers: Sequence[Outlier], members: Mapping[str, Described], state: str) -> dict[str, list[str]]:
    """Return the notes on single experts, by layer and expert."""
    notes: dict[str, list[str]] = {}
    for outlier in outliers:
        for each in (members[name] for name in outlier.names if outlier.state == state and name in members):
            notes.setdefault(f"{each.layer},{each.expert}", []).append(outlier.text)
    return notes


def _value(measure: Measure[Described], cell: Sequence[Described]) -> float | None:
    return measure.value(cell) if cell else None


def _steps(measure: Measure[Described], values: Mapping[Row, list[float | None]]) -> dict[Row, list[int | None]]:
    """Return the steps of every row, on one scale per row or on one for all."""
    if measure.per_row:
        return {row: _scaled(measure, of) for row, of in values.items()}
    return dict(zip(values, _scaled_together(measure, [*values.values()]), strict=True))


def _scaled_together(measure: Measure[Described], rows: Sequence[Sequence[float | None]]) -> list[list[int | None]]:
    """Return the steps of rows on a common scale."""
    every = iter(_scaled(measure, [*chain(*rows)]))
    return [list(islice(every, len(row))) for row in rows]


def _scaled(measure: Measure[Described], listed: Sequence[float | None]) -> list[int | None]:
    return logarithmic(listed, STEPS) if measure.style == "number" else linear(listed, STEPS)


def _notes(outliers: Sequence[Outlier], row: Row) -> dict[int, list[str]]:
    """Return the notes on the layers of a weight."""
    notes: dict[int, list[str]] = {}
    for outlier in outliers:
        if (outlier.weight, outlier.state) == row:
            for layer in outlier.layers:
                notes.setdefault(layer, []).append(outlier.text)
    return notes


def _short(value: float | None) -> float | str | None:
    """Return a number with few digits; infinity, which JSON does not have, as a word."""
    if value is None or math.isnan(value):
        return None
    return "infinite" if math.isinf(value) else float(f"{value:.{DIGITS}g}")
