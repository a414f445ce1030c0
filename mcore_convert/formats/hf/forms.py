"""Forms of quantised tensors: the stored tensors, and the coded tensor that they represent."""

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

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None for all
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")  # bytes are exponents


class Misfit(Exception):
    """Stored tensors that do not match their configuration."""


@dataclass(frozen=True)
class Form:
    """One kind of quantised tensor.

    `text` describes it. `stored` are the suffixes of the names of the stored tensors, the codes first, `may` those of
    optional tensors, and `name` is the suffix of the decoded name. `bind` makes a coded tensor of names and views in
    this order, or raises `Misfit`.
    """

    text: str
    stored: tuple[str, ...]
    may: tuple[str, ...]
    name: str
    bind: Callable[[tuple[str, ...], tuple[View, ...]], Blocks]
    transposed: bool = False


class Kind(NamedTuple):
    """Fields of a plain view without its place."""

    shape: Shape
    strides: Shape
    dtype: str


def bind_plain(code: str, block: Block, names: tuple[str, ...], views: tuple[View, ...]) -> Blocks:
    """Return the coded tensor of codes that are one element each, scales, and optional zero points."""
    codes = views[0]
    if codes.dtype != code or len(codes.shape) < 2:
        raise Misfit(f"{codes.dtype} {list(codes.shape)} is no matrix of {code}")
    return _blocks(code, block, names, codes.shape, views)


def _blocks(code: str, block: Block, names: tuple[str, ...], shape: Shape, views: tuple[View, ...]) -> Blocks:
    """Return the coded tensor of a shape from the views of codes, scales and zero points."""
    kinds, size = _fitted(code, block, shape, tuple([view[2:5] for view in views]))
    rows = [(view.path, view.offset, *kind) for view, kind in zip(views, kinds, strict=True)]
    return Blocks(names, tuple(made(View, rows)), shape, code, size)


@lru_cache(maxsize=4096)  # the tensors of a model have few shapes
def _fitted(
    code: str, block: Block, shape: Shape, stored: tuple[tuple[Shape, Shape, str], ...]
) -> tuple[list[tuple[Any, ...]], tuple[int, int]]:
    """Return the views of codes, scales and zero points without their places, and the size of a block."""
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
        each = 1 if kind.dtype == "int8" else 32 // CODES[code].bits  # zero points per word, along the rows
        parts.append(_shaped(kind, (*grid[:-2], -(-grid[-2] // each), grid[-1]), "zero points"))
    return [View(Path(), 0, *kind)[2:] for kind in parts], size


def _grid(block: Block, shape: Shape) -> tuple[tuple[int, int], Shape]:
    """Return the size of a block, limited to that of the matrices, and the number of blocks per dimension."""
    rows, columns = shape[-2:]
    high, wide = block
    high = max(1, rows if high is None else min(high, rows))
    wide = max(1, columns if wide is None else min(wide, columns))
    return (high, wide), (*shape[:-2], -(-rows // high), -(-columns // wide))


def _shaped(kind: Kind, grid: Shape, what: str) -> Kind:
    """Return a view in the shape of the grid of blocks; the stored shape may lack dimensions of size 1."""
    if [size for size in kind.shape if size != 1] != [size for size in grid if size != 1]:
        raise Misfit(f"{what} are {list(kind.shape)}, and the blocks {list(grid)}")
    return Kind(grid, contiguous_strides(grid, DTYPE_SIZES[kind.dtype]), kind.dtype)


def _in_bytes(kind: Kind) -> Kind:
    """Return the same bytes as one-byte elements: the last dimension is multiplied by the element size."""
    size = DTYPE_SIZES[kind.dtype]
    shape = (*kind.shape[:-1], kind.shape[-1] * size) if size > 1 else kind.shape
    return Kind(shape, (*kind.strides[:-1], 1), "uint8")


def bind_packed(code: str, block: Block, names: tuple[str, ...], views: tuple[View, ...]) -> Blocks:
    """Return the coded tensor of codes packed into 32-bit words along rows, scales, optional zero points, a shape."""
    ends = dict(zip((name.rpartition("_")[2] for name in names), views, strict=True))
    words, scales, each = ends["packed"], ends["scale"], 32 // CODES[code].bits
    if words.dtype != "int32" or len(words.shape) != 2:
        raise Misfit(f"{words.dtype} {list(words.shape)} is no matrix of words of 32 bits")
    rows, columns, wide = words.shape[0], words.shape[1] * each, block[1]
    if wide is None or wide % each or columns % wide or scales.shape[-1:] != (columns // wide,) or columns <= wide:
        rows, columns = _shape_in(ends["shape"])  # padding cannot be inferred from the other shapes
    if rows != words.shape[0] or -(-columns // each) != words.shape[1]:
        raise Misfit(f"a shape of {[rows, columns]} does not fit words of {list(words.shape)}")
    zeros = [ends["point"]] if "point" in ends else []
    return _blocks(code, block, names, (rows, columns), (words, scales, *zeros))


def _shape_in(view: View) -> tuple[int, int]:
    """Return the two sizes in a shape tensor."""
    if view.shape != (2,) or view.dtype not in ("int32", "int64"):
        raise Misfit(f"`weight_shape` is {view.dtype} {list(view.shape)}")
    with open_file(view.path) as file:
        file.seek(view.offset)
        rows, columns = struct.unpack("<2i" if view.dtype == "int32" else "<2q", file.read(view.nbytes))
    return int(rows), int(columns)


def bind_mxfp4(names: tuple[str, ...], views: tuple[View, ...]) -> Blocks:
    """Return the coded tensor of codes in groups of 16 bytes, and the exponents of their scales."""
    codes, scales = views
    if codes.dtype != "uint8" or len(codes.shape) < 3 or codes.shape[-1] != 16:
        raise Misfit(f"{codes.dtype} {list(codes.shape)} are no blocks of 16 bytes")
    if not codes.is_contiguous:
        raise Misfit("is not stored row by row")
    flat = (*codes.shape[:-2], codes.shape[-2] * 16)
    rows = codes._replace(shape=flat, strides=contiguous_strides(flat, 1))
    return _blocks("float4_e2m1", (1, 32), names, (*flat[:-1], 2 * flat[-1]), (rows, scales))
