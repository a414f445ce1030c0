"""Lock files: each held by the process that writes the directory beside it, with the id of its work."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnwritableTarget
from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.disk import write_at
from mcore_convert.storage.marker import LARGEST, in_the_way, new_id, record_bytes, record_of

# Errors of file systems without locks, such as Lustre mounted without `flock`: a conversion then goes without a lock.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass
class Lock:
    """A lock file that is held, and the record of the process that held it before.

    It `stays` while there are remains of an unfinished run: without the record they could not be identified as ours.
    """

    fd: int
    earlier: dict[str, Any] | None
    identity: str = field(default_factory=new_id)
    stays: bool = False

    def record(self, **facts: Any) -> None:
        """Record the id of this work, and the facts that the next process needs if this one is killed."""
        write_at(self.fd, record_bytes(self.identity, **facts).ljust(LARGEST // 4), 0)  # padded to a fixed length
        os.fsync(self.fd)


@contextlib.contextmanager
def locked(file: Path, partial: Path) -> Iterator[Lock]:
    """Hold a lock file, and remove it at the end.

    Raises:
        UnwritableTarget: another process holds it, or it is not a lock file of ours.
    """
    with Deferral() as signals:
        fd, earlier = _acquired(file, partial)
        lock = Lock(fd, earlier)
        try:
            try:
                signals.admit()
                yield lock
            finally:
                signals.hold()
        finally:
            if not lock.stays:
                file.unlink(missing_ok=True)  # before releasing the lock: later it may be another process's file
            os.close(fd)


def _acquired(file: Path, partial: Path) -> tuple[int, dict[str, Any] | None]:
    """Return the descriptor of a lock file that is held, and the record in it."""
    while True:
        fd = _open_lock(file)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise UnwritableTarget(f"`{partial}` is being written by another process") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(fd)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), file.stat()):
                break
        os.close(fd)  # its last holder removed it between our two calls
    try:
        content = os.pread(fd, LARGEST, 0) if os.fstat(fd).st_size else b""
        earlier = record_of(content)
        if content and earlier is None:
            raise in_the_way(file)
    except BaseException:
        os.close(fd)
        raise
    return fd, earlier


def _open_lock(file: Path) -> int:
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise in_the_way(file) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise in_the_way(file)
    return fd
