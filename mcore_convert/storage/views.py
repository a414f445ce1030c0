"""Views: file, offset, shape and strides of a tensor. No bytes are read here.

Every copy and comparison is a pair of views of equal shape, and `elements` handles nothing but such pairs.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from math import prod
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.spec.shard import Box, Shape, parts_in
from mcore_convert.spec.tiling import FEW

# Names as torch spells them, with the size of an element in bytes.
DTYPE_SIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
T = TypeVar("T")


def made(kind: type[T], rows: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """Make named tuples of complete plain tuples, in half the time of their constructors."""
    return map(tuple.__new__, repeat(kind), rows)  # type: ignore[arg-type]


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: Shape
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_SIZES[self.dtype]


@lru_cache(maxsize=4096)  # the tensors of a model have few shapes
def common_meta(shape: Shape, dtype: str) -> TensorMeta:
    """Return one shared object for each shape and dtype."""
    return TensorMeta(shape, dtype)


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape, itemsize: int) -> Shape:
    """Return the byte strides of a row-major tensor."""
    strides = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _span(shape: Shape, strides: Shape, dtype: str) -> int:
    """Return the bytes from the start of the first element to the end of the last one."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + DTYPE_SIZES[dtype]


class Access(Protocol):
    """Interface of open files, which `elements.Files` implements."""

    def read(self, view: View, into: NDArray[Any] | None = None, dtype: str | None = None) -> NDArray[Any]:
        """Return the elements of a view in memory."""

    def target(self, view: View) -> contextlib.AbstractContextManager[NDArray[Any]]:
        """Return a scope that gives the elements of a view of a target file, to be set."""


