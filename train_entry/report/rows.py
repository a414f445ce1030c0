"""Metrics in stored form: rows of names and numbers."""

from __future__ import annotations

from typing import Any

from train_entry.report.metrics import Evaluation, Interval, Rates, Step

Row = dict[str, Any]


def row_of_step(step: Step, rates: Rates) -> Row:
    """Return the stored form of a step: one level of numbers, and mappings of numbers."""
    speed = rates.speed(step.num_tokens, step.seconds)
    row = {
        "iteration": step.iteration,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "lr": step.lr,
        "num_tokens": step.num_tokens,
        "num_samples": step.num_samples,
        "seconds": step.seconds,
        "tokens_per_second": speed.tokens_per_second,
        "tflops": speed.tflops,
        "mfu": speed.mfu,
        "loss_scale": step.loss_scale,
        "skipped": step.skipped,
        "extra": dict(step.extra),
    }
    return {name: value for name, value in row.items() if value is not None and value != {}}


def rows_of(interval: Interval, rates: Rates) -> list[Row]:
    """Return the stored form of an interval's steps; the newest has its memory, and the seconds of its phases."""
    rows = [row_of_step(step, rates) for step in interval.steps]
    rows[-1] |= {"memory": dict(interval.memory), "phases": dict(interval.phases)}
    return rows


def row_of_evaluation(evaluation: Evaluation) -> Row:
    """Return the stored form of an evaluation: the field `evaluation` distinguishes it from a step."""
    row = {
        "iteration": evaluation.iteration,
        "evaluation": evaluation.name,
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "num_tokens": evaluation.num_tokens,
        "seconds": evaluation.seconds,
        "extra": dict(evaluation.extra),
    }
    return {name: value for name, value in row.items() if value is not None and value != {}}


def scalars_of(row: Row) -> dict[str, float]:
    """Return the numbers of a row under the names in TensorBoard and Weights & Biases, group by group."""
    name = row.get("evaluation")
    if name is not None:
        shown = {"loss": row["loss"], "perplexity": row["perplexity"], **row.get("extra", {})}
        return {f"{name}/{key}": value for key, value in shown.items()}
    groups = {
        "train": {key: row[key] for key in ("loss", "grad_norm", "lr", "loss_scale") if key in row},
        "speed": {key: row[key] for key in ("tokens_per_second", "tflops", "mfu", "seconds") if key in row},
        "memory": row.get("memory", {}),
        "phases": row.get("phases", {}),
    }
    groups["train"] |= row.get("extra", {})
    return {f"{group}/{key}": value for group, numbers in groups.items() for key, value in numbers.items()}
