"""Statistics of weights: norm, largest value, zeros, NaN. Each weight is read once, in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcore_convert.checkpoints.contents import Contents, Tensor
from mcore_convert.spec.names import Index
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.blocks import (
    ADDABLE,
    FINITE,
    Bits,
    Step,
    Summary,
    is_float,
    lanes,
    magnitudes,
    number,
    sum_of,
    sum_of_squares,
    summed,
)
from mcore_convert.storage.elements import Bytes, Files, blocks_of
from mcore_convert.storage.phases import phase
from mcore_convert.storage.progress import Meter, Progress
from mcore_convert.storage.spans import spans_of
from mcore_convert.storage.values import as_float


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of one tensor, without vocabulary padding.

    `norm`, `mean` and `largest` are those of its finite elements: `norm` is the root of their sum of squares,
    `largest` the largest magnitude, at `largest_at` of the global tensor. `zeros`, `num_nan` and `num_inf` count
    elements. `dead_rows` are the rows, indices of the first dimension, that are zero throughout; `first_bad` is the
    index of the first NaN or infinity.
    """

    name: str
    weight: str
    layer: int | None
    expert: int | None
    state: str
    shape: Shape
    dtype: str
    norm: float
    mean: float
    largest: float
    largest_at: Shape | None
    zeros: int
    num_nan: int
    num_inf: int
    dead_rows: tuple[range, ...]
    first_bad: Shape | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_finite(self) -> int:
        return self.numel - self.num_nan - self.num_inf

    @property
    def rms(self) -> float:
        """Root of the mean square."""
        return total_rms([self])

    @property
    def share_of_zeros(self) -> float:
        return self.zeros / self.numel if self.numel else 0.0

    @property
    def peak(self) -> float:
        """Largest magnitude over the rms."""
        return self.largest / self.rms if self.rms else 0.0

    @property
    def num_dead_rows(self) -> int:
        return sum(map(len, self.dead_rows))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; ranges of rows as first and last."""
        return {
            **asdict(self),
            "dead_rows": [[rows[0], rows[-1]] for rows in self.dead_rows],
            "rms": self.rms,
            "share_of_zeros": self.share_of_zeros,
        }


def total_rms(weights: Sequence[WeightStatistics]) -> float:
    """Return the rms of the finite elements of several tensors taken as one."""
    count = sum(weight.num_finite for weight in weights)
    return math.hypot(*(weight.norm for weight in weights)) / math.sqrt(count) if count else 0.0


@dataclass
class Tally(Summary):
    """Statistics of some elements of a tensor."""

    total: float = 0.0
    zeros: int = 0
    num_nan: int = 0
    num_inf: int = 0
    first_bad: Shape | None = None

    def add(self, other: Self) -> None:
        """Add the statistics of elements further on."""
        super().add(other)
        self.total += other.total
        self.zeros += other.zeros
        self.num_nan += other.num_nan
        self.num_inf += other.num_inf
        self.first_bad = self.first_bad or other.first_bad


def measure(contents: Contents, *, progress: Progress | None = None) -> tuple[WeightStatistics, ...]:
    """Read every tensor once and return the statistics of its values.

    Raises:
        UnreadableCheckpoint: a file is shorter than its header says.
    """
    spans = (spans_of(tensor.slots) for tensor in contents.tensors)
    with phase(progress, "measuring", contents.nbytes), Files() as files:
        meter = Meter(contents.nbytes, progress)
        tallies = summed(spans, Tally, _tally, files, meter)
        return tuple(_statistics(t, tally, files) for t, tally in zip(contents.tensors, tallies, strict=True))


def _tally(step: Step) -> Tally:
    """Return the statistics of a block."""
    (bits,) = step.bits
    scratch = step.scratch
    if not is_float(bits.dtype):
        return _tally_exactly(bits, step)
    sizes = magnitudes(bits, scratch)
    highest = int(sizes.max())
    if highest > FINITE[bits.dtype]:
        return _tally_exactly(bits, step)
    tally = Tally(largest=number(highest, bits.dtype))
    if tally.largest > ADDABLE:
        return _tally_exactly(bits, step)
    if int(sizes.min()) == 0:
        tally.zeros = bits.numel - int(np.count_nonzero(sizes))
    if tally.largest > step.known:
        tally.largest_at = step.place(int(sizes.argmax()))
    for lane in lanes(bits, scratch, "lane"):
        tally.total += sum_of(lane)
        tally.squares += sum_of_squares(lane)
    return tally


def _tally_exactly(bits: Bits, step: Step) -> Tally:
    """Return the statistics in fp64, for any dtype; NaN and infinities are counted and left out."""
    values = as_float(bits.exact, bits.dtype)
    good = np.isfinite(values)
    tally = Tally(zeros=int(np.count_nonzero(values == 0)), num_nan=int(np.count_nonzero(np.isnan(values))))
    tally.num_inf = values.size - int(np.count_nonzero(good)) - tally.num_nan
    if tally.num_nan or tally.num_inf:
        tally.first_bad = step.place(int(good.argmin()))
        values[~good] = 0
    sizes = np.abs(values)
    at = int(sizes.argmax())
    tally.largest, tally.largest_at = float(sizes[at]), step.place(at)
    with np.errstate(over="ignore", under="ignore"):
        tally.squares = float(np.square(values).sum())
    tally.total = float(values.sum())
    return tally


def _statistics(tensor: Tensor, tally: Tally, files: Files) -> WeightStatistics:
    numel = math.prod(tensor.shape)
    finite = numel - tally.num_nan - tally.num_inf
    at: Index = tensor.at
    return WeightStatistics(
        tensor.name,
        tensor.weight,
        at.number,
        at.expert,
        tensor.state,
        tensor.shape,
        tensor.dtype,
        math.sqrt(tally.squares),
        tally.total / finite if finite else 0.0,
        tally.largest,
        tally.largest_at if tally.largest else None,
        tally.zeros,
        tally.num_nan,
        tally.num_inf,
        _dead_rows(tensor, tally.zeros, files),
        tally.first_bad,
    )


def _dead_rows(tensor: Tensor, zeros: int, files: Files) -> tuple[range, ...]:
    """Return the rows of a matrix that are zero throughout; searched only if there are zeros enough for a row."""
    shape = tensor.shape
    if len(shape) < 2 or zeros < math.prod(shape[1:]):
        return ()
    if zeros == math.prod(shape):
        return (range(shape[0]),)
    alive = np.zeros(shape[0], bool)
    for slot in tensor.slots:
        first = slot.box.offsets[0]
        for block in blocks_of(slot.view.shape, slot.view.itemsize):
            part = _has_value(files.read(slot.view.block(block)), slot.view.dtype)
            start = first + (block[0].start if block else 0)
            alive[start : start + len(part)] |= part.reshape(len(part), -1).any(axis=1)
    return tuple(_ranges(np.flatnonzero(~alive)))


def _has_value(array: Bytes, dtype: str) -> NDArray[np.bool_]:
    """Return which elements are not zero; the sign of a zero does not count."""
    values = np.left_shift(array, 1) if is_float(dtype) else as_float(array, dtype)
    nonzero: NDArray[np.bool_] = values != 0
    return nonzero


def _ranges(rows: Sequence[int] | NDArray[np.intp]) -> list[range]:
    """Return ascending numbers as ranges."""
    ranges: list[range] = []
    for row in map(int, rows):
        if ranges and ranges[-1].stop == row:
            ranges[-1] = range(ranges[-1].start, row + 1)
        else:
            ranges.append(range(row, row + 1))
    return ranges
