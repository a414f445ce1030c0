"""Reading, copying and comparing the elements of views, a block at a time and from several threads.

Runs of bytes are copied by the kernel; elements that are transposed or cut across rows are read a block at a time into
a memory map of the target, so that no tensor is ever held in memory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.digests import STEP, Feed, hand_on
from mcore_convert.storage.disk import Shrunk, copy_range, read_at, stream_range
from mcore_convert.storage.gather import gathered, scattered, scratch
from mcore_convert.storage.joining import joined
from mcore_convert.storage.mapping import mapped
from mcore_convert.storage.ranges import BLOCKS
from mcore_convert.storage.sources import Handle, close_fd, open_fd
from mcore_convert.storage.values import cast
from mcore_convert.storage.views import Slot, View

logger = logging.getLogger(__name__)

BLOCK = 16 * 2**20  # bytes that a thread copies before it checks whether it should stop
CAST_BLOCK = 2 * 2**20  # bytes that a thread rounds at once: the intermediate values stay in the cache
MOST_FILES = 10_240  # files open at once, if the system has no limit
KERNEL_RUN = 64 * 2**10  # shorter runs cost more in system calls than in copying

Bytes = NDArray[Any]


class Files:
    """Open files, and memory maps of those that are written, shared by all threads."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._fds: dict[tuple[Path, int], Handle] = {}
        self._maps: dict[Path, mmap.mmap | None] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        BLOCKS.clear()

    def fd(self, path: Path) -> Handle:
        """Return the handle of a file, opened for reading; it stays open until all files are closed."""
        return self._opened(path, os.O_RDONLY)

    def writing(self, path: Path) -> int:
        """Return the descriptor of a file, opened for reading and writing; it stays open until all files are closed."""
        fd = self._opened(path, os.O_RDWR)
        assert isinstance(fd, int)
        return fd

    def _opened(self, path: Path, flags: int) -> Handle:
        known = self._fds.get((path, flags))  # without the lock, which only opening needs
        if known is not None:
            return known
        with self._lock:
            if (path, flags) not in self._fds:
                self._fds[path, flags] = handle = _opened(path, flags)
                self._stack.callback(close_fd, handle)
                logger.debug("opened %s to %s", path, "write" if flags == os.O_RDWR else "read")
            return self._fds[path, flags]

    def read(self, view: View, into: Bytes | None = None, dtype: str | None = None) -> Bytes:
        """Return the elements of a view in memory, as unsigned integers of their size.

        Args:
            into: the array to fill; a new one unless given.
            dtype: the dtype to round to, once; that of the view unless given.

        Raises:
            UnreadableCheckpoint: the file ends before them.
            OverflowError: as `cast`.
        """
        wanted = dtype or view.dtype
        if view.is_plain and wanted == view.dtype:
            with _as_unreadable():
                return gathered(self.fd(view.path), view, into)
        if view.coded is not None:
            values = view.coded.read(self, view, wanted)
        elif view.high is not None:
            values = cast(joined(self.read(view.low), self.read(view.high), view), view.dtype, wanted)
        else:
            values = cast(self.read(view), view.dtype, wanted)
        if into is None:
            return values
        into[...] = values
        return into

    def read_run(self, path: Path, at: int, into: memoryview) -> None:
        """Fill `into` with consecutive bytes of a file.

        Raises:
            UnreadableCheckpoint: the file ends before them.
        """
        with _as_unreadable():
            read_at(self.fd(path), into, at, path)

    @contextlib.contextmanager
    def target(self, view: View) -> Iterator[Bytes]:
        """A scope that gives the elements of a view of a target file as an array; all of them have to be set.

        The array is a memory map, or if there can be none, a buffer that is written at the end of the scope.
        """
        fd = self.writing(view.path)
        with self._lock:
            if view.path not in self._maps:
                self._maps[view.path] = mapped(fd)
            there = self._maps[view.path]
        if there is not None:
            yield np.ndarray(view.shape, f"u{view.itemsize}", there, view.offset, view.strides)
            return
        block = np.empty(view.shape, f"u{view.itemsize}")
        yield block
        scattered(fd, view, block)


@contextlib.contextmanager
def _as_unreadable() -> Iterator[None]:
    try:
        yield
    except Shrunk as error:
        raise UnreadableCheckpoint(
            f"`{error.filename}` became shorter while it was read", hint="is another process writing it?"
        ) from error


def _opened(path: Path, flags: int) -> Handle:
    """Open a file. The usual limit of 1024 open files is too low for a checkpoint of a thousand files:
    it is raised when it is reached.
    """
    try:
        return _open(path, flags)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        most = hard if hard != resource.RLIM_INFINITY else MOST_FILES  # macOS has a limit that it does not report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return _open(path, flags)


