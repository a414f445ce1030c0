"""Progress: how many bytes of how many are done, counted from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]


class Meter:
    """Counts bytes from any thread and tells `progress` how many of all are done.

    `stop` is set by whoever wants the threads to end.
    """

    def __init__(self, total: int, progress: Progress | None, done: int = 0) -> None:
        self._total, self._progress = total, progress
        self.done, self._shared = done, False
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None and not self._shared:
                self._progress(self.done, self._total)

    def show(self, done: int) -> None:
        """Tell `progress` how many bytes several processes have done; this counter's own are not told from then on."""
        with self._lock:
            self._shared = True
            if self._progress is not None:
                self._progress(done, self._total)
