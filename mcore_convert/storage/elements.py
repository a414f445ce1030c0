"""The elements that views describe: reading, copying and comparing them, a block at a time and from several threads.

Runs of bytes are copied by the kernel; what is transposed or cut across rows is read a block at a time, and goes to a
memory map of what is written, so that no tensor is ever held in memory.
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
from mcore_convert.storage.gather import gathered, scratch
from mcore_convert.storage.sources import open_fd
from mcore_convert.storage.views import DTYPE_SIZES, Slot, View

logger = logging.getLogger(__name__)

BLOCK = 16 * 2**20  # bytes a thread copies before it looks whether it should stop
CAST_BLOCK = 2 * 2**20  # bytes a thread rounds at once: what stands between its two dtypes stays in the cache
KERNEL_RUN = 64 * 2**10  # shorter runs cost more in system calls than in copying


def _processors() -> int:
    """The processors of this process; torchrun says how many processes of a machine share them."""
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, every // max(1, int(sharing if sharing.isdigit() else 1)))


WORKERS = _processors()

Bytes = NDArray[Any]


class Files:
    """Open files, and memory maps of those that are written, shared by all threads."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._fds: dict[tuple[Path, bool], int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fd(self, path: Path, *, write: bool = False) -> int:
        """A file descriptor; the file stays open until all are closed."""
        with self._lock:
            if (path, write) not in self._fds:
                fd = _opened(path, os.O_RDWR if write else os.O_RDONLY)
                self._stack.callback(os.close, fd)
                self._fds[path, write] = fd
                logger.debug("opened %s to %s", path, "write" if write else "read")
            return self._fds[path, write]

    def read(self, view: View, into: Bytes | None = None) -> Bytes:
        """The elements of a view in memory, as unsigned integers of their size: they are moved, never computed with.

        Args:
            into: an array that takes them; a new one unless given.

        Raises:
            UnreadableCheckpoint: the file ends before them.
        """
        with _as_unreadable():
            return gathered(self.fd(view.path), view, into)

    def read_run(self, path: Path, at: int, into: memoryview) -> None:
        """Fill `into` with bytes that lie together.

        Raises:
            UnreadableCheckpoint: the file ends before them.
        """
        with _as_unreadable():
            read_at(self.fd(path), into, at, path)

    def target(self, view: View) -> Bytes:
        """The elements of a view of a file that is written, to be set."""
        fd = self.fd(view.path, write=True)
        with self._lock:
            if view.path not in self._maps:
                size = os.fstat(fd).st_size
                os.posix_fallocate(fd, 0, size)  # a full disk must be an error here, not a signal while writing
                self._maps[view.path] = mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return np.ndarray(view.shape, f"u{view.itemsize}", self._maps[view.path], view.offset, view.strides)


@contextlib.contextmanager
def _as_unreadable() -> Iterator[None]:
    try:
        yield
    except Shrunk as error:
        raise UnreadableCheckpoint(
            f"`{error.filename}` became shorter while it was read", hint="is another process writing it?"
        ) from error


def _opened(path: Path, flags: int) -> int:
    """A descriptor. The usual limit of 1024 is too low for a checkpoint of a thousand files, so it is raised then."""
    try:
        return _open(path, flags)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return _open(path, flags)


def _open(path: Path, flags: int) -> int:
    return open_fd(path) if flags == os.O_RDONLY else os.open(path, flags)


def copy_view(files: Files, source: View, target: View, feed: Feed | None = None) -> Iterator[int]:
    """Copy one view to another of equal shape, cast to its dtype; yields the bytes read after each block.

    Args:
        feed: takes what was written. With one, bytes that lie together go through memory, and not through the kernel.

    Raises:
        OverflowError: as `cast`.
    """
    if source.dtype != target.dtype:
        yield from _cast_view(files, source, target, feed)
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
    to_array = files.target(target)
    # a block of columns has short runs, all the shorter the fewer they are
    limit = CAST_BLOCK if source.strides[-1] == source.itemsize else BLOCK
    for block in blocks_of(source.shape, source.itemsize, limit):
        written = files.read(source.block(block), to_array[block])
        hand_on(feed, target.block(block), written)
        yield int(written.nbytes)


def _cast_view(files: Files, source: View, target: View, feed: Feed | None) -> Iterator[int]:
    to_array = files.target(target)
    for block in blocks_of(source.shape, source.itemsize, CAST_BLOCK):
        part = files.read(source.block(block))
        to_array[block] = cast(part, source.dtype, target.dtype)
        hand_on(feed, target.block(block), to_array[block])
        yield int(part.nbytes)


