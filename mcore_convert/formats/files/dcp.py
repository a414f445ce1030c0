"""Directories of `torch.distributed.checkpoint`: `.metadata` and the `.distcp` files, without torch.

A key is an object, or a tensor cut into chunks; each is an archive in a file (torch, `checkpoint/filesystem.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mcore_convert.errors import UnreadableCheckpoint, fold
from mcore_convert.formats.files import pickles
from mcore_convert.formats.files.chunk_archives import ChunkArchives, opened_chunks
from mcore_convert.formats.files.pickle_writer import Global
from mcore_convert.formats.files.pickles import are_counts, are_shapes
from mcore_convert.formats.files.torch_archive import scalar
from mcore_convert.spec.config.arguments import TorchDtype
from mcore_convert.spec.shard import Box, Shape
from mcore_convert.spec.tiling import untiled
from mcore_convert.storage.collection import without_collection
from mcore_convert.storage.sources import bytes_at, expect_archives, handle_of, open_file
from mcore_convert.storage.views import Slot, Sum, TensorMeta, View, is_inside, made, open_error

logger = logging.getLogger(__name__)

METADATA, SMALL = ".metadata", 2**12  # SMALL: bytes of an archive of one number
SIZE, STORAGE_INFO = Global("torch", "Size"), Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")


class Place(NamedTuple):
    """File, offset and length of one archive."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A box of a key's tensor, and its archive."""

    box: Box
    place: Place


@dataclass(frozen=True)
class Directory:
    """Contents of `.metadata`: for each key its tensor and chunks, or the place of its object.

    `unflattened` has the original shape of tensors that Megatron Core 0.8 to 0.15 stored as `[*grid, elements]`: cut
    into equal cells, each of them flattened.
    """

    path: Path
    tensors: dict[str, TensorMeta]
    chunks: dict[str, list[Chunk]]
    objects: dict[str, Place]
    unflattened: Mapping[str, Shape] = field(default_factory=dict)
    flattens: ClassVar[bool] = True
    _values: dict[bytes, Any] = field(default_factory=dict, compare=False)  # of small archives
    _sums: dict[Place, tuple[Sum, ...]] = field(default_factory=dict, compare=False)  # of archives that were read
    _slots: dict[str, list[Slot]] = field(default_factory=dict, compare=False)
    _archives: ChunkArchives = field(default_factory=ChunkArchives, compare=False)

    def check(self, keys: Iterable[str]) -> None:
        """Check that the chunks of these keys tile their tensors, and that every file exists and is long enough.

        Raises:
            UnreadableCheckpoint: with every file and every key for which this fails.
        """
        needed: dict[str, int] = {}
        for place in [chunk.place for chunks in self.chunks.values() for chunk in chunks] + list(self.objects.values()):
            needed[place.file] = max(needed.get(place.file, 0), place.offset + place.length)
        problems = []
        for file, size in sorted(needed.items()):
            path = self.path / file
            if not path.is_file():
                problems.append(f"{file} is missing")
            elif path.stat().st_size < size:
                problems.append(f"{file} has {path.stat().st_size} of {size} bytes")
        if problems:
            raise UnreadableCheckpoint(
                f"`{self.path}` is not whole",
                items=problems,
                hint="copy the checkpoint again: every rank of the run wrote files of its own",
            )
        for key in keys:
            reason = untiled([chunk.box for chunk in self.chunks[key]], self.tensors[key].shape)
            if reason is not None:
                problems.append(f"{key} {list(self.tensors[key].shape)}: {reason}")
        if problems:
            raise UnreadableCheckpoint(f"the chunks in `{self.path}` do not make whole tensors", items=problems)

    def under(self, prefix: str) -> list[str]:
        """Return the keys of tensors and objects that begin with a prefix."""
        return [key for keys in (self.tensors, self.objects) for key in keys if key.startswith(prefix)]

    @property
    def num_files(self) -> int:
        """Number of files with tensors and objects."""
        chunks = (chunk for chunks in self.chunks.values() for chunk in chunks)
        return len({chunk.place.file for chunk in chunks} | {place.file for place in self.objects.values()})

    @property
    def unreferenced(self) -> list[str]:
        """`.distcp` files that nothing refers to."""
        named = {chunk.place.file for chunks in self.chunks.values() for chunk in chunks}
        named |= {place.file for place in self.objects.values()}
        return sorted(file.name for file in self.path.glob("*.distcp") if file.name not in named)

    @property
    def sums(self) -> Iterator[Sum]:
        """Stored checksums of tensors; reads the headers of chunks that were not read before."""
        for place in (chunk.place for chunks in self.chunks.values() for chunk in chunks):
            if place not in self._sums:
                self._tree(place)
            yield from self._sums[place]

    def slots(self, key: str) -> list[Slot]:
        """Return the chunks of a key as slots in the key's tensor; their headers are read once."""
        if not self._slots:
            places = (chunk.place for chunks in self.chunks.values() for chunk in chunks)
            expect_archives((self.path / place.file, place.offset, place.length) for place in places)
        if key not in self._slots:
            chunks = self.chunks[key]
            trees = self._trees(chunk.place for chunk in chunks)
            self._slots[key] = [Slot(self._view(key, chunk, trees[chunk.place]), chunk.box) for chunk in chunks]
        return self._slots[key]

    def view(self, key: str, chunk: Chunk) -> View:
        """Return the view of one chunk; reads its header."""
        return self._view(key, chunk, self._tree(chunk.place))

    def _view(self, key: str, chunk: Chunk, view: Any) -> View:
        meta, place = self.tensors[key], chunk.place
        if not isinstance(view, View) or view.shape != chunk.box.sizes or view.dtype != meta.dtype:
            raise UnreadableCheckpoint(
                f"`{self.path / place.file}` does not hold what `{METADATA}` says",
                items=[f"{key} at {list(chunk.box.offsets)}: {list(chunk.box.sizes)} {meta.dtype} expected"],
            )
        return view

    def object(self, key: str) -> Any:
        """Return the object of a key."""
        return self._tree(self.objects[key])

    def value(self, key: str) -> Any:
        """Return the object of a key, or the value of its one-element tensor.

        A state dict may have the same number under a hundred thousand keys: archives of equal bytes are parsed once.
        """
        place = self.objects[key] if key in self.objects else self.chunks[key][0].place
        content = self._content(place) if place.length <= SMALL else None
        if content is not None and content in self._values:
            return self._values[content]
        value = self.object(key) if key in self.objects else scalar(self.view(key, self.chunks[key][0]))
        if content is not None and not isinstance(value, dict | list):
            self._values[content] = value
        return value

    def _content(self, place: Place) -> bytes:
        """Return the bytes of an archive; fewer if its file is too short, which parsing reports."""
        with opened_chunks(self.path / place.file) as opened:
            return bytes_at(handle_of(opened), place.length, place.offset)

    def _tree(self, place: Place) -> Any:
        return self._trees([place])[place]

    def _trees(self, places: Iterable[Place]) -> dict[Place, Any]:
        trees = {}
        for place, tree, sums in self._archives.read(self.path, places):
            trees[place], self._sums[place] = tree, sums
        return trees


