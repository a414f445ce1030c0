"""Requests that a run end early: by a signal, as clusters send it before they take machines back, or by the clock.

SIGTERM and SIGUSR1 are noted when they come and acted on after the step in which any rank got one: the run saves a
checkpoint and ends in order, with exit code 0. Started again, it goes on.
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
CLOCK = 1  # stands for the time that is up: no signal has this number that is asked for here


class StopRequest:
    """Whether a run shall end after this step. Signals are noted within its scope, in the main thread.

    `reason` says why, once the ranks have agreed that it shall.
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
            device: for the one number that is exchanged, where the process group cannot do that in host memory.
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
        """Host memory where there is gloo: nothing then waits for a GPU."""
        return "cpu" if "gloo" in dist.get_backend_config() else device
