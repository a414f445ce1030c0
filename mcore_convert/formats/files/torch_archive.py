"""`torch.save` files, without torch: finding the bytes of each tensor, and laying out a file before it is filled.

A file is a zip archive of uncompressed records: `data.pkl` with the object, `data/N` with the bytes of storage N
(torch, `caffe2/serialize/inline_container`). Files written before torch 1.6 are a sequence of pickles followed by the
storages; those are only read. A chunk in a `.distcp` file is such an archive, too, at an offset.
"""

from __future__ import annotations

import contextlib
import io
import logging
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_convert.errors import UnreadableCheckpoint
from mcore_convert.formats.files import pickle_writer, pickles
from mcore_convert.formats.files.pickle_budget import check_tree
from mcore_convert.formats.files.pickles import StorageRef, TensorRef
from mcore_convert.formats.files.zip_records import MAX_RECORDS, MAX_ZIP, Record, read_records, start_of
from mcore_convert.spec.shard import Shape
from mcore_convert.storage.sources import bytes_at, expect, handle_of, open_file, size_of
from mcore_convert.storage.views import DTYPE_SIZES, Sum, TensorMeta, View, contiguous_strides, open_error

logger = logging.getLogger(__name__)

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
MAX_RECORD = 64 * 2**20  # bytes of `data.pkl`: those of a million tensors
ALIGNMENT = 64  # torch aligns every record to this, for memory maps


class TorchFile:
    """An archive, read once: `tree` is the saved object with a `View` in place of every tensor.

    `sums` are the stored checksums of these tensors, `records` the archive's records, and `starts` the offsets of the
    storages with tensors.

    Args:
        opened: the file at `path`, if it is already open; it stays open.

    Raises:
        UnreadableCheckpoint: the file is missing, damaged, compressed, or not a torch file.
        UnsafePickle: it names a class that no checkpoint needs.
    """

    def __init__(
        self, path: Path, offset: int = 0, length: int | None = None, opened: io.BufferedReader | None = None
    ) -> None:
        self.path, self.start = path, offset
        self.records: dict[str, Record] = {}
        self.starts: dict[str, int] = {}
        self.sums: tuple[Sum, ...] = ()
        logger.debug("opened %s for its header at byte %d", path, offset)
        try:
            with open_file(path) if opened is None else contextlib.nullcontext(opened) as file:
                self._fd = handle_of(file)
                self._length = size_of(self._fd) - offset if length is None else length
                if self._bytes(0, 4) == b"PK\x03\x04":
                    self.records = read_records(self._bytes, self._length)
                    self.tree = self._read_zip()
                else:
                    file.seek(offset)
                    self.tree = self._read_legacy(file)
        except OSError as error:
            raise open_error(path, error) from error
        except (struct.error, *pickles.DAMAGE) as error:
            raise UnreadableCheckpoint(
                f"`{path}` is damaged, or not a torch file: {pickles.reason_of(error)}"
            ) from error

    def _bytes(self, start: int, count: int) -> bytes:
        if start + count > self._length:  # otherwise `pread` would allocate the requested size
            raise EOFError(f"it ends at byte {self.start + self._length}")
        content = bytes_at(self._fd, count, self.start + start)
        if len(content) != count:
            raise EOFError(f"it ends at byte {self.start + start + len(content)}")
        return content

    def _read_zip(self) -> Any:
        if self.records.get("byteorder") and self._content("byteorder") != b"little":
            raise ValueError("it is not little-endian")
        tree = pickles.load(io.BytesIO(self._content("data.pkl")), f"`{self.path}`")
        check_tree(tree)
        expect(self._fd, (self.start + record.header for record in self.records.values()))
        starts = self.starts

        def place_of(storage: StorageRef) -> int:
            if storage.key not in starts:
                record = self._record(f"data/{storage.key}")
                if record.size < storage.numel * DTYPE_SIZES[storage.dtype]:
                    raise EOFError(f"storage {storage.key} has {record.size} bytes")
                starts[storage.key] = self.start + start_of(self._bytes, record)
            return starts[storage.key]

        with_tensors = with_views(tree, lambda ref: _view(self.path, place_of(ref.storage), ref))
        self.sums = tuple(self._sums())
        return with_tensors

    def _sums(self) -> Iterator[Sum]:
        for key, start in self.starts.items():
            record = self._record(f"data/{key}")
            if record.checksum and record.size:
                yield Sum(self.path, f"data/{key}", start, record.size, record.checksum)

    def _record(self, name: str) -> Record:
        if name not in self.records:
            raise ValueError(f"it has no record `{name}`")
        return self.records[name]

    def _content(self, name: str) -> bytes:
        record = self._record(name)
        if record.size > MAX_RECORD:
            raise ValueError(f"`{name}` has {record.size:,} bytes")
        content = self._bytes(start_of(self._bytes, record), record.size)
        if record.checksum and zlib.crc32(content) != record.checksum:
            raise ValueError(f"`{name}` does not have the checksum that is stored with it")
        return content

    def _read_legacy(self, file: io.BufferedReader) -> Any:
        where = f"`{self.path}`"
        if pickles.load(file, where) != LEGACY_MAGIC:
            raise ValueError("it does not begin as one")
        _protocol, system, tree, keys = (pickles.load(file, where) for _ in range(4))
        if not system.get("little_endian", True):
            raise ValueError("it is not little-endian")
        check_tree(tree)
        storages: dict[str, StorageRef] = {}
        with_views(tree, lambda ref: storages.setdefault(ref.storage.key, ref.storage))
        starts = {}
        at = file.tell()
        for key in keys:
            storage = storages[str(key)]
            (numel,) = struct.unpack("<q", self._bytes(at - self.start, 8))
            if numel != storage.numel:
                raise ValueError(f"storage {key} has {numel} of {storage.numel} elements")
            starts[str(key)] = at + 8
            at += 8 + numel * DTYPE_SIZES[storage.dtype]
        if at - self.start > self._length:
            raise EOFError(f"it should have {at} bytes")
        return with_views(tree, lambda ref: _view(self.path, starts[ref.storage.key], ref))


