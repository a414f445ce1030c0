"""The pages of a checkpoint, and of the changes between two."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_convert.checkpoints.identify import Opened
from mcore_convert.comparison.change import in_words
from mcore_convert.comparison.distance import Compared, Comparison
from mcore_convert.errors import fold
from mcore_convert.inspection.describe import Inspection
from mcore_convert.inspection.page.curve import curve_data, find_metrics, read_metrics
from mcore_convert.inspection.page.heat import CHANGES, STATISTICS, expert_data, heat_data
from mcore_convert.inspection.page.layouts import layout_data
from mcore_convert.inspection.page.render import render
from mcore_convert.spec.dims import Dims
from mcore_convert.spec.layout import Layout
from mcore_convert.spec.names import PARAM
from mcore_convert.text.quantities import in_bytes, in_digits, in_parameters, in_percent

MOST_OUTLIERS = 40
MOST_CHANGED = 12

Data = Mapping[str, Any]


def inspection_page(inspection: Inspection, opened: Opened, planned: Layout | None) -> str:
    """Return a page of all that is known of a checkpoint, with the loss curve of its run if there is one."""
    metrics = find_metrics(Path(inspection.path))
    curve = curve_data(read_metrics(metrics), inspection.iteration) if metrics else None
    layouts = layout_data(opened.model, planned) if opened.model is not None else None
    heat = heat_data(inspection.statistics, STATISTICS, inspection.outliers) if inspection.statistics else None
    experts = expert_data(inspection.statistics, STATISTICS, inspection.outliers) if inspection.statistics else None
    path = Path(inspection.path)
    dims = opened.model.dims if opened.model is not None else None
    return render(
        "inspect.html.j2",
        ["layout.js", "ranks.js", "tensor.js", "layouts.js", "heat.js", "experts.js", "curve.js"],
        inspection=inspection,
        name=_name(path),
        kind=", ".join(filter(None, [inspection.family or "unknown family", _format(inspection)])),
        cards=_cards(inspection, dims, layouts),
        facts=[(name, value) for name, value in _facts(inspection, dims) if value not in (None, "")],
        notes=[line.replace("`", "") for line in (*inspection.notes, *inspection.refusals)],
        layouts=layouts,
        optimizer_words=_optimizer_words(layouts),
        heat=heat,
        experts=experts,
        table=_table(heat) if heat else [],
        outliers=inspection.outliers[:MOST_OUTLIERS],
        more_outliers=max(0, len(inspection.outliers) - MOST_OUTLIERS),
        curve=curve,
        curve_words=_curve_words(curve),
        stored=[
            {
                "name": line.name,
                "shape": _shape(line.shape),
                "dtype": line.dtype,
                "count": line.count,
                "bytes": in_bytes(line.nbytes),
            }
            for line in inspection.weights
        ],
    )


def comparison_page(comparison: Comparison) -> str:
    """Return a page of the changes."""
    heat = heat_data(comparison.changes, CHANGES)
    largest = max(comparison.changes, key=lambda change: change.largest, default=None)
    cards = [
        _card("Relative change", in_digits(comparison.relative), "norm of b - a over that of a"),
        _card("Elements", in_percent(comparison.share), "changed"),
        _card("Tensors", f"{comparison.num_changed:,}", f"of {len(comparison.changes):,} changed"),
    ]
    if largest is not None and largest.largest:
        cards.insert(2, _card("Largest", in_digits(largest.largest), f"in {largest.name}"))
    return render(
        "diff.html.j2",
        ["heat.js", "experts.js"],
        names=[_name(Path(side.path)) for side in (comparison.a, comparison.b)],
        sides=[_side(letter, side) for letter, side in (("a", comparison.a), ("b", comparison.b))],
        cards=cards,
        notes=comparison.notes,
        lists=[
            ("Only in a", fold(comparison.only_in_a)),
            ("Only in b", fold(comparison.only_in_b)),
            (
                "The configurations mean something else",
                [line.replace("`", "") for line in comparison.config_differences],
            ),
        ],
        heat=heat,
        experts=expert_data(comparison.changes, CHANGES),
        table=_table(heat),
        most=[{"name": change.name, **in_words(change)} for change in comparison.most_changed(MOST_CHANGED)],
    )


def _name(path: Path) -> str:
    """Return the displayed name of a checkpoint: its directory, or the run that the iteration belongs to."""
    parts = [part for part in path.absolute().parts if not re.fullmatch(r"iter_\d+|release|checkpoints", part)]
    return parts[-1] if parts else str(path)


def _card(name: str, value: str, more: str = "") -> Data:
    return {"name": name, "value": value, "more": more}


def _cards(inspection: Inspection, dims: Dims | None, layouts: Data | None) -> list[Data]:
    cards = [_card("Parameters", in_parameters(inspection.num_parameters), f"{inspection.num_parameters:,}")]
    if dims is not None:
        cards.append(_card("Layers", f"{dims.num_layers:,}", f"of {dims.hidden_size:,} hidden"))
    if inspection.vocab_size is not None:
        padded = inspection.padded_vocab_size
        more = f"padded to {padded:,}" if padded and padded != inspection.vocab_size else "not padded"
        cards.append(_card("Vocabulary", f"{inspection.vocab_size:,}", more))
    files = f"{inspection.num_files} file{'s' * (inspection.num_files != 1)}"
    cards.append(_card("Weights", in_bytes(inspection.nbytes), f"{', '.join(inspection.dtypes)} in {files}"))
    if inspection.quantised is not None:
        decoded = f"{inspection.quantised.dtype}, from {'; '.join(inspection.quantised.forms)}"
        cards.append(_card("Decoded", in_bytes(inspection.quantised.decoded), decoded))
    if inspection.optimizer:
        kept = in_bytes(layouts["optimizerBytes"] * inspection.num_parameters) if layouts else "kept"
        cards.append(_card("Optimizer", kept, inspection.optimizer))
    else:
        cards.append(_card("Optimizer", "none", "weights only"))
    if inspection.iteration is not None:
        cards.append(
            _card("Iteration", f"{inspection.iteration:,}", f"written by {inspection.written_by or 'Megatron-LM'}")
        )
    else:
        cards.append(_card("Family", inspection.family or "unknown", _format(inspection)))
    return cards


def _facts(inspection: Inspection, dims: Dims | None) -> list[tuple[str, Any]]:
    """Return the facts beside the cards, the architecture as named in `config.json`."""
    layout = inspection.layout or {}
    # an `etp` of 1 is shown: experts are whole where the other weights are cut
    sizes = [(name, n) for name, n in layout.items() if name != "world_size" and (n != 1 or name == "etp")]
    shown_already = (
        "num_hidden_layers",
        "n_layer",
        "hidden_size",
        "n_embd",
        "vocab_size",
        "architectures",
        "model_type",
    )
    plain = {
        name: value
        for name, value in inspection.architecture.items()
        if name not in shown_already and isinstance(value, int | float | str) and not isinstance(value, bool)
    }
    if not plain and dims is not None:
        names = ("num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "num_experts")
        plain = {name: value for name in names if (value := getattr(dims, name)) is not None}
    return [
        ("layout", ", ".join(f"{name} {size}" for name, size in sizes)),
        ("ranks", layout.get("world_size")),
        ("embeddings", None if inspection.tied is None else "tied" if inspection.tied else "untied"),
        *(
            (name, value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}")
            for name, value in plain.items()
        ),
    ]


def _format(inspection: Inspection) -> str:
    return inspection.format + (f" ({inspection.dialect} keys)" if inspection.dialect else "")


def _optimizer_words(layouts: Data | None) -> str:
    if layouts is None:
        return ""
    each = layouts["optimizerBytes"]
    if layouts["optimizerKnown"]:
        return (
            f"The optimizer keeps {each} bytes for each element. The distributed optimizer spreads them over the "
            "replicas of data parallelism."
        )
    return f"There is no optimizer state here. Adam would keep {each} bytes for each element."


def _curve_words(curve: Data | None) -> str:
    if curve is None:
        return ""
    return (
        f"{curve['steps']:,} steps up to iteration {curve['lastIteration']:,}: "
        f"the loss went from {curve['first']} to {curve['last']}."
    )


def _table(heat: Data) -> list[Data]:
    """Return the numbers of a heat map: a line per weight, its layers folded into a range."""
    rows: list[Data] = []
    for row in [*heat["rows"], *heat["alone"]]:
        is_alone = not isinstance(next(iter(row["values"].values())), list)
        cells = []
        for measure in heat["measures"]:
            cell = row["values"][measure["key"]]
            values = [value for value in (cell if isinstance(cell, list) else [cell]) if value is not None]
            cells.append(_range(values, measure["style"]))
        name = row["name"] if row["state"] == PARAM else f"{row['name']} ({row['state']})"
        rows.append({"name": name, "shape": _shape(row["shape"]), "cells": cells, "alone": is_alone})
    return rows


def _range(values: Sequence[float | str], style: str) -> str:
    write = {"number": in_digits, "percent": in_percent, "count": "{:,.0f}".format}[style]
    words = [write(value) for value in sorted(v for v in values if not isinstance(v, str))]
    if any(isinstance(value, str) for value in values):
        words.append("infinite")
    if not words:
        return ""
    return words[0] if words[0] == words[-1] else f"{words[0]} - {words[-1]}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _side(letter: str, side: Compared) -> Data:
    path = Path(side.path)
    about = [side.format, side.family or "", "" if side.iteration is None else f"iteration {side.iteration:,}"]
    return {"letter": letter, "name": _name(path), "path": side.path, "about": ", ".join(filter(None, about))}