def _open(path: Path, flags: int) -> Handle:
    return open_fd(path) if flags == os.O_RDONLY else os.open(path, flags)


def copy_view(files: Files, source: View, target: View, feed: Feed | None = None) -> Iterator[int]:
    """Copy one view to another of equal shape, cast to its dtype; yield the bytes read after each block.

    Args:
        feed: gets the bytes that were written. If given, runs of bytes go through memory instead of the kernel.

    Raises:
        OverflowError: as `cast`.
    """
    if source.dtype != target.dtype or not source.is_plain:
        yield from _cast_view(files, source, target, feed)
        return
    if source.is_contiguous and target.is_contiguous:
        yield from _copy_run(files, source.path, source.offset, target.path, target.offset, source.nbytes, feed)
        return
    shape, source_strides, target_strides = _joined(source, target)
    run = shape[-1] * source.itemsize
    in_runs = source_strides[-1] == target_strides[-1] == source.itemsize
    if in_runs and (len(shape) == 1 or (len(shape) == 2 and run >= KERNEL_RUN)):
        for row in range(shape[0] if len(shape) == 2 else 1):
            lead = row if len(shape) == 2 else 0
            start = source.offset + lead * source_strides[0]
            at = target.offset + lead * target_strides[0]
            yield from _copy_run(files, source.path, start, target.path, at, run, feed)
        return
    # a block of columns has short runs: the fewer columns, the shorter
    limit = CAST_BLOCK if source.strides[-1] == source.itemsize else BLOCK
    for block in blocks_of(source.shape, source.itemsize, limit):
        with files.target(target.block(block)) as into:
            files.read(source.block(block), into)
            hand_on(feed, target.block(block), into)
        yield int(into.nbytes)


def _cast_view(files: Files, source: View, target: View, feed: Feed | None) -> Iterator[int]:
    for block in blocks_of(source.shape, source.itemsize, CAST_BLOCK):
        part = source.block(block)
        with files.target(target.block(block)) as into:
            files.read(part, into, target.dtype)
            hand_on(feed, target.block(block), into)
        yield part.nbytes


def _copy_run(
    files: Files, source: Path, start: int, target: Path, at: int, count: int, feed: Feed | None
) -> Iterator[int]:
    """Copy consecutive bytes."""
    reading, writing = files.fd(source), files.writing(target)
    for done in range(0, count, BLOCK):
        step = min(count - done, BLOCK)
        with _as_unreadable():
            if feed is None:
                copy_range(reading, source, start + done, writing, at + done, step)
            else:
                buffer = scratch(STEP).data
                stream_range(reading, source, start + done, writing, at + done, buffer, step, partial(feed, target))
        yield step


def _joined(source: View, target: View) -> tuple[Shape, Shape, Shape]:
    """Return shape and strides with neighbouring dimensions merged where both views allow it."""
    shape: list[int] = []
    steps: list[tuple[int, int]] = []
    for size, step in zip(source.shape, zip(source.strides, target.strides, strict=True), strict=True):
        if size == 1:
            continue
        if shape and all(outer == size * inner for outer, inner in zip(steps[-1], step, strict=True)):
            shape[-1], steps[-1] = shape[-1] * size, step
        else:
            shape.append(size)
            steps.append(step)
    if not shape:
        return (1,), (source.itemsize,), (source.itemsize,)
    return tuple(shape), tuple(s for s, _ in steps), tuple(t for _, t in steps)


def blocks_of(shape: Shape, itemsize: int, limit: int = BLOCK) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the first dimension of about `limit` bytes each; of the next one too if an index is larger."""
    if not shape:
        yield ()
        return
    inner = itemsize
    for size in shape[1:]:
        inner *= size
    if inner > limit and len(shape) > 1:
        for index in range(shape[0]):
            for rest in blocks_of(shape[1:], itemsize, limit):
                yield (slice(index, index + 1), *rest)
        return
    step = max(1, limit // max(inner, 1))
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])),)


def differing(files: Files, a: View, b: View) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
    """Yield each block in which two views of equal shape and dtype differ: a mask, and the elements of both."""
    for block in blocks_of(a.shape, a.itemsize, CAST_BLOCK):
        first, second = files.read(a.block(block)), files.read(b.block(block))
        unequal = first != second
        if unequal.any():
            yield unequal, first, second


def global_tensor(files: Files, slots: list[Slot], shape: Shape) -> Bytes:
    """Return a weight's global tensor in memory, as unsigned integers of its element size."""
    whole = np.empty(shape, f"u{slots[0].view.itemsize}")
    for slot in slots:
        place = tuple(slice(at, at + size) for at, size in zip(slot.box.offsets, slot.box.sizes, strict=True))
        whole[place] = files.read(slot.view)
    return whole
