"""Elements in file order: computations that do not depend on the order read at the speed of the file."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mcore_convert.spec.shard import Box, Shape
from mcore_convert.storage.elements import blocks_of
from mcore_convert.storage.views import Slot, View, contiguous_strides, cut

# Bytes that are processed in one step. Large enough that threads do not wait for each other between numpy's
# operations, small enough for a processor's cache.
STEP = 2 * 2**20
PART = 64 * 2**20  # bytes that one thread takes at a time


class Piece(NamedTuple):
    """A box of the global tensor whose first element has index `start` in a span; `axes` from slowest to fastest."""

    start: int
    box: Box
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Elements of one global tensor, and their place in each of several files: views of equal shape.

    Boxes that are consecutive in every file are one span, so that a tensor of many pieces is read at once.
    """

    views: tuple[View, ...]
    pieces: tuple[Piece, ...]

    def place(self, index: int) -> Shape:
        """Return the indices in the global tensor of element `index` of the span."""
        piece = self.pieces[bisect.bisect_right(self.pieces, index, key=lambda piece: piece.start) - 1]
        left = index - piece.start
        at = list(piece.box.offsets)
        for axis in reversed(piece.axes):
            left, step = divmod(left, piece.box.sizes[axis])
            at[axis] += step
        return tuple(at)


class Block(NamedTuple):
    """A part of a span that is processed in one step: elements `start` to `stop`, which `where` selects from a view."""

    start: int
    stop: int
    where: tuple[slice, ...]


class Part(NamedTuple):
    """Some blocks of a span, for one thread."""

    span: Span
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.stop - block.start for block in self.blocks) * sum(v.itemsize for v in self.span.views)


def spans_of(slots: Sequence[Slot]) -> list[Span]:
    """Return the elements of slots, each once, in file order."""
    return _joined(((slot.view,), slot.box) for slot in slots)


def paired_spans(mine: Sequence[Slot], theirs: Sequence[Slot]) -> list[Span]:
    """Return the elements that two lists of slots have in common, with both views, in file order of the first."""
    pairs = []
    for slot in mine:
        for part in cut(list(theirs), slot.box):
            pairs.append(((slot.part(part.box), part.view), part.box))
    return _joined(pairs)


def _joined(held: Iterable[tuple[tuple[View, ...], Box]]) -> list[Span]:
    """Return one span for each sequence of boxes that is consecutive in every file."""
    spans: list[Span] = []
    views: tuple[View, ...] = ()
    pieces: list[Piece] = []
    for each, box in sorted(held, key=lambda pair: _place(pair[0][0])):
        if not box.numel:
            continue
        axes = tuple(sorted(range(len(box.sizes)), key=lambda axis: -each[0].strides[axis]))
        turned = tuple(_flat(_turned(view, axes)) for view in each)
        if not all(len(view.shape) == 1 for view in turned):  # one view is not contiguous: all keep their shape
            turned = tuple(_turned(view, axes) for view in each)
            spans.append(Span(turned, (Piece(0, box, axes),)))
            continue
        if views and all(_follows(view, before) for view, before in zip(turned, views, strict=True)):
            pieces.append(Piece(views[0].shape[0], box, axes))
            views = tuple(
                before._replace(shape=(before.shape[0] + view.shape[0],))
                for before, view in zip(views, turned, strict=True)
            )
            continue
        if views:
            spans.append(Span(views, tuple(pieces)))
        views, pieces = turned, [Piece(0, box, axes)]
    if views:
        spans.append(Span(views, tuple(pieces)))
    return spans


def _turned(view: View, axes: tuple[int, ...]) -> View:
    """Return the view with its dimensions in another order; a scalar becomes a vector of one element."""
    shape = tuple(view.shape[axis] for axis in axes) or (1,)
    strides = tuple(view.strides[axis] for axis in axes) or (view.itemsize,)
    return view._replace(shape=shape, strides=strides, high=None if view.high is None else _turned(view.high, axes))


def _flat(view: View) -> View:
    """Return the view flattened to one dimension if its elements are one run of bytes; otherwise unchanged."""
    if not view.is_contiguous:
        return view
    shape = (Box.whole(view.shape).numel,)
    return view._replace(shape=shape, strides=contiguous_strides(shape, view.itemsize))


def _place(view: View) -> tuple[Path, int, int]:
    return view.stored[0].path, view.stored[0].offset, view.offset


def _follows(view: View, before: View) -> bool:
    if view.coded is not before.coded:
        return False
    return (view.path, view.dtype, view.offset) == (before.path, before.dtype, before.offset + before.nbytes)


def parts_of(spans: Iterable[Span]) -> Iterator[Part]:
    """Yield the spans in parts, one for a thread at a time; the parts do not depend on the number of threads."""
    for span in spans:
        blocks: list[Block] = []
        nbytes = 0
        for block in _blocks(span):
            blocks.append(block)
            nbytes += (block.stop - block.start) * span.views[0].itemsize
            if nbytes >= PART:
                yield Part(span, tuple(blocks))
                blocks, nbytes = [], 0
        if blocks:
            yield Part(span, tuple(blocks))


def _blocks(span: Span) -> Iterator[Block]:
    """Yield blocks of consecutive elements, of about STEP bytes of the first file each."""
    shape = span.views[0].shape
    start = 0
    for where in blocks_of(shape, span.views[0].itemsize, STEP):
        inner = shape[len(where) :]
        stop = start + Box.whole(tuple(part.stop - part.start for part in where) + inner).numel
        yield Block(start, stop, where)
        start = stop
