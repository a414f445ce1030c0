"""Copies whose sources share the rows of a file, such as the parts of a matrix that several ranks hold.

Each of them alone has many short runs, and takes as many system calls; together they are read once, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mcore_convert.conversion.plan import Copy
from mcore_convert.storage.codecs import Blocks
from mcore_convert.storage.digests import Feed, hand_on
from mcore_convert.storage.elements import KERNEL_RUN, Files, copy_view
from mcore_convert.storage.encoding import box_of, encode
from mcore_convert.storage.gather import LIMIT, scratch
from mcore_convert.storage.shifts import Shifted
from mcore_convert.storage.values import cast
from mcore_convert.storage.views import Coded, Slot, View


def together(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Return the copies in groups for `copy_together`."""
    groups: dict[object, list[Copy]] = {}
    encoded: dict[Coded, list[Copy]] = {}
    for number, copy in enumerate(copies):
        source = copy.source
        if copy.target.coded is not None:  # a block is encoded as a whole
            encoded.setdefault(copy.target.coded, []).append(copy)
            continue
        key = (source.path, source.shape, source.strides, source.dtype) if _in_short_runs(source) else number
        groups.setdefault(key, []).append(copy)
    result: list[list[Copy]] = [*encoded.values()]
    for group in groups.values():
        if len(group) == 1:
            result.append(group)
            continue
        first = min(copy.source.offset for copy in group)
        span = max(copy.source.block((slice(0, 1),)).end for copy in group) - first
        row = sum(copy.source.nbytes for copy in group) // group[0].source.shape[0]
        if row <= span <= group[0].source.strides[0] and 2 * row >= span:
            result.append(sorted(group, key=lambda copy: copy.source.offset))
        else:
            result += [[copy] for copy in group]
    return result


def _in_short_runs(view: View) -> bool:
    if len(view.shape) < 2 or not view.nbytes or view.is_contiguous or not view.is_plain:
        return False
    return max(view.strides) == view.strides[0] and view.shape[-1] * view.itemsize < KERNEL_RUN


def copy_together(files: Files, group: Sequence[Copy], feed: Feed | None = None) -> Iterator[int]:
    """Run the copies of a group; yield the number of bytes read after each block. `feed` as for `copy_view`.

    Raises:
        OverflowError: as `cast`.
        ConvertError: as `encode` and `Shifted.write`.
    """
    coded = group[0].target.coded
    if isinstance(coded, Shifted):
        for source, target in group:
            yield from coded.write(files, source, target, feed)
        return
    if coded is not None:
        assert isinstance(coded, Blocks)
        slots = [Slot(source, box_of(target, coded)) for source, target in group]
        yield from encode(files, coded, slots, feed)
        return
    if len(group) == 1:
        yield from copy_view(files, group[0].source, group[0].target, feed)
        return
    first = group[0].source
    span = max(copy.source.block((slice(0, 1),)).end for copy in group) - first.offset
    step = first.strides[0]
    at_once = max(1, LIMIT // step)
    for start in range(0, first.shape[0], at_once):
        count = min(at_once, first.shape[0] - start)
        rows = scratch((count - 1) * step + span)
        files.read_run(first.path, first.offset + start * step, rows.data)
        done = 0
        for source, target in group:
            shape = (count, *source.shape[1:])
            part = np.ndarray(shape, f"u{source.itemsize}", rows.data, source.offset - first.offset, source.strides)
            here = target.block((slice(start, start + count),))
            with files.target(here) as written:
                written[...] = cast(part, source.dtype, target.dtype)
                hand_on(feed, here, written)
            done += part.nbytes
        yield done
