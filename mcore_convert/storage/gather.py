"""Reading strided elements of a file into memory, with as few system calls as pay.

Sources are read and not mapped: a file that shrinks while it is mapped ends the process with a signal, and one that
is read is an error with a name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_convert.storage.disk import read_at
from mcore_convert.storage.views import View, contiguous_strides

GAP = 16 * 2**10  # bytes that cost less to read in vain than another system call
LIMIT = 2 * 2**20  # bytes that are read at once


def gathered(fd: int, view: View) -> NDArray[Any]:
    """The elements of a view in memory, as unsigned integers of their size.

    Raises:
        Shrunk: the file ends before them.
        OSError: it cannot be read.
    """
    order = sorted(range(len(view.shape)), key=lambda axis: -view.strides[axis])  # as the file has them
    strides = [view.strides[axis] for axis in order]
    whole: NDArray[Any] = np.empty([view.shape[axis] for axis in order], f"u{view.itemsize}")
    if not order:
        read_at(fd, whole.reshape(1).view(np.uint8).data, view.offset, view.path)
    elif whole.size:
        _fill(fd, whole, strides, view)
    back: NDArray[Any] = whole.transpose(np.argsort(order))
    return back


def _fill(fd: int, whole: NDArray[Any], strides: Sequence[int], view: View) -> None:
    """Read the runs of an array, those with small gaps between them at once."""
    span, axis = view.itemsize, len(strides) - 1  # an index of `axis` takes `span` bytes, from first to last
    while axis and _near(whole.shape[axis], strides[axis], span):
        wider = (whole.shape[axis] - 1) * strides[axis] + span
        if wider > LIMIT:
            break
        span, axis = wider, axis - 1
    count, step = whole.shape[axis], strides[axis]
    at_once = max(1, (LIMIT - span) // max(step, 1) + 1) if _near(count, step, span) else 1
    kind = whole.dtype
    for index in itertools.product(*map(range, whole.shape[:axis])):
        start = view.offset + sum(number * stride for number, stride in zip(index, strides, strict=False))
        for first in range(0, count, at_once):
            part = whole[index][first : first + at_once]
            nbytes = (len(part) - 1) * step + span
            at = start + first * step
            if _dense(part.shape, strides[axis:], view.itemsize):
                read_at(fd, part.reshape(-1).view(np.uint8).data, at, view.path)
            else:
                buffer = np.empty(nbytes, np.uint8)
                read_at(fd, buffer.data, at, view.path)
                part[...] = np.ndarray(part.shape, kind, buffer.data, 0, tuple(strides[axis:]))


def _near(count: int, step: int, span: int) -> bool:
    return count == 1 or step - span <= GAP


def _dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    wanted = contiguous_strides(tuple(shape), itemsize)
    return all(size == 1 or step == want for size, step, want in zip(shape, strides, wanted, strict=True))
