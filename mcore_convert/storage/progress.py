"""Progress: bytes done and their total, counted from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]


class Meter:
    """Counter of bytes, for any thread, that calls `progress` with the bytes done and their total.

    `stop` is set to end the threads.
    """

    def __init__(self, total: int, progress: Progress | None, done: int = 0) -> None:
        self._total, self._progress = total, progress
        self.done, self._shared = done, False
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more bytes as done."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None and not self._shared:
                self._progress(self.done, self._total)

    def show(self, done: int) -> None:
        """Report the bytes that several processes have done; from then on this counter's own are not reported."""
        with self._lock:
            self._shared = True
            if self._progress is not None:
                self._progress(done, self._total)
