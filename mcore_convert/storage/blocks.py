"""Elements as numbers, a block at a time: read into reused buffers, and widened to fp32 with numpy alone.

A block becomes one or two *lanes* of fp32, padded with zeros to whole rows, in the cheapest order: for bfloat16, one
lane for each half of the 32-bit words. Sums over lanes do not depend on the order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_convert.spec.shard import Shape
from mcore_convert.storage.elements import Bytes, Files
from mcore_convert.storage.progress import Meter
from mcore_convert.storage.spans import Block, Part, Span, parts_of
from mcore_convert.storage.threads import in_threads
from mcore_convert.storage.values import as_float
from mcore_convert.storage.views import View

ROW = 1024  # elements that are summed in fp32; the sums of rows are summed in fp64
LEAST_SQUARES, MOST_SQUARES = 1e-24, 1e36  # sums of a block's squares in which fp32 neither under- nor overflowed
ADDABLE = 1e30  # largest magnitude that can be summed in fp32

Floats = NDArray[np.float32]


@dataclass
class Summary:
    """Statistics of some elements, to which those of later elements are added; a report adds fields of its own.

    `squares` is a sum of squares, `largest` the largest magnitude, at `largest_at` of the global tensor.
    """

    squares: float = 0.0
    largest: float = 0.0
    largest_at: Shape | None = None

    def add(self, other: Self) -> None:
        """Add the statistics of later elements."""
        self.squares += other.squares
        if other.largest > self.largest:
            self.largest, self.largest_at = other.largest, other.largest_at


Total = TypeVar("Total", bound=Summary)


class Small(NamedTuple):
    """Conversion of a narrow float to fp32: its bits, sign extended, are shifted, masked and scaled."""

    shift: int
    mask: int
    scale: float


SMALL = {
    "float16": Small(13, 0x8FFFFFFF, 2.0**112),
    "float8_e5m2": Small(21, 0x8FFFFFFF, 2.0**112),
    "float8_e4m3fn": Small(20, 0x87FFFFFF, 2.0**120),
}
# The largest finite magnitude, as bits without the sign.
FINITE = {
    "float32": 0x7F7FFFFF,
    "bfloat16": 0x7F7F,
    "float16": 0x7BFF,
    "float8_e5m2": 0x7B,
    "float8_e4m3fn": 0x7E,
}


class Bits(NamedTuple):
    """The elements of a block as unsigned integers, `padded` with zeros to whole rows; `numel` of them are elements."""

    padded: Bytes
    numel: int
    dtype: str

    @property
    def exact(self) -> Bytes:
        return self.padded[: self.numel]


class Scratch:
    """Named buffers that are reused; one object per thread."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, dtype: Any, count: int) -> NDArray[Any]:
        """Return the first elements of a buffer, uninitialised."""
        kind = np.dtype(dtype)
        nbytes = kind.itemsize * count
        if name not in self._held or self._held[name].nbytes < nbytes:
            self._held[name] = np.empty(nbytes, np.uint8)
        return self._held[name][:nbytes].view(kind)


