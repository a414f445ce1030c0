"""Opening source files: only regular ones, and each kind up to a limit of bytes.

The one place that opens a source. Opening a named pipe would block forever, a device may do anything, and without a
limit whoever made a file decides how much memory reading it takes.
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

MEMORY = 512 * 2**20  # bytes of memory that the parsed content of one small file may take

HEAD = 64 * 2**10  # bytes at the beginning of a remote file that are prefetched

Handle = int | Ranges  # an open file: a descriptor, or a file of a remote store
Stamp = tuple[int, ...]  # size, modification time, device and inode: differs if a file was written

_watched: ContextVar[dict[Path, Stamp] | None] = ContextVar("watched", default=None)

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Limit(Enum):
    """Limit in bytes for each kind of file that is read whole."""

    JSON = "a JSON file", 64 * 2**20  # the index of a model of 10**12 parameters has 20 MB
    MANIFEST = "a manifest", 256 * 2**20  # a fifth for a model of 10**12 parameters with its optimizer
    TOKENIZER = "a tokenizer's file", 256 * 2**20  # the largest in use have 40 MB
    VOCABULARY = "a vocabulary", 16 * 2**20  # SentencePiece or tiktoken, whose largest have 5 MB
    CARD = "a model card", 2**20
    SETTINGS = "a configuration", 2**20  # YAML, which takes seconds for a megabyte
    TRACKER = "a tracker file", 2**16
    LINE = "a line of metrics", 2**20

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes = kind, nbytes


class Unfit(OSError):
    """A file that is refused: it is not a regular file, or larger than the limit of its kind."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_fd(path: Path) -> Handle:
    """Open a regular file for bulk reading: return a descriptor, or the ranges of a remote file.
    Opening never blocks.

    Raises:
        Unfit: it is not a regular file.
        OSError: it cannot be opened.
    """
    _check_regular(path, path.stat().st_mode)  # merely opening a device may have effects
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
    """Open a regular file for reading; errors as of `open_fd`.

    Args:
        grows: others may write it at any time, as a training run writes its metrics.
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
    """Return the handle of an open file, for reads at any offset."""
    return file.raw if isinstance(file.raw, Ranges) else file.fileno()


def size_of(handle: Handle) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def expect(handle: Handle, places: Iterable[int]) -> None:
    """Start fetching some bytes at each of these offsets, if the file is remote."""
    if not isinstance(handle, int):
        handle.expect(places)


def expect_headers(paths: Iterable[Path]) -> None:
    """Start fetching the beginnings and the ends of all remote files at once."""
    for path in paths:
        if isinstance(path, RemotePath) and path.is_file():
            size = path.stat().st_size
            Ranges(path, PAGES).expect([*range(0, min(size, HEAD), PAGES.block), max(0, size - 1)])


def expect_archives(archives: Iterable[tuple[Path, int, int]]) -> None:
    """Start fetching both ends of archives, each a file, an offset and a size; either all are remote or none is."""
    ends: dict[RemotePath, list[int]] = {}
    for path, at, size in archives:
        if not isinstance(path, RemotePath):
            return
        ends.setdefault(path, []).extend((at, at + max(0, size - 1)))
    for path, places in ends.items():
        Ranges(path, PAGES).expect(places)


def bytes_at(handle: Handle, count: int, at: int) -> bytes:
    """Return the bytes at an offset of an open file, as `os.pread` does: fewer at the end of the file."""
    if isinstance(handle, int):
        return os.pread(handle, count, at)
    content = bytearray(max(0, min(count, handle.size - at)))
    handle.read_at(memoryview(content), at)
    return bytes(content)


def stamp_of(state: os.stat_result) -> Stamp:
    """Return the stamp of a file, which changes if the file is written."""
    return state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino


@contextlib.contextmanager
def watched() -> Iterator[dict[Path, Stamp]]:
    """A scope that gives the stamp of each file that is opened in it, taken before it is read."""
    stamps: dict[Path, Stamp] = {}
    token = _watched.set(stamps)
    try:
        yield stamps
    finally:
        _watched.reset(token)


def content_of(path: Path, limit: Limit) -> bytes:
    """Return all bytes of a file.

    Raises:
        Unfit: it is not a regular file, or larger than the limit of its kind.
        OSError: it cannot be read.
    """
    with open_file(path, grows=limit is Limit.TRACKER) as file:
        size = size_of(handle_of(file))
        content = file.read(min(size, limit.nbytes) + 1) if size <= limit.nbytes else b""
    if max(size, len(content)) > limit.nbytes:
        raise Unfit(path, f"it has {max(size, len(content)):,} bytes, and {limit.kind} at most {limit.nbytes:,}")
    return content


def text_of(path: Path, limit: Limit) -> str:
    """Return the text of a file; invalid UTF-8 becomes replacement characters. Errors as of `content_of`."""
    return content_of(path, limit).decode(errors="replace")


def _check_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise Unfit(path, f"it is {KINDS.get(stat.S_IFMT(mode), 'something else')}, where a file should be")
