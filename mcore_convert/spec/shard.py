"""Boxes of a global tensor, and those that a tensor-parallel rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from mcore_convert.errors import LayoutError

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A rectangular part of a tensor: one offset and one size per dimension, in elements."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    @lru_cache(maxsize=4096)  # the tensors of a model have few shapes
    def whole(shape: Shape) -> Box:
        """Return the box of a whole tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor, or None if it is empty."""
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
        """Return the box with offsets relative to `origin`."""
        return Box(tuple(mine - zero for mine, zero in zip(self.offsets, origin, strict=True)), self.sizes)

    @property
    def transposed(self) -> Box:
        """The box with its dimensions reversed."""
        return Box(self.offsets[::-1], self.sizes[::-1])


def parts_in(boxes: tuple[Box, ...], box: Box) -> list[tuple[int, Box]]:
    """Return the numbers of the boxes that intersect another one, each with the intersection."""
    parts = ((number, each.intersect(box)) for number, each in enumerate(boxes))
    return [(number, part) for number, part in parts if part is not None]


@dataclass(frozen=True)
class Shard:
    """Sharding of `dim`: each part is cut into `tp` equal pieces, and rank r owns piece r of every part.

    `dim=None` replicates. `parts` are the relative sizes of the parts, in numbers or in words of `Dims.size`, which
    `Dims.sized` replaces with numbers. They are `(1, 1)` for a gated `linear_fc1`: each rank holds `[gate_r; up_r]`,
    while the global tensor is `[gate; up]` (Megatron Core, `apply_swiglu_sharded_factory`). Parts with `names` are
    separate tensors in `torch_dist`, with the name appended to that of the weight (`gated_delta_net.py`,
    `_split_tensor_factory`).
    """

    dim: int | None = None
    parts: tuple[int | str, ...] = (1,)
    names: tuple[str, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Whether there are two equal parts, the gate and the gated values."""
        return self.parts == (1, 1)

    def lengths(self, length: int) -> list[int]:
        """Return the length of each part of a dimension.

        Raises:
            LayoutError: the dimension is not divisible by the sum of the parts.
        """
        numbers = [part for part in self.parts if isinstance(part, int)]
        assert len(numbers) == len(self.parts), f"the parts {self.parts} have no sizes yet"
        whole = sum(numbers)
        if length % whole:
            raise LayoutError(f"a dimension of {length} cannot be cut into {' + '.join(map(str, numbers))} parts")
        return [length // whole * number for number in numbers]

    def boxes(self, shape: Shape, tp: int, rank: int) -> list[Box]:
        """Return the boxes of the global tensor which, concatenated along `dim`, are the local tensor of `rank`.

        Raises:
            LayoutError: `dim` cannot be cut evenly.
        """
        if self.dim is None:
            return [Box.whole(shape)]
        boxes, start = [], 0
        for length in self.lengths(shape[self.dim]):
            if length % tp:
                of = "" if len(self.parts) == 1 else f", {length} of them,"
                raise LayoutError(f"dimension {self.dim} of {list(shape)}{of} cannot be cut into tp = {tp} parts")
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[self.dim], sizes[self.dim] = start + rank * (length // tp), length // tp
            boxes.append(Box(tuple(offsets), tuple(sizes)))
            start += length
        return boxes

    def grid(self, shape: Shape, tp: int) -> list[Box]:
        """Return the boxes of all ranks, each once; they tile the global tensor."""
        if self.dim is None:
            return [Box.whole(shape)]
        return [box for rank in range(tp) for box in self.boxes(shape, tp, rank)]


REPLICATED, COLUMN, ROW, GATED_COLUMN = Shard(), Shard(0), Shard(1), Shard(0, parts=(1, 1))
