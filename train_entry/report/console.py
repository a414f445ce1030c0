"""Messages and metrics on stderr: a line every few steps, the same in a terminal and in a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from train_entry.report.metrics import Evaluation, Interval, warnings_of
from train_entry.report.rows import Row

SHORT = {"forward-backward": "fwd-bwd", "optimizer": "opt"}  # of phases, so that a line fits
LEAST_SHARE = 0.005  # smallest share of a phase in a line
Cell = tuple[str, str, str]  # label, number, unit
DIM, RED, PLAIN = "\033[2m", "\033[31m", "\033[0m"


def write(text: str, stream: TextIO | None = None) -> None:
    """Write a text and a line end at once, so that the lines of ranks that share a terminal do not interleave."""
    stream = sys.stderr if stream is None else stream
    stream.write(f"{text}\n")
    stream.flush()


class Console:
    """Lines of a run of `total` steps. On a terminal the labels are dim."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total, self._stream = total, stream
        tty = (sys.stderr if stream is None else stream).isatty()
        self._colours = tty and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def steps(self, interval: Interval, rows: Sequence[Row]) -> None:
        """Write a line for the interval, after its warnings."""
        for warning in warnings_of(interval.steps):
            write(f"{self._in(RED, 'warning:')} {warning}", self._stream)
        step, speed = interval.newest, interval.speed
        norm = "-" if step.grad_norm is None else number(step.grad_norm)
        tokens, tokens_prefix = scaled(speed.tokens_per_second)
        flops, flops_prefix = scaled(speed.tflops * 1e12)
        cells = [
            self._step(step.iteration),
            ("loss", f"{interval.loss:<7.4f}", ""),
            ("lr", f"{step.lr:.2e}", ""),
            ("grad", f"{norm:<6}", ""),
            ("", f"{tokens + tokens_prefix:>5}", "tok/s"),
            ("", f"{flops:>4}", f"{flops_prefix}FLOP/s"),
        ]
        if speed.mfu is not None:
            cells.append(("MFU", f"{speed.mfu:5.1%}", ""))
        cells.append(("", f"{in_bytes(memory_shown(interval.memory)):>7}", ""))
        if interval.eta is not None and step.iteration < self._total:
            cells.append(("ETA", f"{in_time(interval.eta):<6}", ""))
        cells += [(SHORT.get(name, name), f"{share:.0%}", "") for name, share in shares(interval).items()]
        self._write(cells)

    def evaluation(self, evaluation: Evaluation, row: Row) -> None:
        """Write a line for the evaluation."""
        cells = [
            self._step(evaluation.iteration),
            (f"{evaluation.name} loss", f"{evaluation.loss:.4f}", ""),
            ("perplexity", number(evaluation.perplexity), ""),
            *((name, number(value), "") for name, value in evaluation.extra.items()),
        ]
        if evaluation.seconds is not None:
            cells.append(("", in_time(evaluation.seconds), ""))
        self._write(cells)

    def close(self) -> None:
        """Do nothing: no line is buffered."""

    def _step(self, iteration: int) -> Cell:
        return "step", f"{iteration:>{len(str(self._total))}}/{self._total}", ""

    def _write(self, cells: Sequence[Cell]) -> None:
        shown = [
            " ".join(part for part in (self._in(DIM, name), value, self._in(DIM, unit)) if part)
            for name, value, unit in cells
        ]
        write("  ".join(shown).rstrip(), self._stream)

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{PLAIN}" if self._colours and text else text


def shares(interval: Interval) -> dict[str, float]:
    """Return the share of each phase in the elapsed time; small ones are left out."""
    whole = interval.seconds + sum(interval.phases.get(name, 0.0) for name in ("save", "eval"))
    parts = {name: seconds / max(whole, 1e-9) for name, seconds in interval.phases.items()}
    return {name: part for name, part in sorted(parts.items(), key=lambda item: -item[1]) if part >= LEAST_SHARE}


def memory_shown(memory: Mapping[str, int]) -> int:
    """Return the memory to show in a line: that of tensors on a GPU, else that of the process."""
    return memory.get("allocated", memory.get("resident", 0))


def scaled(value: float) -> tuple[str, str]:
    """Return three digits and a prefix: `('12.3', 'k')`."""
    units = ("", "k", "M", "G", "T", "P")
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:#.3g}".rstrip("."), units[power]


def number(value: float) -> str:
    """Return three digits of a number of any size: `1.23`, `256`, `0.0302`, `4.1e+05`."""
    return f"{value:#.3g}".rstrip(".") if 1e-2 <= abs(value) < 1e4 else f"{value:.1e}" if value else "0"


def in_bytes(count: float) -> str:
    """Return a number of bytes: `41.2 GB`."""
    shown, unit = scaled(count)
    return f"{shown} {unit}B"


def in_time(seconds: float) -> str:
    """Return a length of time in its two largest units: `4.2s`, `3m05s`, `2h07m`, `5d03h`."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    return f"{hours}h{minute:02}m" if hours else f"{minute}m{second:02}s"
