"""Codecs: the values of tensors that are stored in a few bits per element with a scale per block.

Codecs are the closed set of operations on values; packs only move elements. For each block, the values of all 16 or
256 codes are computed in fp32 and rounded once; the elements of the block are then looked up. So a decoded value does
not depend on how it is read, and costs one look-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcore_convert.errors import counted
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.storage.gather import scratch
from mcore_convert.storage.values import FP8, Bytes, as_float, round_to
from mcore_convert.storage.views import Access, Coded, View, contiguous_strides

Floats = NDArray[np.float32]

LOOKED_UP = 32 * 2**10  # elements that are looked up at once: their indices stay in the cache
SLACK = 2.0**-20  # relative slack of a bound, for rounding in fp32
LARGEST = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}  # products below this bound are finite
INFINITE = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


class Code(NamedTuple):
    """The values of codes of `bits` bits, before scaling.

    `low` and `high` are the ends of the interval that rounds to a value: the midpoints to its neighbours. `offset` is
    what was added to stored zero points that are packed as the codes are.
    """

    bits: int
    values: Floats
    low: Floats
    high: Floats
    offset: int = 0


def _code(bits: int, values: Any, *, offset: int = 0, most: float | None = None) -> Code:
    """Return the code with these values, in order. `most`: the largest magnitude that rounds to the last of them."""
    exact = np.asarray(values, np.float32)
    # one zero for both signs; `np.unique` would import a tenth of numpy
    known = np.array(sorted(set((exact[np.isfinite(exact)] + 0.0).tolist())), np.float32)
    middles = (known[1:] + known[:-1]) / 2
    low = np.concatenate([[2 * known[0] - middles[0] if most is None else -most], middles])
    high = np.concatenate([middles, [2 * known[-1] - middles[-1] if most is None else most]])
    at = np.searchsorted(known, exact).clip(0, len(known) - 1)
    bad = ~np.isfinite(exact)
    low, high = (np.where(bad, np.nan, ends[at]).astype(np.float32) for ends in (low, high))
    return Code(bits, exact, low, high, offset)


# E2M1 of OCP's microscaling formats 1.0 (also transformers 5.23 `integrations/mxfp4.py`). A block's scale is the power
# of two below its largest number over 4, so that numbers up to 8 times the scale become 6.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = {
    "float8_e4m3fn": _code(8, FP8["float8_e4m3fn"]),
    "float4_e2m1": _code(4, [*_E2M1, *(-value for value in _E2M1)], most=8.0),
    "int8": _code(8, np.arange(256, dtype=np.uint8).view(np.int8)),
    # offset to unsigned before packing (compressed-tensors 0.12 `pack_quantized/helpers.py`)
    "packed int8": _code(8, np.arange(256) - 128, offset=128),
    "packed int4": _code(4, np.arange(16) - 8, offset=8),
}


class Tables(NamedTuple):
    """Value of each code in each block of some rows.

    `numbers` are flat; the value of a code in a block is at index `by_code` times the code plus `by_block` times the
    block's number. `beyond`: mask of the values that are infinite only because of the dtype; None if none is.
    """

    numbers: Bytes
    by_code: int
    by_block: int
    beyond: NDArray[np.bool_] | None = None


@dataclass(frozen=True, order=True, slots=True)
class Blocks(Coded):
    """Matrices of codes with a scale for each block of `block` elements, rows by columns.

    `parts` are the codes, as bytes with the first element in the lowest bits; the scales, one per block; and optional
    zero points, of the shape of the scales, or packed along the rows. Blocks at the edges are truncated.
    """

    code: str
    block: tuple[int, int]

    @property
    def bits(self) -> int:
        """Bits per element."""
        return CODES[self.code].bits

    def read(self, files: Access, view: View, dtype: str) -> Bytes:
        return self._computed(files, view, CODES[self.code].values, dtype)

    def may_hold(self, files: Access, view: View, exact: Floats) -> NDArray[np.bool_]:
        """Return for each element of a view whether the exact number may have been rounded to its code.

        A number may lie beyond the midpoint of two neighbouring codes by a rounding error: the encoder divided by the
        scale in fp32.
        """
        code = CODES[self.code]
        ends = [self._computed(files, view, each, "float32").view(np.float32) for each in (code.low, code.high)]
        low, high = np.minimum(*ends), np.maximum(*ends)  # a scale may be negative
        slack = np.maximum(np.abs(low), np.abs(high)) * np.float32(SLACK)
        with np.errstate(invalid="ignore"):
            inside: NDArray[np.bool_] = (low - slack <= exact) & (exact <= high + slack)
        return inside

    def _computed(self, files: Access, view: View, values: Floats, dtype: str) -> Bytes:
        """Return the elements of a view, with these values for the codes."""
        first = view.offset // view.itemsize
        if view.is_contiguous:
            run: Bytes = np.empty(math.prod(view.shape), _unsigned(dtype))
            for done, matrix, box in self._runs(first, run.size):
                part = run[done : done + box.numel].reshape(box.sizes)
                self._fill(files, matrix, box, values, dtype, part)
            return run.reshape(view.shape)
        strides = contiguous_strides(self.shape, view.itemsize)
        sizes, steps, order = [1] * len(self.shape), [1] * len(self.shape), list[int]()
        for size, stride in zip(view.shape, view.strides, strict=True):
            if size != 1:  # a dimension, or every n-th of its indices: the dimension before it has a larger stride
                order.append(next(axis for axis, one in enumerate(strides) if one <= stride and self.shape[axis] > 1))
                sizes[order[-1]], steps[order[-1]] = size, stride // strides[order[-1]]
        whole: Bytes = np.empty(sizes, _unsigned(dtype))
        starts = [int(start) for start in np.unravel_index(first, self.shape)]
        for at in np.ndindex(*sizes[:-2]) if whole.size else ():
            matrix = tuple(start + number * step for start, number, step in zip(starts, at, steps, strict=False))
            self._fill_every(files, matrix, (starts[-2], starts[-1]), (steps[-2], steps[-1]), values, dtype, whole[at])
        kept = sorted(order)
        turned = whole.reshape([sizes[axis] for axis in kept]).transpose([kept.index(axis) for axis in order])
        return turned.reshape(view.shape)

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, Shape, Box]]:
        """Yield consecutive elements as boxes of matrices: the number of elements before, the matrix, the box."""
        rows, columns = self.shape[-2:]
        done = 0
        while done < count:
            row, column = divmod(first + done, columns)
            number, row = divmod(row, rows)
            matrix = tuple(int(index) for index in np.unravel_index(number, self.shape[:-2])) if self.shape[:-2] else ()
            left = count - done
            whole = min(left // columns, rows - row) if column == 0 else 0
            box = Box((row, column), (whole, columns) if whole else (1, min(left, columns - column)))
            yield done, matrix, box
            done += box.numel

    def _fill_every(
        self, files: Access, matrix: Shape, start: Shape, steps: Shape, values: Floats, dtype: str, into: Bytes
    ) -> None:
        """Compute every n-th row and column of one of the matrices."""
        sizes = tuple((size - 1) * step + 1 for size, step in zip(into.shape, steps, strict=True))
        box = Box(start, sizes)
        if steps[1] == 1 and (steps[0] == 1 or self.block[0] == 1):  # no block has skipped rows
            self._fill(files, matrix, box, values, dtype, into, steps[0])
            return
        whole: Bytes = np.empty(sizes, into.dtype)
        self._fill(files, matrix, box, values, dtype, whole)
        into[...] = whole[:: steps[0], :: steps[1]]

    def _fill(
        self, files: Access, matrix: Shape, box: Box, values: Floats, dtype: str, into: Bytes, step: int = 1
    ) -> None:
        """Compute a box of one of the matrices, or every `step`-th of its rows; these have scales of their own."""
        (row, column), (count, width) = box
        high, wide = self.block
        codes = self._codes(files, matrix, box, step)
        first = column // wide
        at = Box(
            (row // high, first),
            ((row + count - 1) // high - row // high + 1, (column + width - 1) // wide - first + 1),
        )
        scales, zeros = self._scales(files, matrix, at)
        scales, zeros = scales[::step], None if zeros is None else zeros[::step]
        columns = np.arange(column, column + width) // wide - first
        at_once = max(1, LOOKED_UP // width)
        for rows in self._of_one_table(row, len(into), at_once):
            top = (rows.start + row) // high - at.offsets[0]
            end = (rows.stop - 1 + row) // high - at.offsets[0] + 1
            tables = _tables(values, scales[top:end], None if zeros is None else zeros[top:end], dtype)
            inside = columns * tables.by_block
            if end - top > 1:
                inside = inside + np.arange(end - top)[:, None] * (scales.shape[1] * tables.by_block)
            for start in range(rows.start, rows.stop, at_once):
                part = slice(start, min(start + at_once, rows.stop))
                index = scratch((part.stop - start) * width * 8).view(np.intp).reshape(-1, width)
                np.copyto(index, codes[part])
                if tables.by_code > 1:
                    index *= tables.by_code
                index += inside
                tables.numbers.take(index, out=into[part], mode="clip")
                if tables.beyond is not None and tables.beyond.take(index, mode="clip").any():
                    raise OverflowError(f"a number beyond the largest of {dtype}")

    def _of_one_table(self, row: int, count: int, at_once: int) -> Iterator[range]:
        """Yield the ranges of rows that share one set of tables, counted from `row`."""
        high = self.block[0]
        start = 0
        while start < count:
            stop = min(count, start + at_once if high == 1 else start + high - (row + start) % high)
            yield range(start, stop)
            start = stop

    def _codes(self, files: Access, matrix: Shape, box: Box, step: int) -> NDArray[np.uint8]:
        """Return the codes of every `step`-th row of a box, one byte each."""
        (row, column), (count, width) = box
        view = _matrix(self.parts[0], matrix)
        if self.bits == 8:
            return files.read(view.narrow(box))[::step]
        first, last = column // 2, (column + width - 1) // 2
        pairs = files.read(view.narrow(Box((row, first), (count, last - first + 1))))[::step]
        apart = pairs.astype("<u2")  # one byte becomes two, the low half first
        apart |= apart << 4
        apart &= 0x0F0F
        start = column - 2 * first
        return apart.view(np.uint8)[:, start : start + width]

    def _scales(self, files: Access, matrix: Shape, box: Box) -> tuple[Floats, Floats | None]:
        """Return the scales of a box of blocks, and their zero points."""
        scales, *zeros = (_matrix(part, matrix) for part in self.parts[1:])
        exact = as_float(files.read(scales.narrow(box)), _float_of(scales.dtype)).astype(np.float32)
        if not zeros:
            return exact, None
        (row, column), (count, width) = box
        if zeros[0].dtype != "int32":
            return exact, files.read(zeros[0].narrow(box)).view(np.int8).astype(np.float32)
        code = CODES[self.code]
        each = 32 // code.bits  # zero points per word, those of the first rows in the lowest bits
        first, last = row // each, (row + count - 1) // each
        words = files.read(zeros[0].narrow(Box((first, column), (last - first + 1, width))))
        shifts = np.arange(each, dtype=np.uint32)[:, None] * np.uint32(code.bits)
        apart = (words[:, None, :] >> shifts & np.uint32(2**code.bits - 1)).reshape(-1, width)
        start = row - each * first
        return exact, apart[start : start + count].astype(np.float32) - np.float32(code.offset)


def _matrix(view: View, at: Shape) -> View:
    """Return the view of one matrix of a stack."""
    for index in at:
        view = view.select(index)
    return view


def _float_of(dtype: str) -> str:
    """Return the dtype of scales: bytes are exponents."""
    return "float8_e8m0fnu" if dtype == "uint8" else dtype


@cache
def _unsigned(dtype: str) -> str:
    return {"float32": "u4", "bfloat16": "u2", "float16": "u2"}[dtype]


def _tables(values: Floats, scales: Floats, zeros: Floats | None, dtype: str) -> Tables:
    """Return the value of each code in each block. The longer of the two dimensions varies fastest."""
    by_code, by_block = (scales.size, 1) if scales.size > len(values) else (1, len(values))
    codes, blocks = (values[:, None], scales.reshape(-1)) if by_block == 1 else (values, scales.reshape(-1, 1))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        numbers = codes if zeros is None else codes - zeros.reshape(blocks.shape)
        exact = np.multiply(numbers, blocks, dtype=np.float32).reshape(-1)
        bound = np.fmax.reduce(np.abs(numbers), axis=None) * np.fmax.reduce(np.abs(blocks), axis=None)
        rounded = exact.view(np.uint32) if dtype == "float32" else round_to(exact.view(np.uint32), dtype)
    if bound < LARGEST[dtype]:
        return Tables(rounded, by_code, by_block)
    infinite = rounded & (2 ** (8 * rounded.itemsize - 1) - 1) == INFINITE[dtype]
    beyond = infinite & (np.isfinite(blocks) & np.isfinite(codes)).reshape(-1)
    return Tables(rounded, by_code, by_block, beyond if beyond.any() else None)


@dataclass(frozen=True)
class Quantised:
    """Quantised tensors of a checkpoint, with their sizes in bytes before and after decoding.

    `method` is the `quant_method` of its `config.json`; `forms` describe bits and blocks, one text for each kind of
    tensor. `num_tensors` tensors have `nbytes` bytes in files, scales included, and `decoded` bytes as `dtype`.
    `loss` describes the largest error of values that are quantised while writing.
    """

    method: str
    forms: tuple[str, ...]
    num_tensors: int
    nbytes: int
    decoded: int
    dtype: str
    loss: str | None = None

    def __str__(self) -> str:
        tensors = counted(self.num_tensors, "tensor", "tensors")
        return f"{tensors} in {'; '.join(self.forms)}"
