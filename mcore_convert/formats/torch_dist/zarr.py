"""Format `zarr`: Megatron Core's distributed checkpoints of 0.5 to 0.15, and NeMo 1's. Read only, without zarr.

Keys, dialects, objects and the common state are those of `torch_dist`. A tensor is a folder: `.zarray` has its shape
and that of its equal chunks, and each chunk is a file of raw bytes, named `0.2.1` by its place in the grid (zarr,
"storage specification version 2"; Megatron Core, `dist_checkpointing/strategies/zarr.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mcore_convert.errors import UnreadableCheckpoint, fold
from mcore_convert.formats.files import dcp
from mcore_convert.formats.files.json_file import read_json
from mcore_convert.formats.files.pickles import are_counts
from mcore_convert.formats.megatron.dcp_kinds import BACKEND_FILE
from mcore_convert.formats.megatron.run_directory import resolve
from mcore_convert.formats.torch_dist.checkpoint import (
    NO_WEIGHT,
    ZARR,
    TorchDistCheckpoint,
    backend_of,
    prefix_of,
)
from mcore_convert.formats.torch_dist.keys import with_fused_norms
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.storage.views import DTYPE_SIZES, Slot, Sum, TensorMeta, View, contiguous_strides, open_error

ARRAY = ".zarray"

# zarr's names of dtypes. It has none for bfloat16, and uses two opaque bytes, a name that Megatron overwrites.
DTYPES = {
    "<f8": "float64",
    "<f4": "float32",
    "<f2": "float16",
    "bfloat16": "bfloat16",
    "<V2": "bfloat16",
    "|V2": "bfloat16",
    "<i8": "int64",
    "<i4": "int32",
    "<i2": "int16",
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}
# Options with which a chunk's bytes are its elements, row by row, as Megatron writes them.
PLAIN: dict[str, tuple[Any, ...]] = {"zarr_format": (2,), "compressor": (None,), "filters": (None, []), "order": ("C",)}
MAX_CHUNKS = 1_000_000  # of one tensor; bounds the time that a damaged number can cost
LOST = (
    "copy the checkpoint again: Megatron writes every chunk, so that a missing file is a lost one "
    "and does not stand for `fill_value`"
)


@dataclass(frozen=True)
class ZarrDirectory(dcp.Directory):
    """Contents of all `.zarray` files. `cells` has the shape of each key's chunks, padded at the edges."""

    cells: Mapping[str, Shape] = field(default_factory=dict)
    flattens: ClassVar[bool] = False  # distributed optimizers wrote their ranges into arrays of the weights' shapes

    def check(self, keys: Iterable[str]) -> None:
        """Check that every chunk of every key exists and has its size; the grid of chunks tiles each tensor.

        Raises:
            UnreadableCheckpoint: with every file that is missing or has another size.
        """
        problems = []
        for chunks in self.chunks.values():
            for chunk in chunks:
                file = self.path / chunk.place.file
                size = file.stat().st_size if file.is_file() else None
                if size is None:
                    problems.append(f"{chunk.place.file} is missing")
                elif size != chunk.place.length:
                    problems.append(f"{chunk.place.file} has {size} of {chunk.place.length} bytes")
        if problems:
            raise UnreadableCheckpoint(f"`{self.path}` is not whole", items=problems, hint=LOST)

    @property
    def unreferenced(self) -> list[str]:
        return []

    @property
    def sums(self) -> Iterator[Sum]:
        """No checksums: the files are raw bytes."""
        return iter(())

    def slots(self, key: str) -> list[Slot]:
        return [Slot(self.view(key, chunk), chunk.box) for chunk in self.chunks[key]]

    def view(self, key: str, chunk: dcp.Chunk) -> View:
        dtype = self.tensors[key].dtype
        strides = contiguous_strides(self.cells[key], DTYPE_SIZES[dtype])
        return View(self.path / chunk.place.file, chunk.place.offset, chunk.box.sizes, strides, dtype)


def detect(path: Path) -> bool:
    """Return whether the `metadata.json` of a directory names this backend."""
    return (path / BACKEND_FILE).is_file() and backend_of(path) == ZARR


