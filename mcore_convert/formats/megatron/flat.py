"""Flat buffers: many local tensors in one run of elements, as in the state of Megatron's distributed optimizer.

Parameters are laid out in the reverse of the order in which the modules register them, and each begins at a multiple of
64 elements (Megatron Core, `param_and_grad_buffer.py`, `_ParamAndGradBuffer`). The gaps are padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mcore_convert.spec.shard import Box, Shape, Shard
from mcore_convert.storage.views import DTYPE_SIZES, Slot, View, contiguous_strides

ALIGNMENT = 64  # elements


@dataclass(frozen=True)
class Local:
    """One rank's part of a global tensor: its shape, and pairs of its boxes and the boxes of the global tensor."""

    shape: Shape
    boxes: tuple[tuple[Box, Box], ...]  # (in the local tensor, in the global tensor)

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    def parts_of(self, box: Box) -> list[tuple[Box, Box]]:
        """Return the parts of a box of the local tensor, relative to the box,
        each with its box of the global tensor.

        Cached: experts and layers share the results.
        """
        parts = self._parts.get(box)
        if parts is None:
            parts = self._parts[box] = []
            for inside, outside in self.boxes:
                common = inside.intersect(box)
                if common is not None:
                    moved = common.relative_to(inside.offsets)
                    there = Box(tuple(a + b for a, b in zip(moved.offsets, outside.offsets, strict=True)), moved.sizes)
                    parts.append((common.relative_to(box.offsets), there))
        return parts

    @cached_property
    def _parts(self) -> dict[Box, list[tuple[Box, Box]]]:
        return {}


@lru_cache(maxsize=4096)
def local_of(shard: Shard, shape: Shape, tp: int, rank: int) -> Local:
    """Return the part of a global tensor on tensor-parallel rank `rank`: its boxes concatenated along the cut."""
    boxes = shard.boxes(shape, tp, rank)
    if shard.dim is None:
        return Local(shape, ((boxes[0], boxes[0]),))
    local = list(shape)
    local[shard.dim] = sum(box.sizes[shard.dim] for box in boxes)
    pairs = []
    at = 0
    for box in boxes:
        offsets = [0] * len(shape)
        offsets[shard.dim] = at
        pairs.append((Box(tuple(offsets), box.sizes), box))
        at += box.sizes[shard.dim]
    return Local(tuple(local), tuple(pairs))


def slots_in_global(slots: Iterable[Slot], local: Local) -> Iterator[Slot]:
    """Yield slots of a local tensor as slots of its global tensor."""
    for view, box in slots:
        for part, outside in local.parts_of(box):
            yield Slot(view if part.sizes == box.sizes else view.narrow(part), outside)


def slots_of_flat(pieces: Sequence[tuple[int, View]], start: int, local: Local) -> list[Slot]:
    """Return the slots of a local tensor that begins at `start` in a flat buffer.

    Args:
        pieces: one-dimensional views of the buffer, each with its offset in the buffer; a boundary may cut a row.
    """
    slots: list[Slot] = []
    for offset, view in pieces:
        low, high = max(offset, start), min(offset + view.shape[0], start + local.numel)
        for box, first in boxes_of_range(local.shape, low - start, high - start) if low < high else ():
            at = view.offset + (start + first - offset) * view.itemsize
            part = View(view.path, at, box.sizes, contiguous_strides(box.sizes, DTYPE_SIZES[view.dtype]), view.dtype)
            slots += slots_in_global([Slot(part, box)], local)
    return slots


def boxes_of_range(shape: Shape, start: int, stop: int) -> list[tuple[Box, int]]:
    """Return elements `start` to `stop` of a row-major tensor as boxes, each with the index of its first element.

    In every dimension a range is at most a partial row, whole rows, and a partial row.
    """
    if start >= stop:
        return []
    if not shape:
        return [(Box((), ()), start)]
    inner = Box.whole(shape[1:]).numel
    first, last = start // inner, (stop - 1) // inner
    if first == last and (start % inner or stop % inner):
        return [
            (Box((first, *box.offsets), (1, *box.sizes)), first * inner + at)
            for box, at in boxes_of_range(shape[1:], start - first * inner, stop - first * inner)
        ]
    head = -(-start // inner)
    tail = stop // inner
    boxes = boxes_of_range(shape, start, head * inner) if start < head * inner else []
    if head < tail:
        boxes.append((Box((head, *(0 for _ in shape[1:])), (tail - head, *shape[1:])), head * inner))
    return boxes + (boxes_of_range(shape, tail * inner, stop) if tail * inner < stop else [])