def read(files: Files, view: View, block: Block, scratch: Scratch, name: str) -> Bits:
    """Return the elements of a block.

    Raises:
        UnreadableCheckpoint: the file ends before them.
    """
    count = block.stop - block.start
    step = 2 * ROW
    padded = scratch.array(name, f"u{view.itemsize}", -(-count // step) * step)
    padded[count:] = 0
    if view.is_plain and len(view.shape) == 1 and view.is_contiguous:
        files.read_run(view.path, view.offset + block.start * view.itemsize, padded[:count].view(np.uint8).data)
    else:
        part = files.read(view.block(block.where))
        np.copyto(padded[:count].reshape(part.shape), part)
    return Bits(padded, count, view.dtype)


def magnitudes(bits: Bits, scratch: Scratch) -> Bytes:
    """Return the bits without the sign: they sort as the magnitudes do."""
    exact = bits.exact
    mask = exact.dtype.type((1 << (8 * exact.itemsize - 1)) - 1)
    sizes: Bytes = np.bitwise_and(exact, mask, out=scratch.array("magnitudes", exact.dtype, bits.numel))
    return sizes


def is_float(dtype: str) -> bool:
    """Return whether a dtype has lanes; the others are rare, and are computed in fp64, which is slower."""
    return dtype in FINITE


@lru_cache(maxsize=1024)
def number(bits: int, dtype: str) -> float:
    """Return the value of one element."""
    size = np.dtype("uint8").itemsize if dtype.startswith("float8") else 2 if dtype.endswith("16") else 4
    return float(as_float(np.array([bits], f"u{size}"), dtype)[0])


class Lane(NamedTuple):
    """Every `step`-th element of a block from `first` on, as fp32, padded with zeros.

    `is_copy`: the values may be changed; otherwise they share memory with the elements that were read.
    """

    values: Floats
    first: int
    step: int
    is_copy: bool = True

    @property
    def rows(self) -> Floats:
        return self.values.reshape(-1, ROW)


def is_true_in_lanes(bits: Bits, scratch: Scratch) -> bool:
    """Return whether the lanes of a block are exact: lanes of narrow floats turn infinity and NaN into numbers."""
    return bits.dtype not in SMALL or int(magnitudes(bits, scratch).max()) <= FINITE[bits.dtype]


def lanes(bits: Bits, scratch: Scratch, name: str, *, in_order: bool = False) -> Iterator[Lane]:
    """Yield the elements as fp32, lane by lane in the same buffer: use each lane before drawing the next.

    `in_order`: yield a single lane, so that elements of two dtypes can be paired.
    """
    padded, dtype = bits.padded, bits.dtype
    if dtype == "float32":
        yield Lane(padded.view(np.float32), 0, 1, is_copy=False)
    elif dtype == "bfloat16" and not in_order:  # little endian: the first of two is the lower half of a word
        words = padded.view(np.uint32)
        wide: NDArray[Any] = scratch.array(name, np.uint32, len(words))
        yield Lane(np.left_shift(words, 16, out=wide).view(np.float32), 0, 2)
        yield Lane(np.bitwise_and(words, 0xFFFF0000, out=wide).view(np.float32), 1, 2)
    elif dtype == "bfloat16":
        wide = scratch.array(name, np.uint32, len(padded))
        np.copyto(wide, padded)
        yield Lane(np.left_shift(wide, 16, out=wide).view(np.float32), 0, 1)
    else:
        small = SMALL[dtype]
        wide = scratch.array(name, np.uint32, len(padded))
        np.copyto(wide.view(np.int32), padded.view(f"i{padded.itemsize}"))
        np.left_shift(wide, small.shift, out=wide)
        np.bitwise_and(wide, small.mask, out=wide)
        values: Floats = wide.view(np.float32)
        yield Lane(np.multiply(values, np.float32(small.scale), out=values), 0, 1)


def sum_of_squares(lane: Lane) -> float:
    """Return the sum of squares, without under- or overflow; not finite if a value is not.

    Values whose squares cannot be summed in fp32 are scaled, in a copy.
    """
    rows = lane.rows
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = float(np.matmul(rows[:, None, :], rows[:, :, None]).sum(dtype=np.float64))
    if LEAST_SQUARES <= squares <= MOST_SQUARES:
        return squares
    highest = float(np.abs(lane.values).max())
    if highest == 0 or not math.isfinite(highest):
        return highest
    power = min(max(-math.frexp(highest)[1], -126), 126)
    scaled = np.multiply(rows, np.float32(2.0**power))
    squares = float(np.matmul(scaled[:, None, :], scaled[:, :, None]).sum(dtype=np.float64))
    return math.ldexp(squares, -2 * power)


ONES = np.ones((ROW, 1), np.float32)


def sum_of(lane: Lane) -> float:
    """Return the sum of the values."""
    return float(np.matmul(lane.rows[:, None, :], ONES).sum(dtype=np.float64))


class Step(NamedTuple):
    """A block of a span, with its elements in each file of the span.

    `known` is the largest magnitude in earlier blocks: the position of a smaller one is not needed.
    """

    bits: tuple[Bits, ...]
    span: Span
    block: Block
    known: float
    scratch: Scratch

    def place(self, index: int) -> Shape:
        """Return the indices in the global tensor of element `index` of the block."""
        return self.span.place(self.block.start + index)


def summed(
    spans: Iterable[Sequence[Span]],
    start: Callable[[], Total],
    summary_of: Callable[[Step], Total],
    files: Files,
    meter: Meter,
) -> list[Total]:
    """Read tensors once, each given by its spans, and return for each, in order, the sum of its blocks' summaries.

    Raises:
        UnreadableCheckpoint: a file is shorter than its header says.
    """
    listed = list(spans)
    jobs = [(place, part) for place, of in enumerate(listed) for part in parts_of(of)]
    totals = [start() for _ in listed]
    of_thread = threading.local()

    def work(job: tuple[int, Part]) -> tuple[int, Total]:
        place, part = job
        if not hasattr(of_thread, "scratch"):
            of_thread.scratch = Scratch()
        scratch, total = of_thread.scratch, start()
        for block in part.blocks:
            bits = tuple(read(files, v, block, scratch, f"file {number}") for number, v in enumerate(part.span.views))
            total.add(summary_of(Step(bits, part.span, block, total.largest, scratch)))
        meter.add(part.nbytes)
        return place, total

    in_threads(work, jobs, lambda summary: totals[summary[0]].add(summary[1]))
    return totals