@dataclass(frozen=True, order=True, slots=True)
class Coded(ABC):
    """A tensor whose values are computed from other tensors, its `parts`, stored under these `names`."""

    names: tuple[str, ...]
    parts: tuple[View, ...]
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Size of the stored parts in bytes."""
        return sum(part.nbytes for part in self.parts)

    @abstractmethod
    def read(self, files: Access, view: View, dtype: str) -> NDArray[Any]:
        """Return the elements of a view of this tensor, each computed in fp32 and rounded once, as unsigned integers.

        Raises:
            UnreadableCheckpoint, OverflowError: as `Files.read`.
        """


class View(NamedTuple):
    """Some elements of a file as a tensor: `offset` and `strides` in bytes. Slicing a view reads nothing.

    With `coded`, no file has these bytes: they are those of a row-major tensor of `dtype` that begins at 0, whose
    elements `coded` computes. Boxes, transposes and runs work as for the bytes of a file.

    Elements that are joined from two parts (`storage/joining.py`) have the view of the upper part in `high`. Then
    `dtype` is that of the result, and `low_dtype` that of the part here.
    """

    path: Path
    offset: int
    shape: Shape
    strides: Shape
    dtype: str
    coded: Coded | None = None
    high: View | None = None
    low_dtype: str = ""

    @staticmethod
    def of(path: Path, offset: int, meta: TensorMeta) -> View:
        """Return the view of a whole row-major tensor that begins at `offset`."""
        return View(path, offset, meta.shape, contiguous_strides(meta.shape, DTYPE_SIZES[meta.dtype]), meta.dtype)

    @staticmethod
    def decoded(coded: Coded, dtype: str) -> View:
        """Return the view of a whole coded tensor."""
        strides = contiguous_strides(coded.shape, DTYPE_SIZES[dtype])
        return View(coded.parts[0].path, 0, coded.shape, strides, dtype, coded)

    @property
    def stored(self) -> tuple[View, ...]:
        """Stored views behind this one: itself, the parts of its coded tensor, or both joined parts."""
        if self.coded is not None:
            return self.coded.parts
        return (self,) if self.high is None else (self.low, *self.high.stored)

    def moved(self, place: Callable[[Path], Path]) -> View:
        """Return the view of the same bytes in other files."""
        if self.is_plain:
            return View(place(self.path), *self[1:])
        coded = self.coded
        if coded is not None:
            coded = replace(coded, parts=tuple(part.moved(place) for part in coded.parts))
        return self._replace(path=place(self.path), coded=coded, high=self.high and self.high.moved(place))

    @property
    def meta(self) -> TensorMeta:
        return common_meta(self.shape, self.dtype)

    @property
    def itemsize(self) -> int:
        return DTYPE_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_SIZES[self.dtype]

    @property
    def end(self) -> int:
        """Offset in the file of the first byte after the last element."""
        return self.offset + _span(self.shape, self.strides, self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are one run of bytes in row-major order."""
        if self.high is not None:
            return False
        wanted = contiguous_strides(self.shape, self.itemsize)
        each = zip(self.shape, self.strides, wanted, strict=True)
        return self.strides == wanted or all(size == 1 or stride == want for size, stride, want in each)

    def narrow(self, box: Box) -> View:
        """Return the view of a box."""
        offset = self.offset
        for start, stride in zip(box.offsets, self.strides, strict=True):
            offset += start * stride
        return self._at(offset, box.sizes, self.strides, self.high and self.high.narrow(box))

    def block(self, where: tuple[slice, ...]) -> View:
        """Return the view of slices of the first dimensions; each slice has a start and a stop."""
        offset, shape = self.offset, list(self.shape)
        for axis, part in enumerate(where):
            offset += part.start * self.strides[axis]
            shape[axis] = part.stop - part.start
        return self._at(offset, tuple(shape), self.strides, self.high and self.high.block(where))

    def select(self, *place: int) -> View:
        """Return the view at one index of each of the first dimensions, which are dropped."""
        offset, axes = self.offset, len(place)
        for index, stride in zip(place, self.strides, strict=False):
            offset += index * stride
        return self._at(offset, self.shape[axes:], self.strides[axes:], self.high and self.high.select(*place))

    @property
    def transposed(self) -> View:
        """The view with its dimensions reversed."""
        return self._at(self.offset, self.shape[::-1], self.strides[::-1], self.high and self.high.transposed)

    def _at(self, offset: int, shape: Shape, strides: Shape, high: View | None) -> View:
        return View(self.path, offset, shape, strides, self.dtype, self.coded, high, self.low_dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the elements are stored as they are, neither coded nor joined."""
        return self.coded is None and self.high is None

    @property
    def low(self) -> View:
        """Lower part of elements that are joined from two parts."""
        return self._replace(dtype=self.low_dtype, high=None, low_dtype="")


def bytes_of(views: Iterable[View]) -> int:
    """Return the total size in bytes; views of equal shape and dtype are grouped first, for speed."""
    alike = Counter(map(attrgetter("shape", "dtype"), views))
    return sum(common_meta(*kind).nbytes * count for kind, count in alike.items())


class Slot(NamedTuple):
    """A view that holds box `box` of a weight's global tensor."""

    view: View
    box: Box

    def part(self, box: Box) -> View:
        """Return the view of a box of the global tensor that lies inside the slot's box."""
        return self.view if box == self.box else self.view.narrow(box.relative_to(self.box.offsets))

    def select(self, *place: int) -> Slot:
        """Return the slot at one index of each of the first dimensions, inside its box; they are dropped."""
        if not place:
            return self
        (offsets, sizes), view, axes = self.box, self.view, len(place)
        if offsets[:axes] == place and view.high is None:  # such as a chunk of one layer and expert
            inside = view._at(view.offset, view.shape[axes:], view.strides[axes:], None)
        else:
            inside = view.select(*[index - start for index, start in zip(place, offsets, strict=False)])
        return Slot(inside, Box(offsets[axes:], sizes[axes:]))

    def moved(self, rows: int) -> Slot:
        """Return the slot in a tensor that has `rows` more rows before those of this one."""
        offsets = (self.box.offsets[0] + rows, *self.box.offsets[1:]) if rows else self.box.offsets
        return Slot(self.view, Box(offsets, self.box.sizes))


class Sum(NamedTuple):
    """Stored CRC-32 of some bytes of a file, with the name of their record."""

    path: Path
    record: str
    start: int
    size: int
    checksum: int


def cut(slots: Sequence[Slot], box: Box) -> list[Slot]:
    """Return the parts of the slots that lie in a box of the global tensor."""
    common = (_common if len(slots) <= FEW else parts_in)(tuple(slot.box for slot in slots), box)
    return [Slot(slots[number].part(part), part) for number, part in common]


_common = lru_cache(maxsize=4096)(parts_in)


def is_inside(file: str) -> bool:
    """Return whether a file name in a checkpoint stays inside the checkpoint's own directory."""
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def open_error(path: Path | str, error: OSError) -> UnreadableCheckpoint:
    """Return the refusal for a file that cannot be read."""
    return UnreadableCheckpoint(f"cannot read `{path}`: {error.strerror or error}", hint=getattr(error, "hint", None))


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """A scope in which errors of the file system become errors of this package, for reading a source."""
    try:
        yield
    except OSError as error:
        raise open_error(str(error.filename or "the checkpoint"), error) from error
