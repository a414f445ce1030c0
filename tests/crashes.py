"""A file system that loses what was not synced: the state of the disk after a power failure at any moment.

Names may survive at once, and content only from when the file was synced: of all that a crash may leave, that is what
looks whole and is not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync")


class Disk:
    """What is on the disk for sure: content and names of files and directories, by their numbers."""

    def __init__(self) -> None:
        self._synced: dict[tuple[int, int], object] = {}
        self.moments = 0  # at which a crash was checked

    def sync(self, fd: int) -> None:
        """Take a file, or the names in a directory, for safe as they are."""
        path = Path(f"/proc/self/fd/{fd}").resolve()
        self._synced[_number(path)] = _state(path)

    def lost(self, path: Path) -> list[str]:
        """Return what a crash at this moment would take of what stands at a path."""
        entries = [path, *path.rglob("*")] if path.is_dir() else [path] if path.exists() else []
        return [str(each) for each in entries if self._synced.get(_number(each)) != _state(each)]


def _number(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_dev, state.st_ino


def _state(path: Path) -> object:
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else path.read_bytes()


@contextlib.contextmanager
def crashing(check: Callable[[Disk], None]) -> Iterator[Disk]:
    """A scope in which `check` is called after every call that changes names, or syncs: a crash could come then."""
    disk = Disk()

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*words: Any, **options: Any) -> Any:
            answer = real(*words, **options)
            if name == "fsync":
                disk.sync(words[0])
            disk.moments += 1
            check(disk)
            return answer

        return call

    with contextlib.ExitStack() as stack:
        for name in CHANGES:
            stack.enter_context(mock.patch.object(os, name, wrapped(name)))
        yield disk
