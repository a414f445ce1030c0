"""Opening what others wrote: regular files alone, and of each kind no more bytes than it can need.

The one place that opens a source. A named pipe in a file's place would be waited for without end, a device may do
anything, and a file that is read whole takes as much memory as whoever made it likes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum
from io import BufferedReader
from pathlib import Path

MEMORY = 512 * 2**20  # bytes that the content of one small file may take once it is read

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


def open_fd(path: Path) -> int:
    """A descriptor of a regular file, to read. Nothing is waited for.

    Raises:
        Unfit: it is something else.
        OSError: it cannot be opened.
    """
    _check_regular(path, path.stat().st_mode)  # to open a device may be to use it
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: Path, *, grows: bool = False) -> BufferedReader:
    """A regular file, to read; errors as of `open_fd`.

    Args:
        grows: others may write it at any time, as a run in training does its metrics.
    """
    file = open(open_fd(path), "rb")  # noqa: SIM115 -- the caller closes it
    stamps = _watched.get()
    if stamps is not None and not grows:
        stamps.setdefault(path, stamp_of(os.fstat(file.fileno())))
    return file


def stamp_of(state: os.stat_result) -> Stamp:
    """What tells whether a file was written since."""
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
    """All bytes of a file.

    Raises:
        Unfit: it is no regular file, or larger than its kind can be.
        OSError: it cannot be read.
    """
    with open_file(path, grows=limit is Limit.TRACKER) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit.nbytes + 1) if size <= limit.nbytes else b""
    if max(size, len(content)) > limit.nbytes:
        raise Unfit(path, f"it has {max(size, len(content)):,} bytes, and {limit.kind} at most {limit.nbytes:,}")
    return content


def text_of(path: Path, limit: Limit) -> str:
    """The text of a file; what is no UTF-8 is shown as such. Errors as of `content_of`."""
    return content_of(path, limit).decode(errors="replace")


def _check_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise Unfit(path, f"it is {KINDS.get(stat.S_IFMT(mode), 'something else')}, where a file should be")
