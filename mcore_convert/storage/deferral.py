"""Deferred signals: a sequence of steps that create or remove something is not interrupted between two of them.

A signal handler that raises, as those of Ctrl-C and of the command do, may do so between any two instructions: after
a file was created and before it is recorded, or in the first line of the code that would have removed it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Deferral:
    """A scope in which these signals are deferred until its end, or until it admits them.

    The handlers stay wrapped until the end, and one flag says whether they are deferred, so that all change at once.
    Threads other than the main one are never interrupted by signals, and defer nothing.

    An admitted signal may still be handled in the line that calls `hold`. So that line has a `finally` of its own,
    inside the one that cleans up.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._came: int | None = None
        self._handlers: dict[int, Callable[..., Any]] = {}

    def __enter__(self) -> Deferral:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._handlers = {number: each for number, each in handlers.items() if callable(each)}
            try:
                for number in self._handlers:
                    signal.signal(number, self._handle)
            except BaseException:  # a signal during this loop
                self._give_back()
                raise
        self._waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = False
        self._give_back()
        self._deliver()

    def admit(self) -> None:
        """Admit signals from here on; one that was deferred is raised now."""
        self._waiting = False
        self._deliver()

    def hold(self) -> None:
        """Defer signals from here on."""
        self._waiting = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._waiting:
            self._waiting = True  # the next signal must not interrupt the clean-up after a handler that raises
            self._handlers[number](number, frame)
            self._waiting = False
        elif self._came is None:
            self._came = number

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _deliver(self) -> None:
        came, self._came = self._came, None
        if came is not None:
            signal.raise_signal(came)
