"""`loss.png`: the curves of a run, from its `metrics.jsonl`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from mcore_convert.checkpoints.metrics import METRICS
from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.storage.disk import write_whole
from train_entry.report.jsonl import read
from train_entry.report.rows import Row

INK, QUIET, GRID = "#1f2937", "#6b7280", "#e5e7eb"
TRAIN, RATE, BAD = "#2563eb", "#0f766e", "#dc2626"
EVALUATIONS = ("#ea580c", "#9333ea", "#0891b2", "#65a30d")
SMOOTHED = 100  # steps of a run per step of the smoothing window to each side
LEAST_SMOOTHED = 20  # smallest number of steps with a smoothed curve
SPIKE = 1.3  # losses above this multiple of both the first and the common losses are cut off

Numbers = NDArray[np.float64]


def plot(run_dir: Path) -> Path:
    """Draw `loss.png` in a run directory; the run may be unfinished.

    Raises:
        UnreadableCheckpoint: there is no step in its `metrics.jsonl`.
    """
    source = run_dir / METRICS
    rows = read(source) if source.is_file() else []
    steps = [row for row in rows if "evaluation" not in row]
    if not steps:
        raise UnreadableCheckpoint(f"`{source}` has no steps to draw")
    at, losses = np.array([row["iteration"] for row in steps]), _numbers(row["loss"] for row in steps)
    tokens = _tokens(steps)
    figure = Figure(figsize=(10, 6), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    _draw_losses(above, at, losses, _last(steps))
    _draw_evaluations(above, [row for row in rows if "evaluation" in row])
    _draw_rate(below, at, _numbers(row["lr"] for row in steps))
    for axes in (above, below):
        _dress(axes)
    if len(at) == 1:
        below.set_xlim(at[0] - 1, at[0] + 1)
    _add_tokens(above, tokens[-1] / at[-1])
    above.legend(frameon=False, labelcolor=INK, fontsize=12, loc="upper right")
    above.set_title(run_dir.resolve().name, loc="left", color=INK, fontsize=16, fontweight="bold", pad=10)
    seen = f"{at[-1]:,} steps, {_short(tokens[-1])} tokens" if at[-1] > 1 else f"1 step, {_short(tokens[-1])} tokens"
    above.set_title(seen, loc="right", color=QUIET, fontsize=12, pad=10)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    picture = run_dir / "loss.png"
    write_whole(picture, drawn.getvalue())
    return picture


def _last(steps: Sequence[Row]) -> str:
    """Return the last loss in words, as in the line of its step and in a model card: of the step, not of the curve."""
    row = next((row for row in reversed(steps) if not row.get("skipped")), steps[-1])
    loss = row["loss"]
    return "training: " + ("not a number" if loss is None else f"{loss:.4f}")


def _draw_losses(axes: Axes, at: NDArray[Any], losses: Numbers, last: str) -> None:
    is_number = np.isfinite(losses)
    if len(at) < LEAST_SMOOTHED:
        axes.plot(at, losses, color=TRAIN, linewidth=2.2, marker="o", markersize=5, label=last)
    else:
        smooth = smoothed(losses, max(4, len(at) // SMOOTHED))
        axes.plot(at, losses, color=TRAIN, linewidth=0.9, alpha=0.3)
        axes.plot(at, smooth, color=TRAIN, linewidth=2.2, label=last)
    if not is_number.all():
        foot = axes.get_xaxis_transform()  # at the bottom of the plot, whatever the losses are
        bad = at[~is_number]
        axes.plot(bad, [0.03] * len(bad), "x", color=BAD, transform=foot, label=f"not a number: {len(bad)}")
    if is_number.any():
        common = SPIKE * max(losses[is_number][0], np.percentile(losses[is_number], 99))
        lowest, highest = losses[is_number].min(), losses[is_number].max()
        if highest > common > lowest:
            axes.set_ylim(lowest - 0.05 * (common - lowest), common)
    axes.set_ylabel("loss per token", color=QUIET, fontsize=13)


def _draw_evaluations(axes: Axes, rows: Sequence[Row]) -> None:
    for number, name in enumerate(dict.fromkeys(row["evaluation"] for row in rows)):
        last = {row["iteration"]: row["loss"] for row in rows if row["evaluation"] == name}
        losses = _numbers(last.values())
        axes.plot(
            list(last),
            losses,
            color=EVALUATIONS[number % len(EVALUATIONS)],
            marker="o",
            markersize=7,
            markeredgecolor="white",
            linewidth=1,
            linestyle=":",
            label=f"{name}: {losses[-1]:.4f}",
            zorder=3,
        )


def _draw_rate(axes: Axes, at: NDArray[Any], rates: Numbers) -> None:
    highest = float(np.nanmax(rates))
    axes.plot(at, rates, color=RATE, linewidth=1.8, marker="o" if len(at) < LEAST_SMOOTHED else None, markersize=4)
    axes.set_ylim(0, max(highest * 1.15, 1e-12))
    marks = {highest: f"{highest:.1e}".replace("e-0", "e-"), 0.0: "0"}
    axes.set_yticks(list(marks), list(marks.values()))
    axes.set_ylabel("learning\nrate", color=QUIET, fontsize=13)
    axes.set_xlabel("step", color=QUIET, fontsize=13)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _add_tokens(axes: Axes, per_step: float) -> None:
    """Add a second scale at the top: the tokens that the model has processed."""

    def tokens_of(step: Any) -> Any:
        return step * per_step

    def step_of(tokens: Any) -> Any:
        return tokens / per_step

    top = axes.secondary_xaxis("top", functions=(tokens_of, step_of))
    top.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    top.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(tokens)))
    top.set_xlabel("tokens", color=QUIET, fontsize=13)
    top.tick_params(colors=QUIET, labelsize=12, length=0)
    top.spines["top"].set_visible(False)


def _dress(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=QUIET, labelsize=12, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def smoothed(values: Numbers, reach: int) -> Numbers:
    """Return the mean of the values around each one, weighted by nearness, up to `reach` away.

    At the beginning, where a loss falls steeply, the window is as short ahead as it is back; at the end it is not.
    Values that are not finite are left out, and stay so.
    """
    is_number = np.isfinite(values)
    half = max(1, reach // 2)
    return np.where(is_number, _means(_means(values, half), half), np.nan)


def _means(values: Numbers, reach: int) -> Numbers:
    is_number = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(is_number, values, 0))))
    counts = np.concatenate(([0], np.cumsum(is_number)))
    at = np.arange(len(values))
    near = np.minimum(reach, at)
    first, last = at - near, np.minimum(at + near + 1, len(values))
    with np.errstate(invalid="ignore"):  # 0 / 0 gives NaN, as intended
        return np.asarray((sums[last] - sums[first]) / (counts[last] - counts[first]))


def _tokens(steps: Sequence[Row]) -> Numbers:
    """Return the tokens processed after each step. Steps before the first row count like that one."""
    before = (steps[0]["iteration"] - 1) * steps[0]["num_tokens"]
    return np.cumsum(_numbers(row["num_tokens"] for row in steps)) + float(before)


def _numbers(values: Any) -> Numbers:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _short(count: float) -> str:
    """Return a count of tokens in short form: `0`, `500`, `2k`, `16.4M`, `1.5B`."""
    power = 0
    while count >= 999.5 and power < 4:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{('', 'k', 'M', 'B', 'T')[power]}"
