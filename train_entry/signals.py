"""Requests to end a run early: by a signal, which clusters send before they take machines back, or by the clock.

SIGTERM and SIGUSR1 are noted on arrival and acted on after the step in which any rank got one: the run saves a
checkpoint and ends in order, with exit code 0. Started again, it continues.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
CLOCK = 1  # means that the time is up: none of the handled signals has this number


class StopRequest:
    """Request to end a run after this step. Signals are noted within its scope, in the main thread.

    `reason` is set once the ranks have agreed to end.
    """

    def __init__(self, after_minutes: float | None = None) -> None:
        self.reason: str | None = None
        self._deadline = None if after_minutes is None else time.monotonic() + 60 * after_minutes
        self._after_minutes = after_minutes
        self._noted = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, device: torch.device | str = "cpu") -> bool:
        """Return whether any rank was asked to end. All ranks call it together, and get the same answer.

        Args:
            device: device of the one number that is exchanged, if the process group cannot exchange it in host memory.
        """
        if self.reason is None:
            late = self._deadline is not None and time.monotonic() > self._deadline
            reason = torch.tensor(self._noted or (CLOCK if late else 0), device=self._place(device))
            dist.all_reduce(reason, dist.ReduceOp.MAX)
            self.reason = self._named(int(reason))
        return self.reason is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number

    def _named(self, number: int) -> str | None:
        if number == 0:
            return None
        return f"{self._after_minutes} minutes are over" if number == CLOCK else signal.Signals(number).name

    @staticmethod
    def _place(device: torch.device | str) -> torch.device | str:
        """Return host memory if there is gloo, so that nothing waits for a GPU."""
        return "cpu" if "gloo" in dist.get_backend_config() else device
