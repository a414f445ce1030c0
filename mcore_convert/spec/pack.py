"""Packs: the places of a weight's Hugging Face tensors in its global tensor.

A `Pack` is a list of pieces, each a box of a Hugging Face tensor and the box of the global tensor that holds the same
elements. It is plain data: swapping the boxes inverts it, intersecting boxes cuts it, and it can only move elements.
So the pack that converts a parameter also converts its fp32 copy, `exp_avg` and `exp_avg_sq`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mcore_convert.spec.dims import Dims
from mcore_convert.spec.shard import Box, Shape


class Every(NamedTuple):
    """Every `step`-th index of a dimension, from index `first` on."""

    axis: int
    first: int
    step: int

    def box(self, box: Box) -> Box:
        """Return the part of a box at these indices, as a box of a tensor with only these indices; it may be empty."""
        low, high = (self._number(at) for at in (box.offsets[self.axis], box.offsets[self.axis] + box.sizes[self.axis]))
        return Box(_with(box.offsets, self.axis, low), _with(box.sizes, self.axis, high - low))

    def index_of(self, number: int) -> int:
        """Return the index in the dimension of the `number`-th of these indices."""
        return self.first + number * self.step

    def _number(self, index: int) -> int:
        """Return how many of these indices are below `index`."""
        return max(0, -(-(index - self.first) // self.step))


@dataclass(frozen=True)
class Piece:
    """Box `hf` of Hugging Face tensor number `tensor` is box `mcore` of the global tensor.

    `transposed`: the element at [i, j] of the one is the element at [j, i] of the other. With `every`, box `hf` refers
    to a tensor of only these indices of the Hugging Face tensor.
    """

    tensor: int
    hf: Box
    mcore: Box
    transposed: bool = False
    every: Every | None = None


class Pack(Protocol):
    """A bijection between the elements of some Hugging Face tensors and those of one global tensor."""

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        """Return the shapes of the Hugging Face tensors for a shape of the global tensor."""

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        """Return the pieces: `mcore` boxes tile the global tensor, and `hf` boxes tile each Hugging Face tensor."""


def packed(pack: Pack, shape: Shape, dims: Dims) -> tuple[list[Shape], list[Piece]]:
    """Return the shapes and the pieces of a pack, computed once for all layers and experts of a model."""
    key = (pack, shape)
    pieces: tuple[list[Shape], list[Piece]] | None = dims.packed.get(key)
    if pieces is None:
        pieces = dims.packed[key] = (pack.shapes(shape, dims), pack.pieces(shape, dims))
    return pieces


@dataclass(frozen=True)
class Same:
    """One tensor, unchanged."""

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        return [shape]

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        return [Piece(0, Box.whole(shape), Box.whole(shape))]


@dataclass(frozen=True)
class Concat:
    """`count` tensors of equal shape, concatenated along the first dimension: gate, up -> `[gate; up]`."""

    count: int = 2

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        return [(shape[0] // self.count, *shape[1:])] * self.count

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        rows = shape[0] // self.count
        return [Piece(i, _rows(0, rows, shape), _rows(i * rows, rows, shape)) for i in range(self.count)]


@dataclass(frozen=True)
class QKV:
    """q, k, v -> one block of rows per query group, `[q.. k v | q.. k v | ..]`, so that a TP slice holds whole groups.

    Each head is `kv_channels` rows; a group has `num_attention_heads / num_query_groups` query heads, one key and one
    value head (Megatron Core, `SelfAttention.get_query_key_value_tensors`). For weights and biases.
    """

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        kv = dims.num_query_groups * dims.kv_channels
        return [(shape[0] - 2 * kv, *shape[1:]), (kv, *shape[1:]), (kv, *shape[1:])]

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        head = dims.kv_channels
        heads = dims.num_attention_heads // dims.num_query_groups
        queries = (2 if dims.output_gate else 1) * heads * head
        pieces = []
        for group in range(dims.num_query_groups):
            start = group * (queries + 2 * head)
            if dims.output_gate:  # Hugging Face: query and gate head by head; Megatron Core: queries first
                for number in range(2 * heads):
                    at = start + (number % 2 * heads + number // 2) * head
                    pieces.append(Piece(0, _rows(group * queries + number * head, head, shape), _rows(at, head, shape)))
            else:
                pieces.append(Piece(0, _rows(group * queries, queries, shape), _rows(start, queries, shape)))
            pieces += [
                Piece(1, _rows(group * head, head, shape), _rows(start + queries, head, shape)),
                Piece(2, _rows(group * head, head, shape), _rows(start + queries + head, head, shape)),
            ]
        return pieces


@dataclass(frozen=True)
class Segments:
    """Segments of different sizes, concatenated in the global tensor; each Hugging Face tensor has some of them.

    `tensors` has the size of each segment, in words of `Dims.size`, for each Hugging Face tensor. `groups` is the word
    for a number of groups: a Hugging Face tensor then has, group by group, a part of each of its segments.
    """

    tensors: tuple[tuple[str, ...], ...]
    groups: str = "one"

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        return [(sum(map(dims.size, segments)), *shape[1:]) for segments in self.tensors]

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        groups, pieces, start = dims.size(self.groups), [], 0
        for number, segments in enumerate(self.tensors):
            counts = [dims.size(word) // groups for word in segments]
            before = 0
            for count in counts:
                for group in range(groups):
                    hf = _rows(group * sum(counts) + before, count, shape)
                    pieces.append(Piece(number, hf, _rows(start + group * count, count, shape)))
                before, start = before + count, start + groups * count
        return pieces


@dataclass(frozen=True)
class Fused:
    """One tensor `[a; b; ..]`, the concatenation of the tensors of `pack`: GPT-2's `c_attn` is `Fused(QKV())`."""

    pack: Pack

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        return [shape]

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        starts = [0]
        for part in self.pack.shapes(shape, dims):
            starts.append(starts[-1] + part[0])
        return [
            Piece(0, _rows(starts[piece.tensor] + piece.hf.offsets[0], piece.hf.sizes[0], shape), piece.mcore)
            for piece in self.pack.pieces(shape, dims)
        ]


