"""Signals that wait: what several steps make, or take back, is not to be left half done between two of them.

A handler that raises, as those of Ctrl-C and of the command do, may do so between any two instructions: after a file
was made and before anybody remembers it, or in the first line of what would have removed it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Deferral:
    """A scope in which these signals wait for its end, or for a moment at which it admits them.

    The handlers stay wrapped until the end, and one switch says whether they wait: no signal can come between two of
    them. Threads beside the main one are never interrupted, and have nothing to wait for.

    What is admitted may still come in the line that calls `hold`. So that line has a `finally` of its own, within the
    one that cleans up.
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
            except BaseException:  # one that came just now
                self._give_back()
                raise
        self._waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = False
        self._give_back()
        self._deliver()

    def admit(self) -> None:
        """Let signals come from here on; one that has waited comes now."""
        self._waiting = False
        self._deliver()

    def hold(self) -> None:
        """Let signals wait from here on."""
        self._waiting = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._waiting:
            self._waiting = True  # what a handler raises cleans up on its way, and the next signal waits for that
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
