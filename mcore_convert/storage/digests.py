"""Checksums of what is written, taken from the bytes as they pass, and counts of the numbers in them that are none.

A checksum is XXH3 of 64 bits: it finds damage by accident, and says nothing against an attacker. A `Region` is a run of
bytes of one file that has a checksum for each of its blocks.
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
BLOCK = 16 * 2**20  # bytes with a checksum of their own: how closely damage can be placed
STEP = 256 * 2**10  # bytes that are read, added and written while they are in the cache

# Takes bytes that were written: the file, where in it, and what. In any order; those in the order of the file are free.
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
    """Feed what was written to a view, where it is one run of bytes."""
    if feed is not None and view.is_contiguous:
        feed(view.path, view.offset, written.reshape(-1).view(np.uint8).data)


def sealed(parts: Iterable[bytes], last: Callable[[str], bytes]) -> Iterator[bytes]:
    """Yield the parts of a file, and at the end what `last` makes of their checksum;
    in pieces that are worth a write.
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
    """The lines of a file that `sealed` has written, without the last, which must have the checksum of those before.

    Args:
        file: stands at its beginning.
        last: matches the last line, its first group the checksum; that is `checksum` after the lines.
    """

    def __init__(self, file: Iterable[bytes], last: re.Pattern[bytes]) -> None:
        self._file, self._last = file, last
        self.checksum = ""

    def __iter__(self) -> Iterator[bytes]:
        """Give each line without its end.

        Raises:
            ValueError: the checksum is another, or there is none.
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
    """Return the checksum of runs of bytes of a file, each from its start to its end, one behind the other.

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
    """Yield what lies between runs of bytes of a file, which are in order, and at its ends."""
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
    # two plain reductions, of each sign, cost half of what masking the sign does
    if int(bits.view(f"i{bits.itemsize}").max()) <= finite and int(bits.max()) <= sign | finite:
        return 0, 0
    sizes = bits & bits.dtype.type(sign - 1)
    beyond = int(np.count_nonzero(sizes > finite))
    infinite = 0 if infinity is None else int(np.count_nonzero(sizes == infinity))
    return beyond - infinite, infinite


class Region:
    """Bytes `start` to `end` of a file that is written, with what is known of them.

    Attributes:
        sums: the checksum of each block of BLOCK bytes, the last of which may be shorter.
        pending: how many copies are still to fill it.
    """

    __slots__ = ("_at", "_hash", "dtype", "end", "infinite", "nan", "path", "pending", "start", "sums")

    def __init__(self, path: Path, start: int, end: int, dtype: str | None) -> None:
        self.path, self.start, self.end, self.dtype = path, start, end, dtype
        self.sums: list[str] = []
        self.pending = self.nan = self.infinite = 0
        self._at = start
        self._hash: Any = None

    def add(self, at: int, part: memoryview) -> None:
        """Take bytes that were written. Those that do not follow the ones before are left for `finish`.

        Each byte is written once, so that one thread at most has those that come next: this needs no lock.
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
        """Whether all of its bytes were taken."""
        return self._at == self.end

    def finish(self, fd: int) -> None:
        """Read what was not taken in order from the file itself."""
        while self._at < self.end:
            part = scratch(min(STEP, self.end - self._at)).data
            read_at(fd, part, self._at, self.path)
            self.add(self._at, part)

    def adopt(self, nan: int, infinite: int, sums: Iterable[str]) -> None:
        """Take what is known of bytes that others have written."""
        self.nan, self.infinite, self.sums = nan, infinite, list(sums)
        self._at, self.pending = self.end, 0
