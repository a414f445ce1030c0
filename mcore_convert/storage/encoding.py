"""Encoding: rounding numbers to codes of a few bits with a scale per block, while they are written.

The scale of a block is its largest magnitude divided by the largest value of the code, so that nothing is clipped. The
error is at most half the distance of two neighbouring values of the code, times the scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mcore_convert.errors import ConvertError
from mcore_convert.spec.shard import Box
from mcore_convert.storage.codecs import CODES, Blocks, Floats
from mcore_convert.storage.digests import Feed, hand_on
from mcore_convert.storage.values import Bytes, round_to
from mcore_convert.storage.views import Access, Slot, View, cut

STRIPE = 2**19  # elements that are encoded at once
LEAST_SCALE = np.float32(2.0**-126)  # for blocks of zeros or nearly zeros
LARGEST = {"float8_e4m3fn": 448.0, "packed int4": 7.0}  # -8 is unused, so that the range is symmetric


def encode(files: Access, coded: Blocks, slots: Sequence[Slot], feed: Feed | None = None) -> Iterator[int]:
    """Write a coded matrix; yield the bytes read after each stripe of rows.

    Args:
        slots: the boxes of the matrix that source files hold; elements outside of them are zero.
        feed: gets the bytes that were written.

    Raises:
        ConvertError: a number is not finite.
    """
    rows, columns = coded.shape
    high = coded.block[0]
    step = max(1, STRIPE // (columns * high)) * high
    for start in range(0, rows, step):
        box = Box((start, 0), (min(step, rows - start), columns))
        exact: Floats = np.zeros(box.sizes, np.float32)
        done = 0
        for part in cut(slots, box):
            low = part.box.offsets[0] - start, part.box.offsets[1]
            place = tuple(slice(at, at + size) for at, size in zip(low, part.box.sizes, strict=True))
            exact[place] = files.read(part.view, dtype="float32").view(np.float32)
            done += part.view.nbytes
        codes, scales = _encoded(coded, exact)
        first = start // high
        for part_of, content, at in ((coded.parts[0], codes, start), (coded.parts[1], scales, first)):
            view = part_of.narrow(Box((at, 0), (content.shape[0], content.shape[1])))
            with files.target(view) as written:
                written[...] = content
                hand_on(feed, view, written)
        yield done


def box_of(view: View, coded: Blocks) -> Box:
    """Return the box of a coded matrix that a view of it covers."""
    row, column = divmod(view.offset // view.itemsize, coded.shape[1])
    return Box((row, column), view.shape)


def _encoded(coded: Blocks, exact: Floats) -> tuple[Bytes, Bytes]:
    """Return the codes of some rows in their stored form, and the scales."""
    high, wide = coded.block
    rows, columns = exact.shape
    tops = np.maximum.reduceat(np.abs(exact), np.arange(0, columns, wide), axis=1)
    tops = np.maximum.reduceat(tops, np.arange(0, rows, high), axis=0)
    if not np.isfinite(tops).all():
        raise ConvertError(f"`{coded.names[0]}` has numbers that are not finite, and cannot be quantised")
    stored = coded.parts[1].dtype
    scales = np.maximum(tops / np.float32(LARGEST[coded.code]), LEAST_SCALE).view(np.uint32)
    if stored != "float32":
        scales = round_to(scales, stored)
    used = (scales.astype(np.uint32) << 16 if stored == "bfloat16" else scales).view(np.float32)
    of_columns = np.repeat(used, wide, axis=1)[:, :columns]
    for top in range(0, rows, high):  # in place
        np.divide(exact[top : top + high], of_columns[top // high], out=exact[top : top + high])
    if CODES[coded.code].bits == 8:
        return _e4m3(exact), scales
    levels = (np.clip(np.rint(exact), -7, 7) + 8).astype(np.uint8)
    pairs: Bytes = levels[:, ::2] | levels[:, 1::2] << 4
    return pairs, scales


def _e4m3(exact: Floats) -> NDArray[np.uint8]:
    """Return the nearest code of each number of at most 448, ties to even, as torch rounds."""
    sizes = np.minimum(np.abs(exact), np.float32(448))
    bits = sizes.view(np.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - ((127 - 7) << 3)
    small = np.rint(sizes * np.float32(512)).astype(np.uint32)  # of 2**-9, the step below 2**-6
    codes = np.where(sizes < np.float32(2.0**-6), small, normal).astype(np.uint8)
    codes |= np.signbit(exact).astype(np.uint8) << 7
    return codes
