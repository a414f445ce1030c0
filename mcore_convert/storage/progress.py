"""Progress: how many bytes of how many are done, counted from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]


class Meter:
    """Counts bytes from any thread and tells `progress` how many of all are done."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)