@dataclass(frozen=True)
class Interleaved:
    """One tensor with the interleaved rows of the tensors of `pack`, of equal shape: `[a0, b0, a1, b1, ..]`."""

    pack: Pack

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        return [shape]

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        count = len(self.pack.shapes(shape, dims))
        return [
            Piece(0, piece.hf, piece.mcore, every=Every(0, piece.tensor, count))
            for piece in self.pack.pieces(shape, dims)
        ]


@dataclass(frozen=True)
class Transposed:
    """Transposed tensors: GPT-2's `Conv1D` holds `[in, out]`, Megatron `[out, in]`."""

    pack: Pack = Same()

    def shapes(self, shape: Shape, dims: Dims) -> list[Shape]:
        return [part[::-1] for part in self.pack.shapes(shape, dims)]

    def pieces(self, shape: Shape, dims: Dims) -> list[Piece]:
        return [
            Piece(piece.tensor, piece.hf.transposed, piece.mcore, not piece.transposed, _turned(piece.every, shape))
            for piece in self.pack.pieces(shape, dims)
        ]


def _turned(every: Every | None, shape: Shape) -> Every | None:
    return every and every._replace(axis=len(shape) - 1 - every.axis)


def _with(numbers: Shape, axis: int, value: int) -> Shape:
    return (*numbers[:axis], value, *numbers[axis + 1 :])


def _rows(start: int, count: int, shape: Sequence[int]) -> Box:
    """Return the box of `count` whole rows of a tensor of this shape."""
    return Box((start, *(0 for _ in shape[1:])), (count, *shape[1:]))
