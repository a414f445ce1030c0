"""Filling of a plan's files from several threads; the journal notes each file once it is complete and on the disk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

from mcore_convert.conversion.beside import copy_together
from mcore_convert.conversion.plan import Copy, Plan
from mcore_convert.conversion.recording import Recording
from mcore_convert.errors import ConvertError
from mcore_convert.spec.family import Item
from mcore_convert.storage.disk import sync_data
from mcore_convert.storage.elements import Files
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.threads import Line, in_threads

BEYOND_HINT = "--dtype bfloat16 has the range of float32"
WRITE_BACK = 2**28  # bytes of a file after which write-back to the disk begins, while the next are copied


class Record(Protocol):
    """Order of the copies, and destination of complete files: `Journal`, or `SentFiles`."""

    stays: bool

    def work(self, plan: Plan, mine: Set[Path], stop: threading.Event) -> Iterator[tuple[Item, Sequence[Copy]]]:
        """Yield the copies of each weight into the files `mine`."""

    def add(self, path: Path, regions: Sequence[Sequence[Any]]) -> None:
        """Record a complete file."""


class Disk(Line):
    """Write-back of files while others are copied, so that the end waits for the disk alone."""

    def __init__(self, files: Files, journal: Record, recording: Recording) -> None:
        super().__init__()
        self._files, self._journal, self._recording = files, journal, recording
        self._written: Counter[Path] = Counter()

    def wrote(self, path: Path, nbytes: int) -> None:
        """Note that `nbytes` more bytes of a file were written."""
        written = self._written[path] + nbytes
        if written >= WRITE_BACK:
            written = 0
            file = self._files.writing(path)
            self.add(lambda: sync_data(file))
        self._written[path] = written

    def complete(self, path: Path) -> None:
        """Note that all of a file was written."""
        facts = self._recording.facts_of(path)
        self.add(lambda: self._journal.add(path, facts))


def fill(
    plan: Plan,
    mine: Set[Path],
    files: Files,
    meter: Meter,
    recording: Recording,
    journal: Record,
    workers: int | None = None,
) -> None:
    """Run every copy into the files `mine`."""
    stop = meter.stop
    copies = (
        (item, groups) for item, copies in journal.work(plan, mine, stop) for groups in recording.in_order(copies)
    )
    feed = recording.feed if recording.checksums else None
    disk = Disk(files, journal, recording)

    def work(drawn: tuple[Item, Sequence[Sequence[Copy]]]) -> None:
        item, groups = drawn
        try:
            for group in groups:
                here = [Copy(copy.source, copy.target.moved(recording.here)) for copy in group]
                for done in copy_together(files, here, feed):
                    meter.add(done)
                    disk.wrote(here[0].target.path, done)
                    if stop.is_set():
                        return
                for path in recording.done(here, files):
                    disk.complete(path)
        except OverflowError as error:
            raise ConvertError(f"`{item}` has {error}", hint=BEYOND_HINT) from error

    try:
        in_threads(work, copies, workers=workers, stop=stop)
        if not stop.is_set():
            for path in recording.untouched(files):
                disk.complete(path)
    finally:
        disk.close(wait=journal.stays or not stop.is_set())
    disk.check()
