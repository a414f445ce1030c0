"""The forms of quantised tensors: what is stored of one, and the coded tensor that it makes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mcore_convert.spec.shard import Shape
from mcore_convert.storage.codecs import CODES, Blocks
from mcore_convert.storage.sources import open_file
from mcore_convert.storage.views import DTYPE_SIZES, View, contiguous_strides, made

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None for all there are
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")  # bytes are exponents


class Misfit(Exception):
    """Stored tensors that are not what their configuration says."""


@dataclass(frozen=True)
class Form:
    """One kind of quantised tensor.

    `text` says it in words. `stored` are the ends of the names of the tensors that it is stored as, the one with the
    codes first, `may` those that may lie beside them, and `name` the end of the name that it has once it is decoded.
    `bind` makes a coded tensor of the names and views in this order, or raises `Misfit`.
    """

    text: str
    stored: tuple[str, ...]
    may: tuple[str, ...]
    name: str
    bind: Callable[[tuple[str, ...], tuple[View, ...]], Blocks]
    transposed: bool = False


class Kind(NamedTuple):
    """What there is of a plain view beside its place."""

    shape: Shape
    strides: Shape
    dtype: str


def bind_plain(code: str, block: Block, names: tuple[str, ...], views: tuple[View, ...]) -> Blocks:
    """Codes that are elements of their own, scales, and zero points where there are some."""
    codes = views[0]
    if codes.dtype != code or len(codes.shape) < 2:
        raise Misfit(f"{codes.dtype} {list(codes.shape)} is no matrix of {code}")
    return _blocks(code, block, names, codes.shape, views)


def _blocks(code: str, block: Block, names: tuple[str, ...], shape: Shape, views: tuple[View, ...]) -> Blocks:
    """Matrices of a shape with their codes, scales and zero points."""
    kinds, size = _fitted(code, block, shape, tuple([view[2:5] for view in views]))
    rows = [(view.path, view.offset, *kind) for view, kind in zip(views, kinds, strict=True)]
    return Blocks(names, tuple(made(View, rows)), shape, code, size)


@lru_cache(maxsize=4096)  # the tensors of a model have few shapes
def _fitted(
    code: str, block: Block, shape: Shape, stored: tuple[tuple[Shape, Shape, str], ...]
) -> tuple[list[tuple[Any, ...]], tuple[int, int]]:
    """Return what the views of codes, scales and zero points have beside their places, and the size of a block."""
    codes, scales, *zeros = kinds = [Kind(*each) for each in stored]
    if not all(View(Path(), 0, *kind).is_contiguous for kind in kinds):
        raise Misfit("is not stored row by row")
    size, grid = _grid(block, shape)
    if scales.dtype not in SCALES:
        raise Misfit(f"scales in {scales.dtype}")
    parts = [_in_bytes(codes), _shaped(scales, grid, "scales")]
    for kind in zeros:
        if kind.dtype not in ("int8", "int32"):
            raise Misfit(f"zero points in {kind.dtype}")
        each = 1 if kind.dtype == "int8" else 32 // CODES[code].bits  # of them in a word, along the rows
        parts.append(_shaped(kind, (*grid[:-2], -(-grid[-2] // each), grid[-1]), "zero points"))
    return [View(Path(), 0, *kind)[2:] for kind in parts], size


def _grid(block: Block, shape: Shape) -> tuple[tuple[int, int], Shape]:
    """Return the size of a block of matrices, which is no larger than they are, and how many blocks they have."""
    rows, columns = shape[-2:]
    high, wide = block
    high = max(1, rows if high is None else min(high, rows))
    wide = max(1, columns if wide is None else min(wide, columns))
    return (high, wide), (*shape[:-2], -(-rows // high), -(-columns // wide))


def _shaped(kind: Kind, grid: Shape, what: str) -> Kind:
    """Return a view in the shape of the blocks; where there is one for a row or for all, it may lack dimensions."""
    if [size for size in kind.shape if size != 1] != [size for size in grid if size != 1]:
        raise Misfit(f"{what} are {list(kind.shape)}, and the blocks {list(grid)}")
    return Kind(grid, contiguous_strides(grid, DTYPE_SIZES[kind.dtype]), kind.dtype)


def _in_bytes(kind: Kind) -> Kind:
    """Return the same bytes, one to an element: the last dimension grows with the size of an element."""
    size = DTYPE_SIZES[kind.dtype]
    shape = (*kind.shape[:-1], kind.shape[-1] * size) if size > 1 else kind.shape
    return Kind(shape, (*kind.strides[:-1], 1), "uint8")


def bind_packed(code: str, block: Block, names: tuple[str, ...], views: tuple[View, ...]) -> Blocks:
    """Codes that are packed into words of 32 bits along the rows, scales, zero points where there are some, a shape."""
    ends = dict(zip((name.rpartition("_")[2] for name in names), views, strict=True))
    words, scales, each = ends["packed"], ends["scale"], 32 // CODES[code].bits
    if words.dtype != "int32" or len(words.shape) != 2:
        raise Misfit(f"{words.dtype} {list(words.shape)} is no matrix of words of 32 bits")
    rows, columns, wide = words.shape[0], words.shape[1] * each, block[1]
    if wide is None or wide % each or columns % wide or scales.shape[-1:] != (columns // wide,) or columns <= wide:
        rows, columns = _shape_in(ends["shape"])  # what is padded the other shapes do not tell
    if rows != words.shape[0] or -(-columns // each) != words.shape[1]:
        raise Misfit(f"a shape of {[rows, columns]} does not fit words of {list(words.shape)}")
    zeros = [ends["point"]] if "point" in ends else []
    return _blocks(code, block, names, (rows, columns), (words, scales, *zeros))


def _shape_in(view: View) -> tuple[int, int]:
    """Return the two sizes that a tensor holds."""
    if view.shape != (2,) or view.dtype not in ("int32", "int64"):
        raise Misfit(f"`weight_shape` is {view.dtype} {list(view.shape)}")
    with open_file(view.path) as file:
        file.seek(view.offset)
        rows, columns = struct.unpack("<2i" if view.dtype == "int32" else "<2q", file.read(view.nbytes))
    return int(rows), int(columns)


def bind_mxfp4(names: tuple[str, ...], views: tuple[View, ...]) -> Blocks:
    """Codes in groups of 16 bytes, and the exponents of their scales."""
    codes, scales = views
    if codes.dtype != "uint8" or len(codes.shape) < 3 or codes.shape[-1] != 16:
        raise Misfit(f"{codes.dtype} {list(codes.shape)} are no blocks of 16 bytes")
    if not codes.is_contiguous:
        raise Misfit("is not stored row by row")
    flat = (*codes.shape[:-2], codes.shape[-2] * 16)
    rows = codes._replace(shape=flat, strides=contiguous_strides(flat, 1))
    return _blocks("float4_e2m1", (1, 32), names, (*flat[:-1], 2 * flat[-1]), (rows, scales))
