"""Checksums of written bytes, computed while they are copied, and counts of the NaN and infinite elements in them.

A checksum is XXH3 of 64 bits: it detects accidental damage, and gives no protection against an attacker. A `Region`
is a run of bytes of one file that has a checksum for each of its blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mcore_convert.storage.disk import read_at
from mcore_convert.storage.gather import scratch
from mcore_convert.storage.sources import Handle
from mcore_convert.storage.views import DTYPE_SIZES, View

ALGORITHM = "xxh3_64"
BLOCK = 16 * 2**20  # bytes with a checksum of their own: the precision with which damage is located
STEP = 256 * 2**10  # bytes that are read, hashed and written while they are in the cache

# Takes bytes that were written: file, offset and content. In any order; bytes in file order cost no re-reading.
Feed = Callable[[Path, int, memoryview], None]

# The bits, without the sign, of the largest finite number and of infinity; None where a dtype has no infinity.
LARGEST: dict[str, tuple[int, int | None]] = {
    "float64": (0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float32": (0x7F7FFFFF, 0x7F800000),
    "bfloat16": (0x7F7F, 0x7F80),
    "float16": (0x7BFF, 0x7C00),
    "float8_e5m2": (0x7B, 0x7C),
    "float8_e4m3fn": (0x7E, None),
}


def hand_on(feed: Feed | None, view: View, written: NDArray[Any]) -> None:
    """Feed the elements that were written to a view, if they are one run of bytes."""
    if feed is not None and view.is_contiguous:
        feed(view.path, view.offset, written.reshape(-1).view(np.uint8).data)


def sealed(parts: Iterable[bytes], last: Callable[[str], bytes]) -> Iterator[bytes]:
    """Yield the parts of a file, joined into pieces of at least STEP bytes,
    and at the end what `last` returns for their checksum.
    """
    digest = xxhash.xxh3_64()
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= STEP:
            digest.update(held)
            yield bytes(held)
            held.clear()
    digest.update(held)
    yield bytes(held) + last(digest.hexdigest())


class Unsealed:
    """Lines of a file that `sealed` has written, without the last line, which must have the checksum of the others.

    Args:
        file: positioned at its beginning.
        last: matches the last line, its first group the checksum, which is in `checksum` after the lines were read.
    """

    def __init__(self, file: Iterable[bytes], last: re.Pattern[bytes]) -> None:
        self._file, self._last = file, last
        self.checksum = ""

    def __iter__(self) -> Iterator[bytes]:
        """Yield each line without its newline.

        Raises:
            ValueError: the checksum differs, or there is none.
        """
        digest, line = xxhash.xxh3_64(), b""
        for following in self._file:
            if line:
                digest.update(line)
                yield line[:-1]
            line = following
        part = self._last.fullmatch(line)
        if part is None or digest.hexdigest() != part[1].decode():
            raise ValueError("the checksum is another")
        self.checksum = digest.hexdigest()


def checksum_of_runs(fd: Handle, path: Path, runs: Iterable[tuple[int, int]]) -> str:
    """Return the checksum of runs of bytes of a file, each from its start to its end, concatenated.

    Raises:
        Shrunk: the file ends before.
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_64()
    for start, end in runs:
        for at in range(start, end, STEP):
            part = scratch(min(STEP, end - at)).data
            read_at(fd, part, at, path)
            digest.update(part)
    return digest.hexdigest()


def gaps_between(runs: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield the gaps before, between and after runs of bytes of a file, which are in order."""
    at = 0
    for start, end in runs:
        if at < start:
            yield at, start
        at = max(at, end)
    if at < size:
        yield at, size


def not_finite(bits: NDArray[Any], dtype: str) -> tuple[int, int]:
    """Return how many elements are NaN, and how many infinite.

    Args:
        bits: elements as unsigned integers of their size.
    """
    if dtype not in LARGEST or not bits.size:
        return 0, 0
    finite, infinity = LARGEST[dtype]
    sign = 1 << (8 * bits.itemsize - 1)
    # two plain reductions, one per sign, cost half as much as masking the sign
    if int(bits.view(f"i{bits.itemsize}").max()) <= finite and int(bits.max()) <= sign | finite:
        return 0, 0
    sizes = bits & bits.dtype.type(sign - 1)
    beyond = int(np.count_nonzero(sizes > finite))
    infinite = 0 if infinity is None else int(np.count_nonzero(sizes == infinity))
    return beyond - infinite, infinite


class Region:
    """Bytes `start` to `end` of a file that is written, with their checksums and counts.

    Attributes:
        sums: the checksum of each block of BLOCK bytes, the last of which may be shorter.
        pending: how many copies still have to fill it.
    """

    __slots__ = ("_at", "_hash", "dtype", "end", "infinite", "nan", "path", "pending", "start", "sums")

    def __init__(self, path: Path, start: int, end: int, dtype: str | None) -> None:
        self.path, self.start, self.end, self.dtype = path, start, end, dtype
        self.sums: list[str] = []
        self.pending = self.nan = self.infinite = 0
        self._at = start
        self._hash: Any = None

    def add(self, at: int, part: memoryview) -> None:
        """Add bytes that were written. Those that do not follow the previous ones are left for `finish`.

        Each byte is written once, so at most one thread has the bytes that come next: no lock is needed.
        """
        if at != self._at or not len(part):
            return
        if self.dtype is not None:
            nan, infinite = not_finite(np.frombuffer(part, f"u{DTYPE_SIZES[self.dtype]}"), self.dtype)
            self.nan, self.infinite = self.nan + nan, self.infinite + infinite
        if at == self.start and len(part) == self.end - at <= BLOCK:  # all of a small tensor at once
            self.sums.append(xxhash.xxh3_64_hexdigest(part))
            self._at = self.end
            return
        done = 0
        while done < len(part):
            if self._hash is None:
                self._hash = xxhash.xxh3_64()
            room = BLOCK - (at + done - self.start) % BLOCK
            count = min(room, len(part) - done)
            self._hash.update(part[done : done + count])
            done += count
            if count == room or at + done == self.end:
                self.sums.append(self._hash.hexdigest())
                self._hash = None
        self._at = at + done

    @property
    def is_complete(self) -> bool:
        """Whether all bytes of the region were added."""
        return self._at == self.end

    def finish(self, fd: int) -> None:
        """Read the bytes that were not added in order from the file itself."""
        while self._at < self.end:
            part = scratch(min(STEP, self.end - self._at)).data
            read_at(fd, part, self._at, self.path)
            self.add(self._at, part)

    def adopt(self, nan: int, infinite: int, sums: Iterable[str]) -> None:
        """Adopt the counts and checksums of bytes that others have written."""
        self.nan, self.infinite, self.sums = nan, infinite, list(sums)
        self._at, self.pending = self.end, 0
