"""The comparison of tensors, block by block, that `verify` and `diff` report: the distance of two versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from mcore_convert.checkpoints.contents import Tensor
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.blocks import (
    Bits,
    Lane,
    Scratch,
    Step,
    Summary,
    is_float,
    is_true_in_lanes,
    lanes,
    sum_of_squares,
    summed,
)
from mcore_convert.storage.elements import Bytes, Files
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.spans import paired_spans, spans_of
from mcore_convert.storage.values import as_float
from mcore_convert.storage.views import Slot
from mcore_convert.text.quantities import in_digits, in_percent

EXACT_STEP = 2**17  # elements that are compared in fp64 at once: ten arrays of this size are in memory


@dataclass(frozen=True)
class Change:
    """Change of one tensor from `a` to `b`, without vocabulary padding.

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
        """Share of elements that changed."""
        return self.num_changed / self.numel if self.numel else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over that of a: infinite where a is zero and b is not."""
        return relative(self.norm, self.norms[0])

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between a and b; None where one of them is zero."""
        a, b = self.norms
        # the law of cosines, in the form without cancellation where a and b are nearly equal
        return 1 - (self.norm**2 - (a - b) ** 2) / (2 * a * b) if a and b else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which has no infinity: there it is null."""
        return {**asdict(self), "share": self.share, "relative": finite(self.relative), "cosine": self.cosine}


def in_words(change: Change) -> dict[str, str]:
    """Format the numbers of a change, in the order of a table's columns; empty where nothing changed."""
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
    """Return a norm as a share of another."""
    if norm == 0:
        return 0.0
    return norm / of if of else math.inf