def _view(path: Path, start: int, ref: TensorRef) -> View:
    size = DTYPE_SIZES[ref.storage.dtype]
    span, strides = _reach(ref.shape, ref.strides, size)
    if 0 not in ref.shape and not 0 <= ref.offset + span < ref.storage.numel:
        raise EOFError(f"a tensor of shape {list(ref.shape)} does not fit its storage")
    return View(path, start + ref.offset * size, ref.shape, strides, ref.storage.dtype)


@lru_cache(maxsize=4096)  # the tensors of a model have few shapes
def _reach(shape: Shape, steps: Shape, size: int) -> tuple[int, Shape]:
    """Return the distance of the last element from the first, in elements, and the strides in bytes."""
    return sum((n - 1) * step for n, step in zip(shape, steps, strict=True)), tuple(step * size for step in steps)


def scalar(view: View) -> int | float | bool:
    """Return the value of a tensor of one element.

    Raises:
        UnreadableCheckpoint: it has several elements, or its file has become shorter.
    """
    codes = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b"}
    code = {**codes, "uint8": "B", "bool": "?"}.get(view.dtype)
    if code is None or view.nbytes != view.itemsize:
        raise UnreadableCheckpoint(f"`{view.path}` has a tensor of {view.dtype} {list(view.shape)} in a number's place")
    with open_file(view.path) as file:
        content = bytes_at(handle_of(file), view.itemsize, view.offset)
    if len(content) != view.itemsize:
        raise UnreadableCheckpoint(f"`{view.path}` is damaged: it ends at byte {view.offset + len(content)}")
    value: int | float | bool = struct.unpack(f"<{code}", content)[0]
    return value


def with_views(tree: Any, view_of: Callable[[TensorRef], Any]) -> Any:
    """Return the tree with every TensorRef replaced; dicts, lists and tuples are rebuilt, other objects are kept.

    A repeated part is rebuilt once: a hostile tree may contain itself, or expand to 2**100 parts.
    """
    return _rebuilt(tree, view_of, {})


def _rebuilt(part: Any, view_of: Callable[[TensorRef], Any], done: dict[int, Any]) -> Any:
    """Rebuild a part for `with_views`; a nested function would be a cycle, and keep the tree until a collection."""
    if isinstance(part, TensorRef):
        return view_of(part)
    if not isinstance(part, (dict, list, tuple)):
        return part
    if id(part) not in done:
        if isinstance(part, dict):
            result: Any = {}
            done[id(part)] = result
            result.update((key, _rebuilt(value, view_of, done)) for key, value in part.items())
        elif isinstance(part, list):
            done[id(part)] = result = []
            result.extend(_rebuilt(value, view_of, done) for value in part)
        else:
            done[id(part)] = tuple(_rebuilt(value, view_of, done) for value in part)
    return done[id(part)]


