"""Reading and writing files: complete, or an error. The one module with the system calls for both.

A system call may transfer fewer bytes than requested and still succeed. All loops that continue with the rest are
here, and so are the checks for calls that transferred nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mcore_convert.storage.deferral import Deferral
from mcore_convert.storage.marker import MARKER, new_id, record_bytes, unfinished, unfinished_ones
from mcore_convert.storage.remote import RemotePath, fresh
from mcore_convert.storage.sources import Handle, Stamp, close_fd, open_fd, size_of, stamp_of

STEP = 2 * 2**20  # bytes that go through memory at once, while they are in the cache
NEAR = 64  # bytes of a gap that cost less to write than another system call
AT_ONCE = 2**30  # bytes of one call: macOS refuses 2**31 and more
# Errors of a file system that does not support an operation: plain reads and writes replace it.
CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)
NO_KERNEL_COPY = (*CANNOT, errno.EXDEV, errno.EBADF)


class Shrunk(OSError):
    """A file that ends before the requested range."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EIO, "it became shorter while it was read", str(path))


def stamped(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Return the stamp of each file; an empty one if it does not exist."""
    stamps: dict[Path, Stamp] = {}
    paths = [*paths]
    for store in {path.parts[0]: path for path in paths if isinstance(path, RemotePath)}.values():
        fresh(store)
    for path in paths:
        stamps[path] = ()
        with contextlib.suppress(FileNotFoundError):
            stamps[path] = stamp_of(path.stat())
    return stamps


def write_at(fd: int, content: bytes | memoryview, at: int) -> None:
    """Write all of `content` at an offset of a file.

    Raises:
        OSError: not all of it can be written.
    """
    with memoryview(content) as whole, whole.cast("B") as left:
        done = 0
        while done < len(left):
            with left[done : done + AT_ONCE] as rest:
                count = os.pwrite(fd, rest, at + done)
            if count <= 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            done += count


def reserve(path: Path, size: int, literals: Iterable[tuple[int, bytes]]) -> None:
    """Make a file of its final size, with the bytes that are already known.

    Raises:
        OSError: the file system refuses, or the file has another size afterwards.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.ftruncate(fd, size)
        for at, content in _joined(literals):
            write_at(fd, content, at)
        if os.fstat(fd).st_size != size:
            raise OSError(errno.EIO, "it has another size than what was written", str(path))
    finally:
        os.close(fd)


def _joined(literals: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the literals in file order, with near ones joined: the bytes between them are zeros in the file.

    Between the end of one chunk's archive and the beginning of the next there are only a few bytes. The literals are
    sorted first, so that zeros never overwrite an earlier literal.
    """
    first, joined, end = 0, bytearray(), 0
    for at, content in sorted(literals, key=lambda literal: literal[0]):
        gap = at - end
        is_last, end = first + len(joined) == end, max(end, at + len(content))
        if is_last and 0 <= gap <= NEAR and len(joined) < STEP:
            joined += bytes(gap) + content
        else:
            yield first, bytes(joined)
            first, joined = at, bytearray(content)
    yield first, bytes(joined)


def read_at(handle: Handle, into: memoryview, at: int, path: Path) -> None:
    """Fill `into` with the bytes at an offset of a file.

    Raises:
        Shrunk: the file ends before.
        OSError: it cannot be read.
    """
    done = 0
    while done < len(into):
        with into[done : done + AT_ONCE] as rest:
            count = os.preadv(handle, [rest], at + done) if isinstance(handle, int) else handle.read_at(rest, at + done)
        if count <= 0:
            raise Shrunk(path)
        done += count


def copy_range(reading: Handle, source: Path, start: int, writing: int, at: int, count: int) -> None:
    """Copy bytes from one file to another, inside the kernel where possible.

    Raises:
        Shrunk: the source ends before.
        OSError: not all of it can be copied.
    """
    copy_file_range = getattr(os, "copy_file_range", None) if isinstance(reading, int) else None  # macOS has none
    while count:
        done = 0
        if copy_file_range is not None:
            try:
                done = copy_file_range(reading, writing, count, start, at)
            except OSError as error:  # another file system, or one that cannot
                if error.errno not in NO_KERNEL_COPY:
                    raise
        if not done:  # 0 is the end of the file, or a file system that cannot copy: the read below distinguishes them
            copy_file_range = None
            done = min(count, STEP)
            buffer = memoryview(bytearray(done))
            read_at(reading, buffer, start, source)
            write_at(writing, buffer, at)
        start, at, count = start + done, at + done, count - done


def stream_range(
    reading: Handle,
    source: Path,
    start: int,
    writing: int,
    at: int,
    buffer: memoryview,
    count: int,
    feed: Callable[[int, memoryview], None],
) -> None:
    """Copy bytes from one file to another through `buffer`, and pass them to `feed` with their offset in the target.

    Raises:
        Shrunk: the source ends before.
        OSError: not all of it can be copied.
    """
    for done in range(0, count, len(buffer)):
        with buffer[: count - done] as part:
            read_at(reading, part, start + done, source)
            feed(at + done, part)
            write_at(writing, part, at + done)


def copy_file(source: Path, target: Path) -> None:
    """Copy a whole file to a new one, and return when it is on the disk.

    Raises:
        OSError: it cannot be read or written, or has another size afterwards.
    """
    reading = open_fd(source)
    try:
        size = size_of(reading)
        writing = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            copy_range(reading, source, 0, writing, 0, size)
            os.fsync(writing)
            if os.fstat(writing).st_size != size:
                raise OSError(errno.EIO, "it has another size than what was written", str(target))
        finally:
            os.close(writing)
        if size_of(reading) != size:
            raise Shrunk(source)
    finally:
        close_fd(reading)


def write_new(path: Path, content: bytes) -> None:
    """Make a new file, and return when its content is on the disk.

    Raises:
        OSError: the file exists, or not all of it can be written.
    """
    write_parts(path, (content,))


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Make a new file of parts, concatenated, and return when they are on the disk.

    Raises:
        OSError: as `write_new`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        at = 0
        for part in parts:
            write_at(fd, part, at)
            at += len(part)
        os.fsync(fd)
    finally:
        os.close(fd)


def append(path: Path, content: bytes) -> None:
    """Write at the end of a file, created if missing, and return when the content is on the disk.

    Raises:
        OSError: not all of it can be written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        write_at(fd, content, os.fstat(fd).st_size)
        os.fsync(fd)
    finally:
        os.close(fd)


def mark(folder: Path, identity: str) -> None:
    """Mark a directory as unfinished work of ours."""
    write_new(folder / MARKER, record_bytes(identity))


def remark(folder: Path, identity: str) -> None:
    """Take over a directory that another process has marked: write the mark of this one."""
    write_whole(folder / MARKER, record_bytes(identity))


def write_whole(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically. Unfinished files of killed runs are removed.

    Raises:
        OSError: the file system refuses.
    """
    with Deferral():
        _write_whole(path, content)


def _write_whole(path: Path, content: bytes) -> None:
    for stale in unfinished_ones(path):
        _remove_if_dead(stale)
    partial = unfinished(path, new_id())
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        write_at(fd, content, 0)
        os.fsync(fd)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _remove_if_dead(partial: Path) -> None:
    """Remove an unfinished file unless a process holds it."""
    with contextlib.suppress(OSError):
        fd = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()
        finally:
            os.close(fd)


def remove_tree(folder: Path) -> None:
    """Remove a directory and everything below it, or a file or link; no link is followed."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()


def sync_data(fd: int) -> None:
    """Wait until the content of a file is on the disk; its times need not be."""
    getattr(os, "fdatasync", os.fsync)(fd)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in CANNOT or not path.is_dir():  # some network file systems sync names by themselves
            raise
    finally:
        os.close(fd)