def read(path: Path) -> Directory:
    """Read the `.metadata` of a directory; no other file is opened.

    Raises:
        UnreadableCheckpoint: it is missing, damaged, or uses a storage option that is not supported.
    """
    file = path / METADATA
    try:
        logger.debug("opened %s for its header", file)
        with open_file(file) as opened, without_collection():
            return _decoded(path, pickles.load(opened, f"`{file}`"))
    except OSError as error:
        raise open_error(file, error) from error
    except pickles.DAMAGE as error:
        reason = pickles.reason_of(error)
        raise UnreadableCheckpoint(f"`{file}` is not the metadata of a checkpoint: {reason}") from error


def _decoded(path: Path, metadata: pickles.Metadata) -> Directory:
    places = _places(path, metadata.storage_data)
    metadata.storage_data.clear()  # an entry takes as much memory as all that is kept of it
    files = {place.file for place in places.values()}
    outside = sorted(file for file in files if not is_inside(file))
    if outside:
        raise UnreadableCheckpoint(f"`{path / METADATA}` names files outside of its directory", items=outside)
    tensors: dict[str, TensorMeta] = {}
    chunks: dict[str, list[Chunk]] = {}
    objects: dict[str, Place] = {}
    known: dict[Shape, Shape] = {}  # shared shapes: there are few
    lost = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, pickles.TensorStorageMetadata):
            dtype = entry.properties.dtype
            if not isinstance(dtype, TorchDtype) or not are_shapes([entry.size]):
                raise ValueError(f"{key} has no shape or no dtype")
            tensors[key] = TensorMeta(entry.size, dtype.name)
            offsets, sizes = [each.offsets for each in entry.chunks], [each.sizes for each in entry.chunks]
            if not are_shapes([*offsets, *sizes], len(entry.size)):
                raise ValueError(f"{key} has a chunk that is no part of it")
            held = list(map(places.get, zip(repeat(key), offsets)))
            boxes = made(Box, zip(offsets, map(known.setdefault, sizes, sizes), strict=True))
            chunks[key] = list(made(Chunk, zip(boxes, held, strict=True)))
            if None in held:
                lost += [f"{key} at {list(at)}" for at, place in zip(offsets, held, strict=True) if place is None]
        elif (key, None) in places:
            objects[key] = places[key, None]
        else:
            lost.append(key)
    if lost:
        raise UnreadableCheckpoint(f"`{path / METADATA}` does not say where these lie", items=fold(lost))
    if _overlap(places.values()):
        _refuse_shared(path, chunks, objects)
    return Directory(path, tensors, chunks, objects, _unflattened(metadata, tensors))


