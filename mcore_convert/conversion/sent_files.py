"""Files of a remote destination while they are filled: a few at a time on this machine, sent when complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from mcore_convert.conversion.plan import Copy, Plan
from mcore_convert.spec.family import Item
from mcore_convert.storage.paths import moved
from mcore_convert.storage.remote import RemotePath
from mcore_convert.storage.sending import Sending

ON_DISK = 2  # files of tensors on this machine at once: one is filled while one is sent


class SentFiles:
    """The record of a remote destination, in place of a journal.

    Args:
        partial: directory of the files on this machine.
        note: called with a complete file, before it is sent and removed here.
    """

    stays = False

    def __init__(self, partial: Path, sending: Sending) -> None:
        self._partial, self._sending = partial, sending
        self.note: Callable[[Path], None] = lambda path: None
        self._room = threading.Semaphore(ON_DISK)
        self._failed = threading.Event()

    def work(self, plan: Plan, mine: Set[Path], stop: threading.Event) -> Iterator[tuple[Item, Sequence[Copy]]]:
        """Yield the copies of each weight, file by file; the next file begins when there is room for it."""
        by_file: dict[Path, list[tuple[Item, list[Copy]]]] = {
            path: [] for path in plan.reservation.sizes if path in mine
        }
        for move in plan.moves:
            own: dict[Path, list[Copy]] = {}
            for copy in move.copies:
                own.setdefault(copy.target.path, []).append(copy)
            for path, copies in own.items():
                by_file[path].append((move.item, copies))
        for work in filter(None, by_file.values()):
            while not self._room.acquire(timeout=0.1):
                if stop.is_set() or self._failed.is_set():
                    return
            yield from work

    def add(self, path: Path, regions: Sequence[Sequence[Any]]) -> None:
        """Send a complete file."""
        try:
            self.note(path)
            self.send(path)
        except BaseException:
            self._failed.set()
            raise
        self._room.release()

    def send(self, path: Path) -> None:
        """Send a file and remove it here."""
        target = moved(path, self._partial, self._sending.final)
        assert isinstance(target, RemotePath)
        self._sending.send(path, target)
        path.unlink()
