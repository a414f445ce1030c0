"""What became of a tensor: how far two versions of it are apart. Both are read once, in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mcore_convert.checkpoints.contents import Tensor
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.blocks import Bits, Lane, Scratch, is_float, is_true_in_lanes, lanes, read, sum_of_squares
from mcore_convert.storage.elements import Files, as_float
from mcore_convert.storage.spans import Block, Part, Span
from mcore_convert.text.quantities import in_digits, in_percent


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


def in_words(change: Change) -> dict[str, str]:
    """The numbers of a change for people, in the order of a table's columns; empty where there is none."""
    before, after = ("", "") if change.values is None else map(in_digits, change.values)
    return {
        "share": in_percent(change.share),
        "relative": in_digits(change.relative),
        "cosine": "" if change.cosine is None else f"{change.cosine:.6f}",
        "largest": in_digits(change.largest),
        "at": "" if change.largest_at is None else str(list(change.largest_at)),
        "from": before,
        "to": after,
    }


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
    if not all(is_float(bits.dtype) and is_true_in_lanes(bits, scratch) for bits in (a, b)):
        return _gap_exactly(a, b, span, block)
    found = Gap()
    same = a.dtype == b.dtype
    if same:
        unequal = np.not_equal(a.exact, b.exact, out=scratch.array("unequal", bool, a.numel))
        found.num_changed = int(np.count_nonzero(unequal))
    if same and not found.num_changed:
        found.squares_a = found.squares_b = sum(map(sum_of_squares, lanes(a, scratch, "lane a")))
    else:
        pairs = zip(
            lanes(a, scratch, "lane a", in_order=not same), lanes(b, scratch, "lane b", in_order=not same), strict=True
        )
        for lane_a, lane_b in pairs:
            found.squares_a += sum_of_squares(lane_a)
            found.squares_b += sum_of_squares(lane_b)
            gaps = _gaps(lane_a, lane_b, scratch)
            found.squares += sum_of_squares(gaps)
            if not same:
                found.num_changed += int(np.count_nonzero(gaps.values))
            high, low = float(gaps.values.max()), float(gaps.values.min())
            if max(high, -low) > max(known, found.largest):
                at = int(gaps.values.argmax() if high >= -low else gaps.values.argmin()) * gaps.step + gaps.first
                found.largest, found.largest_at = max(high, -low), span.place(block.start + at)
                found.values = (_value(a, at), _value(b, at))
    if not math.isfinite(found.squares + found.squares_a + found.squares_b):
        return _gap_exactly(a, b, span, block)
    return found


def _gaps(a: Lane, b: Lane, scratch: Scratch) -> Lane:
    """b - a, in place of b where that is a copy."""
    out = b.values if b.is_copy else scratch.array("gaps", np.float32, len(b.values))
    with np.errstate(over="ignore", invalid="ignore"):
        return b._replace(values=np.subtract(b.values, a.values, out=out), is_copy=True)


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
        gaps = np.abs(second - first)
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