@dataclass(frozen=True)
class Archive:
    """Layout of a torch file that is not filled: literal bytes and holes for tensors, by offset."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    holes: tuple[int, ...]

    def filled(self, *contents: bytes) -> Archive:
        """Return the complete archive, with these contents in its holes."""
        pieces = sorted([*self.literals, *zip(self.holes, contents, strict=True)])
        return Archive(self.size, ((0, b"".join(content for _, content in pieces)),), ())


def lay_out(tree_of: Callable[[list[TensorRef]], Any], tensors: list[TensorMeta], name: str = "archive") -> Archive:
    """Lay out the file that `torch.save` would write for an object with these row-major tensors.

    The checksum of a hole is left at 0, as `torch.serialization.set_crc32_options(False)` allows: torch does not check
    it, and computing it would cost as much as the copy.

    Args:
        tree_of: builds the object from the references of `tensors`, in their order.
        name: the archive's own folder.
    """
    refs = []
    for key, meta in enumerate(tensors):
        strides = contiguous_strides(meta.shape, 1)
        refs.append(TensorRef(StorageRef(str(key), meta.dtype, meta.numel), 0, meta.shape, strides))
    records: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickle_writer.dumps(tree_of(refs))),
        ("byteorder", b"little"),
        *((f"data/{key}", meta.nbytes) for key, meta in enumerate(tensors)),
        ("version", b"3\n"),
    ]
    at = 0
    literals: list[tuple[int, bytes]] = []
    holes: list[int] = []
    directory: list[bytes] = []
    for entry, content in records:
        size = content if isinstance(content, int) else len(content)
        checksum = 0 if isinstance(content, int) else zlib.crc32(content)
        path = f"{name}/{entry}".encode()
        sizes = [size, size] if size >= MAX_ZIP else []
        shown = MAX_ZIP if sizes else size
        fields = struct.pack("<HHHHHLLLH", 0, 0, 0, 0, 0, checksum, shown, shown, len(path))
        large = _large(sizes)
        pad = -(at + 30 + len(path) + len(large) + 4) % ALIGNMENT
        extra = large + b"FB" + struct.pack("<H", pad) + b"Z" * pad  # torch's own padding field
        header = b"PK\x03\x04" + fields + struct.pack("<H", len(extra)) + path + extra
        large = _large([*sizes, at] if at >= MAX_ZIP else sizes)
        directory += [b"PK\x01\x02" + struct.pack("<H", 0) + fields]
        directory += [struct.pack("<HHHHLL", len(large), 0, 0, 0, 0, min(at, MAX_ZIP)) + path + large]
        literals.append((at, header))
        at += len(header)
        if isinstance(content, int):
            holes.append(at)
        else:
            literals.append((at, content))
        at += size
    end = b"".join(directory) + _end(at, sum(map(len, directory)), len(records))
    literals.append((at, end))
    size = at + len(end)
    return Archive(size, tuple(_joined(literals)), tuple(holes))


def _large(values: list[int]) -> bytes:
    """Return the zip64 field for values that are too large for a record's own fields."""
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _end(start: int, size: int, count: int) -> bytes:
    """Return the end records that follow the directory at `start`."""
    end = b""
    if start + size >= MAX_ZIP or count >= MAX_RECORDS:
        end += struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        end += struct.pack("<4sLQL", b"PK\x06\x07", 0, start + size, 1)
        start, size, count = MAX_ZIP, min(size, MAX_ZIP), min(count, MAX_RECORDS)
    return end + struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, count, count, size, start, 0)


def _joined(literals: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the literals with adjacent ones joined."""
    joined: list[tuple[int, bytes]] = []
    for at, content in literals:
        if joined and joined[-1][0] + len(joined[-1][1]) == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + content)
        else:
            joined.append((at, content))
    return joined


def dumps(tree: Any) -> bytes:
    """Return the bytes of a torch file without tensors."""
    archive = lay_out(lambda refs: tree, [])
    return b"".join(content for _, content in archive.literals)
