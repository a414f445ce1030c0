"""Lock files: held by the process that writes beside them, with the id of its work in them."""

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

# File systems that cannot lock files, such as Lustre mounted without `flock`: better no lock than no conversion.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass
class Lock:
    """A lock file that is held, and what the process that had it before has recorded in it.

    It `stays` behind while there is what one of them left: without the record nobody would know whose that is.
    """

    fd: int
    earlier: dict[str, Any] | None
    identity: str = field(default_factory=new_id)
    stays: bool = False

    def record(self, **facts: Any) -> None:
        """Write down the id of this work, and what else the next process must know if this one is killed."""
        write_at(self.fd, record_bytes(self.identity, **facts).ljust(LARGEST // 4), 0)  # as long as the one before
        os.fsync(self.fd)


@contextlib.contextmanager
def locked(file: Path, partial: Path) -> Iterator[Lock]:
    """Hold a lock file, and remove it at the end.

    Raises:
        UnwritableTarget: another process holds it, or it is something else than a lock file of ours.
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
                file.unlink(missing_ok=True)  # before the lock is given up, so that nobody else's is removed
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
        os.close(fd)  # its last holder has removed it between our two calls
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
