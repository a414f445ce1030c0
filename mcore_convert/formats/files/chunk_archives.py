"""Archives of one tensor each, the chunks in a `.distcp` file: archives that differ only in values are parsed once.

A model with experts has tens of thousands of them, in a few dozen forms.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mcore_convert.formats.files.torch_archive import TorchFile
from mcore_convert.formats.files.zip_records import Record
from mcore_convert.storage.sources import bytes_at, handle_of, open_file
from mcore_convert.storage.views import Sum, View, open_error

logger = logging.getLogger(__name__)

MAX_AROUND = 2**14  # bytes of an archive outside of its tensor; torch writes 2 kB
MAX_FORMS = 16  # per length: archives of further forms are parsed individually
CHECKSUM_IN_HEADER, CHECKSUM_IN_ENTRY, CHECKSUM_BEHIND = 14, 16, 4  # places of the CRC-32 in parts of a zip file


Place = TypeVar("Place", bound=tuple[str, int, int])


class _Form(NamedTuple):
    """The common parts of archives that differ only in the values of their tensor.

    `fixed` are the first `head` and the last `tail` bytes, which surround the tensor, as one number, masked by `mask`:
    the masked bytes do not affect the result, except the tensor's checksum, which is at `checksum`.
    """

    view: View
    record: str
    start: int
    size: int
    head: int
    tail: int
    checksum: int
    mask: int
    fixed: int

    def parsed(self, around: bytes, path: Path, offset: int) -> tuple[View, tuple[Sum, ...]] | None:
        """Return the tensor of an archive at `offset`, given the bytes around it; None if the form differs."""
        if len(around) != self.head + self.tail or int.from_bytes(around, "little") & self.mask != self.fixed:
            return None
        _, at, shape, strides, dtype, *_ = self.view
        checksum = int.from_bytes(around[self.checksum : self.checksum + 4], "little")
        sums = (Sum(path, self.record, offset + self.start, self.size, checksum),) if checksum and self.size else ()
        return View(path, offset + at, shape, strides, dtype), sums


class ChunkArchives:
    """Reader of archives that caches their forms."""

    def __init__(self) -> None:
        self._forms: dict[int, list[_Form]] = {}

    def read(self, folder: Path, places: Iterable[Place]) -> Iterator[tuple[Place, Any, tuple[Sum, ...]]]:
        """Yield each archive with its tree and its checksums, as `TorchFile` has them; each file is opened once.

        Args:
            places: file in the folder, offset and length of each archive.

        Raises:
            UnreadableCheckpoint, UnsafePickle: as `TorchFile`.
        """
        by_file: dict[str, list[Place]] = {}
        for place in places:
            by_file.setdefault(place[0], []).append(place)
        for file, inside in by_file.items():
            path = folder / file
            with opened_chunks(path) as opened:
                for place in inside:
                    yield place, *self._parsed(opened, path, place[1], place[2])

    def _parsed(self, opened: BufferedReader, path: Path, offset: int, length: int) -> tuple[Any, tuple[Sum, ...]]:
        forms = self._forms.setdefault(length, [])
        sizes, around = (0, 0), b""
        for form in forms:
            if sizes != (form.head, form.tail):
                sizes, around = (form.head, form.tail), _around(opened, offset, length, form.head, form.tail)
            parsed = form.parsed(around, path, offset)
            if parsed is not None:
                logger.debug("opened %s for its header at byte %d", path, offset)
                return parsed
        archive = TorchFile(path, offset, length, opened)
        learned = _form_of(archive, opened, offset, length) if len(forms) < MAX_FORMS else None
        if learned is not None:
            forms.append(learned)
        return archive.tree, archive.sums


@contextlib.contextmanager
def opened_chunks(path: Path) -> Iterator[BufferedReader]:
    """Open a file of chunks.

    Raises:
        UnreadableCheckpoint: it cannot be read.
    """
    try:
        with open_file(path) as opened:
            yield opened
    except OSError as error:
        raise open_error(path, error) from error


def _around(opened: BufferedReader, offset: int, length: int, head: int, tail: int) -> bytes:
    fd = handle_of(opened)
    try:
        return bytes_at(fd, head, offset) + bytes_at(fd, tail, offset + length - tail)
    except OSError:
        return b""  # parsing the archive raises the error


def _form_of(archive: TorchFile, opened: BufferedReader, offset: int, length: int) -> _Form | None:
    """Return the form of an archive of one tensor; None if the bytes around the tensor are not enough to recognise
    others.
    """
    if not isinstance(archive.tree, View) or len(archive.starts) != 1:
        return None
    ((key, begin),) = archive.starts.items()
    name = f"data/{key}"
    record, start = archive.records[name], begin - offset
    head, tail = start, length - start - record.size
    if head + tail > MAX_AROUND:
        return None
    around = _around(opened, offset, length, head, tail)
    if len(around) != head + tail or not _is_plain(around[head:], length, archive.records):
        return None

    def place(at: int) -> int:
        return at if at <= head else at - record.size

    free = [(record.header + CHECKSUM_IN_HEADER, 4), (record.entry + CHECKSUM_IN_ENTRY, 4)]
    if start + record.size < record.until:
        free.append((start + record.size + CHECKSUM_BEHIND, 4))
    for other, each in archive.records.items():
        if other not in (name, "data.pkl", "byteorder"):  # not read
            free += [(each.header, each.until - each.header), (each.entry + CHECKSUM_IN_ENTRY, 4)]
    mask = bytearray(b"\xff" * len(around))
    for at, size in free:
        first = place(at)
        mask[first : first + size] = bytes(size)
    kept = int.from_bytes(mask, "little")
    fixed = int.from_bytes(around, "little") & kept
    view = archive.tree._replace(offset=archive.tree.offset - offset)
    checksum = place(record.entry + CHECKSUM_IN_ENTRY)
    return _Form(view, name, start, record.size, head, tail, checksum, kept, fixed)


def _is_plain(tail: bytes, length: int, records: Mapping[str, Record]) -> bool:
    """Return whether all records come before the directory, and the directory before the end record that refers to it;
    otherwise the mask cannot be trusted.
    """
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or any(record.until <= record.header for record in records.values()):
        return False
    numbers: tuple[int, int, int] = struct.unpack_from("<HLL", tail, end + 10)
    count, size, start = numbers
    ends_at = length - len(tail) + end
    return (
        count == len(records)
        and start == max(record.until for record in records.values())
        and start >= length - len(tail)
        and start + size <= ends_at
    )
