"""Boxes of a global tensor, and which of them a tensor-parallel rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mcore_convert.errors import LayoutError

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor: one offset and one size per dimension, in elements."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Shape) -> Box:
        """The box that is all of a tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor, or None where they share no element."""
        offsets = []
        sizes = []
        for mine, size, theirs, other_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low = mine if mine > theirs else theirs
            high = min(mine + size, theirs + other_size)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: Shape) -> Box:
        """The same box counted from another corner."""
        return Box(tuple(mine - zero for mine, zero in zip(self.offsets, origin, strict=True)), self.sizes)

    @property
    def transposed(self) -> Box:
        """The box with its dimensions reversed."""
        return Box(self.offsets[::-1], self.sizes[::-1])


@dataclass(frozen=True)
class Shard:
    """Cut `dim` into `parts * tp` equal pieces; rank r owns piece r of every part. `dim=None` replicates.

    `parts` is 2 for a gated `linear_fc1`: each rank holds `[gate_r; up_r]`, while the global tensor is `[gate; up]`
    (Megatron Core, `apply_swiglu_sharded_factory`).
    """

    dim: int | None = None
    parts: int = 1

    def boxes(self, shape: Shape, tp: int, rank: int) -> list[Box]:
        """The boxes of the global tensor which, concatenated along `dim`, are the local tensor of `rank`.

        Raises:
            LayoutError: where `dim` cannot be cut evenly.
        """
        if self.dim is None:
            return [Box.whole(shape)]
        count = self.parts * tp
        if shape[self.dim] % count:
            raise LayoutError(
                f"dimension {self.dim} of {list(shape)} cannot be cut into {self.parts} x tp = {tp} parts"
            )
        step = shape[self.dim] // count
        boxes = []
        for part in range(self.parts):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[self.dim], sizes[self.dim] = (part * tp + rank) * step, step
            boxes.append(Box(tuple(offsets), tuple(sizes)))
        return boxes

    def grid(self, shape: Shape, tp: int) -> list[Box]:
        """The boxes of all ranks, each once: they tile the global tensor."""
        if self.dim is None:
            return [Box.whole(shape)]
        return [box for rank in range(tp) for box in self.boxes(shape, tp, rank)]


REPLICATED, COLUMN, ROW, GATED_COLUMN = Shard(), Shard(0), Shard(1), Shard(0, parts=2)
