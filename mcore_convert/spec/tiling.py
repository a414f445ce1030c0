"""Tilings: sets of boxes that cover each element of a tensor exactly once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import prod

from mcore_convert.spec.shard import Box, Shape

FEW = 64  # most boxes for which the result is cached: one weight's in one file are the same for all layers and experts


def untiled(boxes: Sequence[Box], shape: Shape) -> str | None:
    """Return why the boxes do not tile a tensor exactly, or None if they do."""
    return (_untiled if len(boxes) <= FEW else _untiled.__wrapped__)(tuple(boxes), shape)


@lru_cache(maxsize=4096)
def _untiled(boxes: tuple[Box, ...], shape: Shape) -> str | None:
    if _are_cells(boxes, shape):
        return None
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.sizes) != len(shape) or box.intersect(whole) != box:
            return f"a part at {list(box.offsets)} of size {list(box.sizes)} lies outside"
    total = sum(box.numel for box in boxes)
    overlap = _overlap(boxes)
    if overlap is not None:
        return f"the parts at {list(overlap[0].offsets)} and {list(overlap[1].offsets)} overlap"
    if total != whole.numel:
        return f"{whole.numel - total} of {whole.numel} elements are in no part"
    return None


def _overlap(boxes: Sequence[Box], axis: int = 0) -> tuple[Box, Box] | None:
    """Return two boxes that share an element. Boxes that are disjoint along some dimension are not compared."""
    if len(boxes) < 2:
        return None
    if axis == len(boxes[0].sizes):
        return _overlapping_pair(boxes)
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        if box.offsets[axis] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[axis] + box.sizes[axis])
    pairs = (_overlap(group, axis + 1) for group in groups if len(group) > 1)
    return next(filter(None, pairs), None)


def _overlapping_pair(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, by a sweep along the first dimension."""
    active: list[Box] = []
    for box in sorted(boxes):
        start = box.offsets[0] if box.offsets else 0
        active = [other for other in active if not box.offsets or other.offsets[0] + other.sizes[0] > start]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None


def _are_cells(boxes: Collection[Box], shape: Shape) -> bool:
    """Return whether boxes of one size are all cells of a grid, each once. This is fast, and the usual case: chunks of
    experts of all layers, ten thousands of them.
    """
    sizes = {box.sizes for box in boxes}
    if len(sizes) != 1:
        return False
    (size,) = sizes
    offsets = {box.offsets for box in boxes}
    if len(size) != len(shape) or {*map(len, offsets)} != {len(shape)} or 0 in size:
        return False
    grid = [range(0, whole, part) for whole, part in zip(shape, size, strict=True)]
    if any(whole % part for whole, part in zip(shape, size, strict=True)) or len(boxes) != prod(map(len, grid)):
        return False
    along = zip(zip(*offsets, strict=True), grid, strict=True)
    return len(offsets) == len(boxes) and all(at in cells for column, cells in along for at in {*column})
