"""The directory of a zip archive with uncompressed records, as torch writes it."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

TAIL = 4096  # bytes that are read from the end first: they contain the whole directory of a single tensor's archive
MAX_ZIP, MAX_RECORDS = 2**32 - 1, 2**16 - 1  # values of this size or more are in zip64 fields

HEADER = 30  # bytes of a record's own header, before its name
MOST = 256  # of the header with name and padding, read in one call if they are not longer
ENTRY, OWN = struct.Struct("<10xH4xLLLHHH8xL"), struct.Struct("<4s22xHH")  # of the directory, of a record
DESCRIPTORS = (16, 24)  # bytes that may follow a record: its checksum and sizes again
MAX_DIRECTORY = 64 * 2**20  # bytes; those of a million tensors


class Record(NamedTuple):
    """One entry of an archive; a `checksum` of 0 means that the writer has not computed one.

    `until` is the offset of the next entry, or of the directory; `entry` is the offset of its directory entry.
    """

    header: int
    size: int
    checksum: int = 0
    name: bytes = b""
    until: int = 0
    entry: int = 0


def read_records(bytes_at: Callable[[int, int], bytes], length: int) -> dict[str, Record]:
    """Return the central directory, read from the end, by names without the archive's own folder.

    Args:
        bytes_at: returns `count` bytes at an offset of the archive, which has `length` bytes.

    Raises:
        ValueError, EOFError, struct.error: it is damaged, or not what torch writes.
    """
    tail_start = max(0, length - TAIL)
    tail = bytes_at(tail_start, length - tail_start)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0:
        raise ValueError("its end is missing")
    count, size, start = struct.unpack_from("<HLL", tail, end + 10)
    if MAX_ZIP in (size, start) or count == MAX_RECORDS:
        (locator,) = struct.unpack_from("<Q", tail, end - 20 + 8)
        count, size, start = struct.unpack_from("<QQQ", bytes_at(locator, 56), 32)
    if start >= tail_start:
        raw = tail[start - tail_start : start - tail_start + size]
    else:
        if size > MAX_DIRECTORY:
            raise ValueError(f"its directory has {size:,} bytes")
        raw = bytes_at(start, size)
    records: dict[str, Record] = {}
    at = 0
    for _ in range(count):
        method, checksum, stored, full, name_size, extra_size, note_size, header = ENTRY.unpack_from(raw, at)
        name = raw[at + 46 : at + 46 + name_size].decode()
        extra = raw[at + 46 + name_size : at + 46 + name_size + extra_size]
        if MAX_ZIP in (full, stored, header):
            full, header = _zip64(extra, full, stored, header)
        if method != 0:
            raise ValueError(f"`{name}` is compressed")
        short = name.partition("/")[2]
        if short in records:
            raise ValueError(f"it has `{name}` twice")
        records[short] = Record(header, full, checksum, name.encode(), 0, start + at)
        at += 46 + name_size + extra_size + note_size
    _refuse_shared(records)
    following = start
    for short, record in sorted(records.items(), key=lambda item: -item[1].header):
        records[short] = Record(*record[:4], following, record.entry)
        following = record.header
    return records


def start_of(bytes_at: Callable[[int, int], bytes], record: Record) -> int:
    """Return the offset of a record's bytes: after its own header, which alone has the size of its padding.

    All bytes between two headers must be accounted for: with a wrong size of the padding, wrong bytes would be read.

    Raises:
        ValueError, EOFError: the header is damaged.
    """
    content = bytes_at(record.header, max(HEADER, min(record.until - record.header - record.size, MOST)))
    signature, name_size, extra_size = OWN.unpack_from(content)
    if signature != b"PK\x03\x04":
        raise ValueError(f"there is no record at byte {record.header:,}")
    start = record.header + HEADER + int(name_size) + int(extra_size)
    left = record.until - start - record.size
    if left < 0:
        raise EOFError(f"a record of {record.size} bytes does not fit")
    behind = bytes_at(start + record.size, 4) if left else b""
    extra = content[HEADER : start - record.header]
    if start - record.header > len(content):
        extra = bytes_at(record.header + HEADER, int(name_size) + int(extra_size))
    sound = extra.startswith(record.name) and name_size == len(record.name) and _is_tiled(extra[name_size:])
    if not sound or (left and (left not in DESCRIPTORS or behind != b"PK\x07\x08")):
        raise ValueError(f"the header at byte {record.header:,} does not fit its record")
    return start


def _is_tiled(extra: bytes) -> bool:
    """Return whether fields, each with its size, fill the bytes exactly."""
    at = 0
    while at + 4 <= len(extra):
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    return at == len(extra)


def _refuse_shared(records: Mapping[str, Record]) -> None:
    """Refuse records that share bytes: one would be read in place of the other."""
    in_order = sorted(records.items(), key=lambda item: item[1].header)
    for (name, record), (following, after) in itertools.pairwise(in_order):
        if record.header + record.size > after.header or record.header == after.header:
            raise ValueError(f"`{name}` and `{following}` lie in one another")


def _zip64(extra: bytes, full: int, stored: int, header: int) -> tuple[int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            full = values.pop(0) if full == MAX_ZIP else full
            if stored == MAX_ZIP:
                values.pop(0)
            return full, values.pop(0) if header == MAX_ZIP else header
        at += 4 + size
    raise ValueError("a large record has no size")
