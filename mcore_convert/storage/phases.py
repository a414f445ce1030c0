"""Phases of a public function: progress shows their names, and the log records their times."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from mcore_convert.storage.progress import Progress
from mcore_convert.text.quantities import in_bytes

logger = logging.getLogger("mcore_convert")


@contextlib.contextmanager
def phase(progress: Progress | None, name: str, nbytes: int = 0) -> Iterator[None]:
    """A scope that is one phase. Phases follow one another; they are never nested.

    Args:
        progress: called with bytes by the code that moves them. If it also has a method `phase`, that is called with
            the name here, and with None at the end.
        name: name of the phase, such as `copying`.
        nbytes: how many bytes are moved, for the log.
    """
    report = getattr(progress, "phase", None)
    start = time.monotonic()
    if report is not None:
        report(name)
    try:
        yield
    finally:
        if report is not None:
            report(None)
    seconds = time.monotonic() - start
    rate = f", {in_bytes(nbytes)} at {in_bytes(nbytes / max(seconds, 1e-9))}/s" if nbytes else ""
    logger.info("%s: %.2f s%s", name, seconds, rate)


class Part:
    """Progress of a part of a larger task, of which `before` bytes of `total` are done."""

    def __init__(self, progress: Progress, before: int, total: int) -> None:
        self._progress, self._before, self._total = progress, before, total
        self.phase = getattr(progress, "phase", None)

    def __call__(self, done: int, _: int) -> None:
        self._progress(self._before + done, self._total)
