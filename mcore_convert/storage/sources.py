"""Opening what others wrote: regular files alone, and of each kind no more bytes than it can need.

The one place that opens a source. A named pipe in a file's place would be waited for without end, a device may do
anything, and a file that is read whole takes as much memory as whoever made it likes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from enum import Enum
from io import BufferedReader
from pathlib import Path

from mcore_convert.storage.ranges import BLOCKS, PAGES, Ranges
from mcore_convert.storage.remote import RemotePath

MEMORY = 512 * 2**20  # bytes that the content of one small file may take once it is read

HEAD = 64 * 2**10  # bytes at the beginning of a remote file that are fetched before they are asked for

Handle = int | Ranges  # an open file: a descriptor, or one of a remote store
Stamp = tuple[int, ...]  # what tells that a file was written: size, time, and which file it is

_watched: ContextVar[dict[Path, Stamp] | None] = ContextVar("watched", default=None)

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Limit(Enum):
    """What a file may hold at most, in bytes, for each kind that is read whole."""

    JSON = "a JSON file", 64 * 2**20  # the index of a model of 10**12 parameters has 20 MB
    MANIFEST = "a manifest", 256 * 2**20  # that of a model of 10**12 parameters with its optimizer has a fifth
    TOKENIZER = "a tokenizer's file", 256 * 2**20  # the largest in use have 40 MB
    VOCABULARY = "a vocabulary", 16 * 2**20  # SentencePiece or tiktoken, whose largest have 5 MB
    CARD = "a model card", 2**20
    SETTINGS = "a configuration", 2**20  # YAML, which takes seconds for a megabyte
    TRACKER = "a tracker file", 2**16
    LINE = "a line of metrics", 2**20

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes = kind, nbytes


class Unfit(OSError):
    """A file that is not read: it is no regular one, or larger than its kind can be."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_fd(path: Path) -> Handle:
    """Return a regular file, open to read a lot of it: a descriptor, or the ranges of a remote one.
    Nothing is waited for.

    Raises:
        Unfit: it is something else.
        OSError: it cannot be opened.
    """
    _check_regular(path, path.stat().st_mode)  # to open a device may be to use it
    if isinstance(path, RemotePath):
        return Ranges(path, BLOCKS)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: Path, *, grows: bool = False) -> BufferedReader:
    """Return a regular file, to read; errors as of `open_fd`.

    Args:
        grows: others may write it at any time, as a run in training does its metrics.
    """
    if isinstance(path, RemotePath):
        state = path.stat()
        _check_regular(path, state.st_mode)
        file: BufferedReader = BufferedReader(Ranges(path, PAGES))
    else:
        fd = open_fd(path)
        assert isinstance(fd, int)
        file = open(fd, "rb")  # noqa: PTH123, SIM115 -- the caller closes it
        state = os.fstat(fd)
    stamps = _watched.get()
    if stamps is not None and not grows:
        stamps.setdefault(path, stamp_of(state))
    return file


def close_fd(handle: Handle) -> None:
    """Close what `open_fd` has opened."""
    if isinstance(handle, int):
        os.close(handle)


def handle_of(file: BufferedReader) -> Handle:
    """Return what an open file is read by, at any place."""
    return file.raw if isinstance(file.raw, Ranges) else file.fileno()


def size_of(handle: Handle) -> int:
    """Return the bytes of an open file."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def expect(handle: Handle, places: Iterable[int]) -> None:
    """Let some bytes from each of these places be on their way, where each request would be waited for."""
    if not isinstance(handle, int):
        handle.expect(places)


def expect_headers(paths: Iterable[Path]) -> None:
    """Let the beginnings and the ends of remote files be on their way, all at once."""
    for path in paths:
        if isinstance(path, RemotePath) and path.is_file():
            size = path.stat().st_size
            Ranges(path, PAGES).expect([*range(0, min(size, HEAD), PAGES.block), max(0, size - 1)])


def expect_archives(archives: Iterable[tuple[Path, int, int]]) -> None:
    """Expect the same of archives, each by its file, its place in it and its size, which are all remote or all not."""
    ends: dict[RemotePath, list[int]] = {}
    for path, at, size in archives:
        if not isinstance(path, RemotePath):
            return
        ends.setdefault(path, []).extend((at, at + max(0, size - 1)))
    for path, places in ends.items():
        Ranges(path, PAGES).expect(places)


def bytes_at(handle: Handle, count: int, at: int) -> bytes:
    """Bytes at a place of an open file, as `os.pread`: fewer where the file ends."""
    if isinstance(handle, int):
        return os.pread(handle, count, at)
    content = bytearray(max(0, min(count, handle.size - at)))
    handle.read_at(memoryview(content), at)
    return bytes(content)


def stamp_of(state: os.stat_result) -> Stamp:
    """Return what tells whether a file was written since."""
    return state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino


@contextlib.contextmanager
def watched() -> Iterator[dict[Path, Stamp]]:
    """A scope that gives the stamp of each file that is opened in it, as it was before it was read."""
    stamps: dict[Path, Stamp] = {}
    token = _watched.set(stamps)
    try:
        yield stamps
    finally:
        _watched.reset(token)


def content_of(path: Path, limit: Limit) -> bytes:
    """Return all bytes of a file.

    Raises:
        Unfit: it is no regular file, or larger than its kind can be.
        OSError: it cannot be read.
    """
    with open_file(path, grows=limit is Limit.TRACKER) as file:
        size = size_of(handle_of(file))
        content = file.read(min(size, limit.nbytes) + 1) if size <= limit.nbytes else b""
    if max(size, len(content)) > limit.nbytes:
        raise Unfit(path, f"it has {max(size, len(content)):,} bytes, and {limit.kind} at most {limit.nbytes:,}")
    return content


def text_of(path: Path, limit: Limit) -> str:
    """Return the text of a file; what is no UTF-8 is shown as such. Errors as of `content_of`."""
    return content_of(path, limit).decode(errors="replace")


def _check_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise Unfit(path, f"it is {KINDS.get(stat.S_IFMT(mode), 'something else')}, where a file should be")