def _copy_run(
    files: Files, source: Path, start: int, target: Path, at: int, count: int, feed: Feed | None
) -> Iterator[int]:
    """Copy bytes that lie together."""
    reading, writing = files.fd(source), files.fd(target, write=True)
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
    """Shape and strides with neighbouring dimensions joined where both views allow it."""
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
    """Slices of the first dimension, each of about `limit` bytes; of the next where one index is larger."""
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
    """The blocks in which two views of equal shape and dtype differ: where, and what either holds."""
    for block in blocks_of(a.shape, a.itemsize, CAST_BLOCK):
        first, second = files.read(a.block(block)), files.read(b.block(block))
        unequal = first != second
        if unequal.any():
            yield unequal, first, second


def global_tensor(files: Files, slots: list[Slot], shape: Shape) -> Bytes:
    """A weight's global tensor in memory, as unsigned integers of its element size."""
    whole = np.empty(shape, f"u{slots[0].view.itemsize}")
    for slot in slots:
        place = tuple(slice(at, at + size) for at, size in zip(slot.box.offsets, slot.box.sizes, strict=True))
        whole[place] = files.read(slot.view)
    return whole


def as_float(array: Bytes, dtype: str) -> NDArray[np.float64]:
    """The values of elements that were read as unsigned integers."""
    if dtype in FP8:
        return FP8[dtype][array]
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        if dtype == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.ascontiguousarray(array).view(dtype).astype(np.float64)


def _float8(exponent_bits: int, *, finite: bool) -> NDArray[np.float64]:
    """The value of every byte. `finite` floats have no infinity, and NaN only where all bits are set."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    byte = np.arange(256)
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & (2**mantissa_bits - 1)
    normal = np.ldexp(1 + mantissa / 2**mantissa_bits, exponent - bias)
    values = np.where(exponent == 0, np.ldexp(mantissa / 2**mantissa_bits, 1 - bias), normal)
    if finite:
        values[byte & 0x7F == 0x7F] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    signed: NDArray[np.float64] = np.where(byte & 0x80, -values, values)
    return signed


FP8 = {"float8_e4m3fn": _float8(4, finite=True), "float8_e5m2": _float8(5, finite=False)}


# The fp32 bits, without the sign, of the least number that rounds to infinity: half a step above the largest finite.
INFINITE_FROM = {"bfloat16": 0x7F7F8000, "float16": 0x477FF000}
INFINITY = 0x7F800000  # in fp32; what is above is no number


def round_to(array: Bytes, dtype: str) -> Bytes:
    """fp32 values, read as unsigned integers, rounded to the nearest of a dtype, ties to even, as torch does."""
    bits = np.ascontiguousarray(array)
    if dtype == "bfloat16":
        raised: Bytes = bits >> 16  # in place, as each array more costs as much as the rounding
        raised &= 1
        raised += 0x7FFF
        raised += bits
        raised >>= 16
        nearest: Bytes = raised.astype(np.uint16)
        no_number = (bits & 0x7FFFFFFF) > INFINITY
        if no_number.any():  # the payload of a NaN could round up to a number
            nearest[no_number] = bits[no_number] >> 16 | 0x40
        return nearest
    with np.errstate(over="ignore"):
        rounded: Bytes = bits.view(np.float32).astype(dtype).view(f"u{DTYPE_SIZES[dtype]}")
    return rounded


def cast(array: Bytes, source: str, target: str) -> Bytes:
    """Floating-point elements of one dtype as those of another, both as unsigned integers, rounded as torch does.

    Raises:
        OverflowError: a number is beyond the largest of the target, and would become infinite.
    """
    if source == target:
        return array
    if source == "bfloat16":
        exact: Bytes = array.astype(np.uint32) << 16
    elif source == "float16":
        exact = np.ascontiguousarray(array).view(np.float16).astype(np.float32).view(np.uint32)
    else:
        exact = array
    if target == "float32":
        return exact
    sizes = exact & 0x7FFFFFFF
    beyond = INFINITE_FROM[target]
    if sizes.max(initial=0) >= beyond and ((sizes >= beyond) & (sizes < INFINITY)).any():
        raise OverflowError(f"a number beyond the largest of {target}")
    return round_to(exact, target)