def open_zarr(path: Path, args: Mapping[str, Any] | None = None) -> TorchDistCheckpoint:
    """Open a directory by reading only its `.zarray` files; `check_whole` checks that the weights are complete.

    Args:
        args: Megatron arguments that override or complete the stored ones.

    Raises:
        UnreadableCheckpoint: there is no tracker file or no model, or a tensor is not stored in plain bytes.
    """
    path = resolve(path, detect, ARRAY)
    directory = read(path)
    prefix = prefix_of(path, directory)
    keys = {}
    for on_disk in directory.tensors:
        key = on_disk.removeprefix(prefix)
        if not NO_WEIGHT.match(key) and not NO_WEIGHT.match(on_disk):
            keys[key] = on_disk
    return TorchDistCheckpoint(path, directory, with_fused_norms(keys, keys), prefix, format=ZARR)


def read(path: Path) -> ZarrDirectory:
    """Read every `.zarray`, and list the objects; no tensor is opened.

    Raises:
        UnreadableCheckpoint: a file is damaged, or tensors are compressed or not stored as Megatron does.
    """
    tensors: dict[str, TensorMeta] = {}
    chunks: dict[str, list[dcp.Chunk]] = {}
    cells: dict[str, Shape] = {}
    objects: dict[str, dcp.Place] = {}
    strange: dict[str, list[str]] = {}
    try:
        for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
            key = folder.name
            if (folder / ARRAY).is_file():
                array = read_json(folder / ARRAY)
                reason = _strangeness(array)
                if reason is not None:
                    strange.setdefault(reason, []).append(key)
                    continue
                tensors[key] = TensorMeta(tuple(array["shape"]), DTYPES[array["dtype"]])
                cells[key] = tuple(array["chunks"])
                chunks[key] = _chunks(key, tensors[key], cells[key], array.get("dimension_separator", "."))
            for file in sorted(folder.glob("shard_*.pt")):
                place = dcp.Place(f"{key}/{file.name}", 0, file.stat().st_size)
                objects[f"{key}/{file.name.removesuffix('.pt')}"] = place
    except OSError as error:
        raise open_error(path, error) from error
    if strange:
        raise UnreadableCheckpoint(
            f"`{path}` has tensors that are not stored as Megatron writes them",
            items=[f"{key}: {reason}" for reason, keys in strange.items() for key in fold(keys)],
        )
    return ZarrDirectory(path, tensors, chunks, objects, cells=cells)


def _strangeness(array: Mapping[str, Any]) -> str | None:
    """Return why the chunks of an array cannot be read as plain bytes, or None if they can."""
    for name, plain in PLAIN.items():
        if array.get(name) not in plain:
            return f"its `{name}` is {array.get(name)!r}"
    if array.get("dimension_separator", ".") not in (".", "/"):
        return f"its `dimension_separator` is {array['dimension_separator']!r}"
    if not isinstance(array.get("dtype"), str) or array["dtype"] not in DTYPES:
        return f"its `dtype` is {array.get('dtype')!r}"
    shape, cell = array.get("shape"), array.get("chunks")
    if not isinstance(shape, list) or not isinstance(cell, list) or len(shape) != len(cell):
        return f"its `shape` is {shape!r}, and its `chunks` are {cell!r}"
    if not are_counts(*shape, *cell) or 0 in cell or math.prod(_grid(shape, cell)) > MAX_CHUNKS:
        return f"its shape {shape} cannot be cut into chunks of {cell}"
    return None


def _grid(shape: Iterable[int], cell: Iterable[int]) -> list[int]:
    """Return the number of chunks along each dimension."""
    return [-(-size // step) for size, step in zip(shape, cell, strict=True)]


def _chunks(key: str, meta: TensorMeta, cell: Shape, separator: str) -> list[dcp.Chunk]:
    length = TensorMeta(cell, meta.dtype).nbytes
    chunks = []
    for place in itertools.product(*map(range, _grid(meta.shape, cell))):
        offsets = tuple(index * step for index, step in zip(place, cell, strict=True))
        ends = zip(offsets, cell, meta.shape, strict=True)
        box = Box(offsets, tuple(min(step, size - at) for at, step, size in ends))
        name = separator.join(map(str, place)) or "0"  # a scalar's only chunk
        chunks.append(dcp.Chunk(box, dcp.Place(f"{key}/{name}", 0, length)))
    return chunks
