"""Times of the phases of a step: on a GPU by its own clock, which is waited for only when it is read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

# Time inside of these is not part of a step: it counts as theirs, whatever phases they contain.
WHOLE = ("save", "eval")
MAX_SEGMENTS = 512  # kept at most, before finished ones are summed up


class Clock(Protocol):
    """Clock that marks moments, and later measures the time between them."""

    def now(self) -> Any:
        """Return a mark of this moment."""

    def is_past(self, mark: Any) -> bool:
        """Return whether `seconds` up to this mark would not wait."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to another."""


class HostClock:
    """Clock of the processor."""

    def now(self) -> float:
        """Return a mark of this moment."""
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        """Return True."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds from one mark to another."""
        return end - start


class CudaClock:
    """Clock of the current CUDA stream: a mark is passed when the work before it is done."""

    def now(self) -> torch.cuda.Event:
        """Return a mark after all work that was submitted to the stream so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """Return whether the stream has passed the mark."""
        return bool(mark.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds from one mark to another; waits until the stream has passed the second."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class Phases:
    """Times by phase: `with phases("data"): ...` counts the time inside as that phase.

    Time belongs to the innermost phase: `data` within `forward-backward` is taken from it. Only `save` and `eval` keep
    the time inside of them. On a GPU the time is that of its stream: a phase that only submits work costs the time of
    that work, and waiting on the host counts only while the stream is idle.
    """

    def __init__(self, device: torch.device | str = "cpu", *, clock: Clock | None = None) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self._clock: Clock = clock or (CudaClock() if on_gpu else HostClock())
        self._open: list[str] = []  # open phases, outermost first; the last one gets the time
        self._since: Any = None
        self._segments: list[tuple[str, Any, Any]] = []
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Scope whose time counts as the phase `name`."""
        self._turn()
        self._open.append(self._open[-1] if self._open and self._open[-1] in WHOLE else name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, open ones up to now; waits for the device."""
        self._turn()
        self._sum_up(len(self._segments))
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _turn(self) -> None:
        """End the segment of the innermost open phase, and begin the next one."""
        now = self._clock.now()
        if self._open:
            self._segments.append((self._open[-1], self._since, now))
        self._since = now
        if len(self._segments) >= MAX_SEGMENTS:
            ahead = (number for number, (_, _, end) in enumerate(self._segments) if not self._clock.is_past(end))
            self._sum_up(next(ahead, len(self._segments)))

    def _sum_up(self, count: int) -> None:
        for name, start, end in self._segments[:count]:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.seconds(start, end)
        del self._segments[:count]
