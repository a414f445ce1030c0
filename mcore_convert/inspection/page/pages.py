"""The pages: what a checkpoint is, and what changed between two."""

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


def inspection_page(found: Inspection, opened: Opened, planned: Layout | None) -> str:
    """A page of everything that is known of a checkpoint, with the loss curve of its run where there is one."""
    metrics = find_metrics(Path(found.path))
    curve = curve_data(read_metrics(metrics), found.iteration) if metrics else None
    layouts = layout_data(opened.model, planned) if opened.model is not None else None
    heat = heat_data(found.statistics, STATISTICS, found.outliers) if found.statistics else None
    experts = expert_data(found.statistics, STATISTICS, found.outliers) if found.statistics else None
    path = Path(found.path)
    dims = opened.model.dims if opened.model is not None else None
    return render(
        "inspect.html.j2",
        ["layout.js", "ranks.js", "tensor.js", "layouts.js", "heat.js", "experts.js", "curve.js"],
        found=found,
        name=_name(path),
        kind=", ".join(filter(None, [found.family or "unknown family", _format(found)])),
        cards=_cards(found, dims, layouts),
        facts=[(name, value) for name, value in _facts(found, dims) if value not in (None, "")],
        notes=[line.replace("`", "") for line in (*found.notes, *found.refusals)],
        layouts=layouts,
        optimizer_words=_optimizer_words(layouts),
        heat=heat,
        experts=experts,
        table=_table(heat) if heat else [],
        outliers=found.outliers[:MOST_OUTLIERS],
        more_outliers=max(0, len(found.outliers) - MOST_OUTLIERS),
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
            for line in found.weights
        ],
    )


def comparison_page(found: Comparison) -> str:
    """A page of what changed."""
    heat = heat_data(found.changes, CHANGES)
    largest = max(found.changes, key=lambda change: change.largest, default=None)
    cards = [
        _card("Relative change", in_digits(found.relative), "norm of b - a over that of a"),
        _card("Elements", in_percent(found.share), "changed"),
        _card("Tensors", f"{found.num_changed:,}", f"of {len(found.changes):,} changed"),
    ]
    if largest is not None and largest.largest:
        cards.insert(2, _card("Largest", in_digits(largest.largest), f"in {largest.name}"))
    return render(
        "diff.html.j2",
        ["heat.js", "experts.js"],
        names=[_name(Path(side.path)) for side in (found.a, found.b)],
        sides=[_side(letter, side) for letter, side in (("a", found.a), ("b", found.b))],
        cards=cards,
        notes=found.notes,
        lists=[
            ("Only in a", fold(found.only_in_a)),
            ("Only in b", fold(found.only_in_b)),
            ("The configurations mean something else", [line.replace("`", "") for line in found.config_differences]),
        ],
        heat=heat,
        experts=expert_data(found.changes, CHANGES),
        table=_table(heat),
        most=[{"name": change.name, **in_words(change)} for change in found.most_changed(MOST_CHANGED)],
    )


def _name(path: Path) -> str:
    """What to call a checkpoint: its directory, or the run that the iteration belongs to."""
    parts = [part for part in path.absolute().parts if not re.fullmatch(r"iter_\d+|release|checkpoints", part)]
    return parts[-1] if parts else str(path)


def _card(name: str, value: str, more: str = "") -> Data:
    return {"name": name, "value": value, "more": more}


def _cards(found: Inspection, dims: Dims | None, layouts: Data | None) -> list[Data]:
    cards = [_card("Parameters", in_parameters(found.num_parameters), f"{found.num_parameters:,}")]
    if dims is not None:
        cards.append(_card("Layers", f"{dims.num_layers:,}", f"of {dims.hidden_size:,} hidden"))
    if found.vocab_size is not None:
        padded = found.padded_vocab_size
        more = f"padded to {padded:,}" if padded and padded != found.vocab_size else "not padded"
        cards.append(_card("Vocabulary", f"{found.vocab_size:,}", more))
    files = f"{found.num_files} file{'s' * (found.num_files != 1)}"
    cards.append(_card("Weights", in_bytes(found.nbytes), f"{', '.join(found.dtypes)} in {files}"))
    if found.quantised is not None:
        decoded = f"{found.quantised.dtype}, from {'; '.join(found.quantised.forms)}"
        cards.append(_card("Decoded", in_bytes(found.quantised.decoded), decoded))
    if found.optimizer:
        kept = in_bytes(layouts["optimizerBytes"] * found.num_parameters) if layouts else "kept"
        cards.append(_card("Optimizer", kept, found.optimizer))
    else:
        cards.append(_card("Optimizer", "none", "weights only"))
    if found.iteration is not None:
        cards.append(_card("Iteration", f"{found.iteration:,}", f"written by {found.written_by or 'Megatron-LM'}"))
    else:
        cards.append(_card("Family", found.family or "unknown", _format(found)))
    return cards


def _facts(found: Inspection, dims: Dims | None) -> list[tuple[str, Any]]:
    """What is known beside the cards; the architecture in the words of `config.json`."""
    layout = found.layout or {}
    # experts that are whole are worth a word where the rest is cut
    sizes = [(name, n) for name, n in layout.items() if name != "world_size" and (n != 1 or name == "etp")]
    told = ("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size", "architectures", "model_type")
    plain = {
        name: value
        for name, value in found.architecture.items()
        if name not in told and isinstance(value, int | float | str) and not isinstance(value, bool)
    }
    if not plain and dims is not None:
        names = ("num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "num_experts")
        plain = {name: value for name in names if (value := getattr(dims, name)) is not None}
    return [
        ("layout", ", ".join(f"{name} {size}" for name, size in sizes)),
        ("ranks", layout.get("world_size")),
        ("embeddings", None if found.tied is None else "tied" if found.tied else "untied"),
        *(
            (name, value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}")
            for name, value in plain.items()
        ),
    ]


def _format(found: Inspection) -> str:
    return found.format + (f" ({found.dialect} keys)" if found.dialect else "")


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
    """The numbers of a heat map: a line for each weight, its layers folded into a range."""
    rows: list[Data] = []
    for row in [*heat["rows"], *heat["alone"]]:
        is_alone = not isinstance(next(iter(row["values"].values())), list)
        cells = []
        for measure in heat["measures"]:
            found = row["values"][measure["key"]]
            values = [value for value in (found if isinstance(found, list) else [found]) if value is not None]
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
