"""The parts of what a function does: progress shows their names, and the log keeps their times."""

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
    """A scope in which one thing is done. Phases follow one another; none is inside another.

    Args:
        progress: called with bytes by whoever moves them. Where it also has a method `phase`, that gets the name here,
            and None at the end.
        name: what is done, as `copying`.
        nbytes: how much is moved, for the log.
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
    """The progress of a part of a larger task: `before` bytes are done, of `total`."""

    def __init__(self, progress: Progress, before: int, total: int) -> None:
        self._progress, self._before, self._total = progress, before, total
        self.phase = getattr(progress, "phase", None)

    def __call__(self, done: int, _: int) -> None:
        self._progress(self._before + done, self._total)
