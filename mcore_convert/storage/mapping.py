"""Memory maps of target files, with disk space allocated, if the file system supports both."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

from mcore_convert.storage.disk import CANNOT

NO_MAP = (*CANNOT, errno.ENODEV, errno.EACCES)


def fallocate(fd: int, size: int) -> None:
    """Allocate disk space for a file of this size; its content stays.

    Not `os.posix_fallocate`: if the file system does not support it, the C library reads and writes a byte of each
    block, and may overwrite what other threads write meanwhile (posix_fallocate(3), BUGS).

    Raises:
        OSError: there is no room, or the file system or the operating system does not support it.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    library = ctypes.CDLL(None, use_errno=True)
    while library.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mapped(fd: int) -> mmap.mmap | None:
    """Return a memory map of a target file, with disk space for all of it; None if the file system lacks either.

    A full disk must be an error here, not a signal while writing: without the space there is no map.

    Raises:
        OSError: there is no room.
    """
    size = os.fstat(fd).st_size
    try:
        fallocate(fd, size)
        return mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        if error.errno not in NO_MAP:
            raise
        return None