def _places(path: Path, stored: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], Place]:
    """Return the place of each key at each offset, in bulk operations: a checkpoint may have some hundred thousand.

    Nothing is hashed before it is known to be a name or a shape: a hostile pickle may have anything there.
    """
    keys, offsets = [index.fqn for index in stored], [index.offset for index in stored]
    if not {*map(type, keys)} <= {str} or not are_shapes([each for each in offsets if each is not None]):
        raise ValueError("a part of it has no name and no offset")
    files, starts = [info.relative_path for info in stored.values()], [info.offset for info in stored.values()]
    lengths = [info.length for info in stored.values()]
    if any(info.transform_descriptors for info in stored.values()):
        raise UnreadableCheckpoint(f"`{path}` stores its chunks compressed, which is not supported")
    if not {*map(type, files)} <= {str}:
        raise ValueError("a part of it is in no file")
    if not are_counts(*starts, *lengths):
        bad = next(each for each in zip(keys, starts, lengths, strict=True) if not are_counts(*each[1:]))
        raise ValueError(f"{bad[0]} lies at {bad[1]!r}, {bad[2]!r} bytes long")
    return dict(
        zip(zip(keys, offsets, strict=True), made(Place, zip(files, starts, lengths, strict=True)), strict=True)
    )


def _overlap(places: Iterable[Place]) -> bool:
    """Return whether any two places share a byte."""
    last, end = "", 0
    for file, offset, length in sorted(places):
        if offset < end and file == last:
            return True
        last, end = file, offset + length
    return False


def _refuse_shared(path: Path, chunks: Mapping[str, list[Chunk]], objects: Mapping[str, Place]) -> None:
    """Refuse archives that share bytes: each is written separately, so one would be read in place of the other."""
    # a repeated box of a key has one place, and is refused when the boxes of the key are checked
    held = [
        (chunk.place, key, number)
        for key, parts in chunks.items()
        for number, chunk in enumerate({chunk.box.offsets: chunk for chunk in parts}.values())
    ]
    held += [(place, key, -1) for key, place in objects.items()]
    held.sort()
    shared: dict[str, None] = {}
    last = None
    for each in held:
        place = each[0]
        if last is not None and place.file == last[0].file and place.offset < last[0].offset + last[0].length:
            for (file, offset, _), key, number in (last, each):
                offsets = list(dict.fromkeys(chunk.box.offsets for chunk in chunks[key])) if number >= 0 else []
                box = f" at {list(offsets[number])}" if number >= 0 else ""
                shared[f"{key}{box}: byte {offset:,} of {file}"] = None
        if last is None or last[0].file != place.file or place.offset + place.length > last[0].offset + last[0].length:
            last = each
    if shared:
        raise UnreadableCheckpoint(
            f"`{path / METADATA}` has several parts at one place",
            items=shared,
            hint="one of its names or offsets is wrong: copy the checkpoint again",
        )


def _unflattened(metadata: pickles.Metadata, tensors: dict[str, TensorMeta]) -> dict[str, Shape]:
    """Return the shapes before flattening (Megatron Core, `strategies/torch.py`, `mcore_data`)."""
    shapes: dict[str, Shape] = {}
    for key, known in getattr(metadata, "mcore_data", {}).items():
        shape = known.get("nd_reformulated_orig_global_shape")
        if shape is None or key not in tensors:
            continue
        stored = tensors[key]
        whole, grid = TensorMeta(tuple(shape), stored.dtype), stored.shape[:-1]
        if len(grid) != len(shape) or not are_counts(*shape) or stored.numel != whole.numel:
            raise ValueError(f"{key} {list(stored.shape)} cannot have been {shape!r} before it was flattened")
        if any(count == 0 or size % count for size, count in zip(shape, grid, strict=True)):
            raise ValueError(f"{key} {list(stored.shape)} is not made of equal parts of {shape!r}")
        shapes[key] = whole.shape
    return shapes


def exists(path: Path) -> bool:
    """Return whether a directory has a `.metadata` file."""
    return (path / METADATA).is_file()
