"""A trace of a few steps by torch's profiler, for a browser: chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

SKIPPED, TRACED = 3, 2  # steps of the process: those that compile and allocate, then those that are traced


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[Callable[[], None]]:
    """Scope that is traced into `path`; nothing is traced if that is None. Call the yielded function after each step.

    The file appears after the traced steps; a shorter run leaves none.
    """
    if path is None:
        yield lambda: None
        return

    def write(profiler: torch.profiler.profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))

    schedule = torch.profiler.schedule(wait=SKIPPED - 1, warmup=1, active=TRACED, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True) as profiler:
        yield profiler.step