def finite(value: float) -> float | None:
    """Return a number, or None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def total_relative(changes: Iterable[Change]) -> float:
    """Return the relative norm of several tensors taken as one."""
    listed = list(changes)
    return relative(math.hypot(*(c.norm for c in listed)), math.hypot(*(c.norms[0] for c in listed)))


@dataclass
class Gap(Summary):
    """Distance of some elements of two tensors: `squares` and `largest` are of b - a where both are finite.

    `largest_apart` is the largest magnitude of b - a over unequal elements of which one is not finite: infinite, or
    NaN where one of them is.
    """

    squares_a: float = 0.0
    squares_b: float = 0.0
    num_changed: int = 0
    num_bad_a: int = 0
    num_bad_b: int = 0
    largest_apart: float = 0.0
    values: tuple[float, float] | None = None

    def add(self, other: Self) -> None:
        """Add the distance of elements further on."""
        if other.largest > self.largest:
            self.values = other.values
        super().add(other)
        self.squares_a += other.squares_a
        self.squares_b += other.squares_b
        self.num_changed += other.num_changed
        self.num_bad_a += other.num_bad_a
        self.num_bad_b += other.num_bad_b
        self.largest_apart = float(np.maximum(self.largest_apart, other.largest_apart))  # NaN propagates


Slots = Sequence[Slot]


def gaps_between(pairs: Iterable[tuple[Slots, Slots]], files: Files, meter: Meter, *, norms: bool = True) -> list[Gap]:
    """Read pairs of tensors once, block by block, and return the distance of each pair.

    A tensor without slots counts as zero throughout.

    Args:
        norms: compute the norms of equal blocks, too; without them equal blocks cost only a comparison of bits.

    Raises:
        UnreadableCheckpoint: a file is shorter than its header says.
    """
    spans = (paired_spans(a, b) if a and b else spans_of(a or b) for a, b in pairs)
    return summed(spans, Gap, partial(_gap, norms=norms), files, meter)


def _gap(step: Step, *, norms: bool) -> Gap:
    """Return the distance of the two sides of a block."""
    if len(step.bits) == 1:
        (only,) = step.bits
        return _gap_exactly(only, Bits(np.zeros(only.numel), only.numel, "float64"), step)
    a, b = step.bits
    scratch = step.scratch
    gap = Gap()
    same = a.dtype == b.dtype
    if same:
        unequal = np.not_equal(a.exact, b.exact, out=scratch.array("unequal", bool, a.numel))
        gap.num_changed = int(np.count_nonzero(unequal))
        if not gap.num_changed and not norms:
            return gap
    if not all(is_float(bits.dtype) and is_true_in_lanes(bits, scratch) for bits in (a, b)):
        return _gap_exactly(a, b, step)
    if same and not gap.num_changed:
        gap.squares_a = gap.squares_b = sum(map(sum_of_squares, lanes(a, scratch, "lane a")))
    else:
        pairs = zip(
            lanes(a, scratch, "lane a", in_order=not same), lanes(b, scratch, "lane b", in_order=not same), strict=True
        )
        for lane_a, lane_b in pairs:
            gap.squares_a += sum_of_squares(lane_a)
            gap.squares_b += sum_of_squares(lane_b)
            gaps = _gaps(lane_a, lane_b, scratch)
            gap.squares += sum_of_squares(gaps)
            if not same:
                gap.num_changed += int(np.count_nonzero(gaps.values))
            high, low = float(gaps.values.max()), float(gaps.values.min())
            if max(high, -low) > max(step.known, gap.largest):
                at = int(gaps.values.argmax() if high >= -low else gaps.values.argmin()) * gaps.step + gaps.first
                gap.largest, gap.largest_at = max(high, -low), step.place(at)
                gap.values = (_value(a, at), _value(b, at))
    if not math.isfinite(gap.squares + gap.squares_a + gap.squares_b):
        return _gap_exactly(a, b, step)
    return gap


def _gaps(a: Lane, b: Lane, scratch: Scratch) -> Lane:
    """Return b - a, written over b if that is a copy."""
    out = b.values if b.is_copy else scratch.array("gaps", np.float32, len(b.values))
    with np.errstate(over="ignore", invalid="ignore"):
        return b._replace(values=np.subtract(b.values, a.values, out=out), is_copy=True)


def _value(bits: Bits, index: int) -> float:
    return float(as_float(bits.exact[index : index + 1], bits.dtype)[0])


def _gap_exactly(a: Bits, b: Bits, step: Step) -> Gap:
    """Return the distance in fp64, for any dtypes; elements not finite on either side are counted and left out."""
    gap = Gap()
    for start in range(0, a.numel, EXACT_STEP):
        part = slice(start, min(start + EXACT_STEP, a.numel))
        gap.add(_exact_gap(a.exact[part], b.exact[part], (a.dtype, b.dtype), step, start))
    return gap


def _exact_gap(a: Bytes, b: Bytes, dtypes: tuple[str, str], step: Step, start: int) -> Gap:
    first, second = as_float(a, dtypes[0]), as_float(b, dtypes[1])
    good_a, good_b = np.isfinite(first), np.isfinite(second)
    good = good_a & good_b
    same = dtypes[0] == dtypes[1]
    unequal = a != b if same else (first != second) & ~(np.isnan(first) & np.isnan(second))
    gap = Gap(num_changed=int(np.count_nonzero(unequal)))
    gap.num_bad_a, gap.num_bad_b = (each.size - int(np.count_nonzero(each)) for each in (good_a, good_b))
    if gap.num_bad_a or gap.num_bad_b:
        apart = unequal & ~good
        with np.errstate(invalid="ignore"):
            gap.largest_apart = float(np.abs(second[apart] - first[apart]).max(initial=0.0))
        first[~good] = second[~good] = 0
    with np.errstate(over="ignore", under="ignore"):
        gaps = np.abs(second - first)
        gap.squares, gap.squares_a, gap.squares_b = (float(np.square(x).sum()) for x in (gaps, first, second))
    index = int(gaps.argmax())
    gap.largest, gap.largest_at = float(gaps[index]), step.place(start + index)
    gap.values = (float(first[index]), float(second[index]))
    return gap


def change_of(a: Tensor, b: Tensor, gap: Gap) -> Change:
    """Return the distance of two tensors as a change."""
    return Change(
        a.name,
        a.weight,
        a.at.number,
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
