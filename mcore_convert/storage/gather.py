"""Reading strided elements of a file into memory, and writing them, with few system calls.

Sources are read and not mapped: if a mapped file shrinks, a signal ends the process; if a file shrinks while it is
read, that is an error that names it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.storage.disk import read_at, write_at
from mcore_convert.storage.ranges import Ranges
from mcore_convert.storage.sources import Handle
from mcore_convert.storage.views import View, contiguous_strides

GAP = 6 * 2**10  # unneeded bytes that cost less to read than another system call
LIMIT = 2**20  # bytes that are read at once

_of_thread = threading.local()


def gathered(fd: Handle, view: View, into: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return the elements of a view in memory, as unsigned integers of their size.

    Args:
        into: the array to fill, of the view's shape, such as a map of a target file; a new one unless given.

    Raises:
        Shrunk: the file ends before them.
        OSError: it cannot be read.
    """
    order = sorted(range(len(view.shape)), key=lambda axis: -view.strides[axis])  # as the file has them
    strides = [view.strides[axis] for axis in order]
    whole: NDArray[Any]
    if into is None:
        whole = np.empty([view.shape[axis] for axis in order], f"u{view.itemsize}")
    else:
        whole = into.transpose(order)
    if not order:
        read_at(fd, whole.reshape(1).view(np.uint8).data, view.offset, view.path)
    elif whole.size:
        _fill(fd, whole, strides, view)
    if into is not None:
        return into
    back: NDArray[Any] = whole.transpose(np.argsort(order))
    return back


def _fill(fd: Handle, whole: NDArray[Any], strides: Sequence[int], view: View) -> None:
    """Read the runs of an array; those with small gaps between them in one call."""
    span, axis = view.itemsize, len(strides) - 1  # an index of `axis` spans `span` bytes, gaps included
    while axis and _near(whole.shape[axis], strides[axis], span):
        wider = (whole.shape[axis] - 1) * strides[axis] + span
        if wider > LIMIT:
            break
        span, axis = wider, axis - 1
    count, step = whole.shape[axis], strides[axis]
    at_once = max(1, (LIMIT - span) // max(step, 1) + 1) if _near(count, step, span) else 1
    kind = whole.dtype
    if (
        at_once == 1
        and whole.flags.c_contiguous
        and _dense(whole.shape[axis + 1 :], strides[axis + 1 :], view.itemsize)
    ):
        _fill_runs(fd, whole, strides[: axis + 1], span, view)
        return
    for index in itertools.product(*map(range, whole.shape[:axis])):
        start = view.offset + sum(number * stride for number, stride in zip(index, strides, strict=False))
        for first in range(0, count, at_once):
            part = whole[index][first : first + at_once]
            nbytes = (len(part) - 1) * step + span
            at = start + first * step
            if part.flags.c_contiguous and _dense(part.shape, strides[axis:], view.itemsize):
                read_at(fd, part.reshape(-1).view(np.uint8).data, at, view.path)
            else:
                buffer = scratch(nbytes)
                read_at(fd, buffer.data, at, view.path)
                part[...] = np.ndarray(part.shape, kind, buffer.data, 0, tuple(strides[axis:]))


def _fill_runs(fd: Handle, whole: NDArray[Any], steps: Sequence[int], nbytes: int, view: View) -> None:
    """Read runs of `nbytes` bytes, which lie far apart, one by one."""
    starts: NDArray[np.int64] = np.array([view.offset])
    for count, step in zip(whole.shape, steps, strict=False):
        starts = (starts[:, None] + np.arange(count) * step).reshape(-1)
    preadv: Callable[..., int] = os.preadv if isinstance(fd, int) else _preadv
    into = whole.reshape(-1).view(np.uint8).data
    for low, start in zip(range(0, len(into), nbytes), starts.tolist(), strict=True):
        run = into[low : low + nbytes]
        if preadv(fd, [run], start) != nbytes:
            read_at(fd, run, start, view.path)  # reads the rest, or raises the error


def _preadv(file: Ranges, into: Sequence[memoryview], at: int) -> int:
    return file.read_at(into[0], at)


def scattered(fd: int, view: View, array: NDArray[Any]) -> None:
    """Write an array to the elements of a view, a run of bytes at a time.

    Raises:
        OSError: not all of it can be written.
    """
    order = sorted(range(len(view.shape)), key=lambda axis: -view.strides[axis])  # as the file has them
    whole = array.transpose(order)
    strides = [view.strides[axis] for axis in order]
    span, axis = view.itemsize, len(order)  # the dimensions from `axis` on are one run of `span` bytes
    while axis and (whole.shape[axis - 1] == 1 or strides[axis - 1] == span):
        axis -= 1
        span *= whole.shape[axis]
    for index in itertools.product(*map(range, whole.shape[:axis])) if array.size else ():
        start = view.offset + sum(number * stride for number, stride in zip(index, strides, strict=False))
        write_at(fd, np.ascontiguousarray(whole[index]).reshape(-1).view(np.uint8).data, start)


def scratch(nbytes: int) -> NDArray[np.uint8]:
    """Return a buffer of this thread, uninitialised."""
    held: NDArray[np.uint8] | None = getattr(_of_thread, "buffer", None)
    if held is None or held.nbytes < nbytes:
        held = _of_thread.buffer = np.empty(max(nbytes, LIMIT), np.uint8)
    return held[:nbytes]


def _near(count: int, step: int, span: int) -> bool:
    return count == 1 or step - span <= GAP


def _dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    wanted = contiguous_strides(tuple(shape), itemsize)
    return all(size == 1 or step == want for size, step, want in zip(shape, strides, wanted, strict=True))
