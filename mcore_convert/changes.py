"""What became of a tensor: how far two versions of it are apart. Both are read once, in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mcore_convert.contents import Tensor
from mcore_convert.elements import Files, as_float
from mcore_convert.spans import Block, Part, Span
from mcore_convert.spec.shard import Shape
from mcore_convert.values import (
    ADDABLE,
    FINITE,
    Bits,
    Lane,
    Scratch,
    is_float,
    lanes,
    magnitudes,
    number,
    read,
    sum_of_squares,
)


@dataclass(frozen=True)
class Change:
    """What became of one tensor from `a` to `b`, without vocabulary padding.

    `num_changed` elements have other bits, or, where the dtypes differ, another value. The norms are those of a, of b
    and of b - a, over the elements that are finite in both; `num_bad` elements of either are not. `largest` is the
    largest magnitude of b - a, at `largest_at` of the global tensor, where they have `values`.
    """

    name: str
    weight: str
    layer: int | None
    expert: int | None
    state: str
    shape: Shape
    dtypes: tuple[str, str]
    num_changed: int
    norms: tuple[float, float]
    norm: float
    largest: float
    largest_at: Shape | None
    values: tuple[float, float] | None
    num_bad: tuple[int, int]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def share(self) -> float:
        """The share of elements that changed."""
        return self.num_changed / self.numel if self.numel else 0.0

    @property
    def relative(self) -> float:
        """The norm of the difference over that of a: infinite where a is zero and b is not."""
        return relative(self.norm, self.norms[0])

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between a and b; None where one of them is zero."""
        a, b = self.norms
        # the law of cosines in the form that loses nothing where a and b are nearly equal
        return 1 - (self.norm**2 - (a - b) ** 2) / (2 * a * b) if a and b else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no infinity: there it is null."""
        return {**asdict(self), "share": self.share, "relative": finite(self.relative), "cosine": self.cosine}


def relative(norm: float, of: float) -> float:
    """A norm as a share of another."""
    if norm == 0:
        return 0.0
    return norm / of if of else math.inf


def finite(value: float) -> float | None:
    """A number, or None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def total_relative(changes: Iterable[Change]) -> float:
    """The relative norm of several tensors taken as one."""
    listed = list(changes)
    return relative(math.hypot(*(c.norm for c in listed)), math.hypot(*(c.norms[0] for c in listed)))


@dataclass
class Gap:
    """What was added up of some elements of both."""

    squares: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    num_changed: int = 0
    num_bad_a: int = 0
    num_bad_b: int = 0
    largest: float = 0.0
    largest_at: Shape | None = None
    values: tuple[float, float] | None = None

    def add(self, other: Gap) -> None:
        """Take in what was added up of other elements, which come later."""
        self.squares += other.squares
        self.squares_a += other.squares_a
        self.squares_b += other.squares_b
        self.num_changed += other.num_changed
        self.num_bad_a += other.num_bad_a
        self.num_bad_b += other.num_bad_b
        if other.largest > self.largest:
            self.largest, self.largest_at, self.values = other.largest, other.largest_at, other.values


def gap_of(part: Part, files: Files, scratch: Scratch) -> Gap:
    """Add up one part of two tensors."""
    view_a, view_b = part.span.views
    found = Gap()
    for block in part.blocks:
        a, b = read(files, view_a, block, scratch, "a"), read(files, view_b, block, scratch, "b")
        found.add(_gap_of_block(a, b, scratch, found.largest, part.span, block))
    return found


def _gap_of_block(a: Bits, b: Bits, scratch: Scratch, known: float, span: Span, block: Block) -> Gap:
    """Add up a block. Where its largest difference is not above `known`, its place is not looked for."""
    if not (is_float(a.dtype) and is_float(b.dtype)):
        return _gap_exactly(a, b, span, block)
    highest_a, highest_b = int(magnitudes(a, scratch).max()), int(magnitudes(b, scratch).max())
    if highest_a > FINITE[a.dtype] or highest_b > FINITE[b.dtype]:
        return _gap_exactly(a, b, span, block)
    top_a, top_b = number(highest_a, a.dtype), number(highest_b, b.dtype)
    if max(top_a, top_b) > ADDABLE:
        return _gap_exactly(a, b, span, block)
    found = Gap()
    same = a.dtype == b.dtype
    if same:
        unequal = np.not_equal(a.exact, b.exact, out=scratch.array("unequal", bool, a.numel))
        found.num_changed = int(np.count_nonzero(unequal))
    lanes_a = lanes(a, scratch, "a", in_order=not same)
    if same and not found.num_changed:
        found.squares_a = found.squares_b = sum(sum_of_squares(lane, top_a) for lane in lanes_a)
        return found
    lanes_b = lanes(b, scratch, "b", in_order=not same)
    for lane_a, lane_b in zip(lanes_a, lanes_b, strict=True):
        gaps = np.subtract(lane_a.values, lane_b.values, out=scratch.array("gap", np.float32, len(lane_a.values)))
        np.abs(gaps, out=gaps)
        if not same:
            found.num_changed += int(np.count_nonzero(gaps))
        top = float(gaps.max())
        if top > max(known, found.largest):
            index = int(gaps.argmax()) * lane_a.step + lane_a.first
            found.largest, found.largest_at = top, span.place(block.start + index)
            found.values = (_value(a, index), _value(b, index))
        found.squares += sum_of_squares(Lane(gaps, 0, 1), top)
        found.squares_a += sum_of_squares(lane_a, top_a)
        found.squares_b += sum_of_squares(lane_b, top_b)
    return found


def _value(bits: Bits, index: int) -> float:
    return float(as_float(bits.exact[index : index + 1], bits.dtype)[0])


def _gap_exactly(a: Bits, b: Bits, span: Span, block: Block) -> Gap:
    """The same in fp64, of any dtypes, with what is not finite on either side counted and left out."""
    first, second = as_float(a.exact, a.dtype), as_float(b.exact, b.dtype)
    good_a, good_b = np.isfinite(first), np.isfinite(second)
    if a.dtype == b.dtype:
        unequal = a.exact != b.exact
    else:
        unequal = (first != second) & ~(np.isnan(first) & np.isnan(second))
    found = Gap(num_changed=int(np.count_nonzero(unequal)))
    found.num_bad_a, found.num_bad_b = (good.size - int(np.count_nonzero(good)) for good in (good_a, good_b))
    good = good_a & good_b
    first, second = np.where(good, first, 0), np.where(good, second, 0)
    with np.errstate(over="ignore", under="ignore"):
        gaps = np.abs(first - second)
        found.squares, found.squares_a, found.squares_b = (float(np.square(x).sum()) for x in (gaps, first, second))
    index = int(gaps.argmax())
    found.largest, found.largest_at = float(gaps[index]), span.place(block.start + index)
    found.values = (float(first[index]), float(second[index]))
    return found


def change_of(a: Tensor, b: Tensor, gap: Gap) -> Change:
    """What was added up of two tensors, as a change."""
    return Change(
        a.name,
        a.weight,
        a.at.layer,
        a.at.expert,
        a.state,
        a.shape,
        (a.dtype, b.dtype),
        gap.num_changed,
        (math.sqrt(gap.squares_a), math.sqrt(gap.squares_b)),
        math.sqrt(gap.squares),
        gap.largest,
        gap.largest_at if gap.largest else None,
        gap.values if gap.largest else None,
        (gap.num_bad_a, gap.num_bad_b),
    )
