"""Megatron's `.bin`/`.idx` pairs: checked before they are opened, and written without Megatron in constant memory.

`.bin` has the tokens of all documents, one after the other. `.idx` (megatron/core/datasets/indexed_dataset.py, the same
in every version) has a header of 34 bytes (magic, version 1, code of the dtype, numbers of sequences and of documents
plus one), then the length of each sequence (int32), its first byte in `.bin` (int64), and the first sequence of each
document, with the number of sequences at the end (int64). A sequence is a document here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mcore_convert.errors import DataError, UnwritableTarget
from mcore_convert.storage.marker import unfinished, unfinished_ones
from mcore_convert.storage.sources import open_file

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents + 1
VERSION = 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floats: not for tokens
CODES = {name: code for code, name in DTYPES.items()}
LARGEST_UINT16_VOCABULARY = 65499  # Megatron's own limit: larger ones are written as int32

SUFFIXES = (".bin", ".json", ".idx")  # of a pair and its sidecar, in the order in which they are renamed
BLOCK = 1 << 20  # entries of an index that are computed at once
LOOKS, LOOK = 64, 1 << 16  # number of places of a `.bin` that are checked, and of tokens at each


def dtype_for(vocab_size: int) -> str:
    """Return the dtype in which Megatron-LM stores tokens of a vocabulary."""
    return "uint16" if vocab_size <= LARGEST_UINT16_VOCABULARY else "int32"


@dataclass(frozen=True)
class Pair:
    """Facts of a pair, from its index."""

    prefix: str
    dtype: str
    sequences: int
    tokens: int

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the tokens of each sequence, from the file."""
        if not self.sequences:  # an empty array cannot be mapped
            return np.empty(0, np.int32)
        return np.memmap(f"{self.prefix}.idx", np.int32, "r", HEADER.size, (self.sequences,))


def open_pair(prefix: str) -> Pair:
    """Read the header of an index, and prove that both files have the size that it implies.

    Raises:
        DataError: a file is missing, is not an index, or does not match the other.
    """
    idx, binary = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [str(file) for file in (binary, idx) if not file.is_file()]
    if missing:
        raise DataError(
            f"the data `{prefix}` are not there",
            items=[f"{file} is missing" for file in missing],
            hint="`mcore-convert data prepare` makes both files; name them without .bin and .idx",
        )
    with open_file(idx) as file:
        header = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"`{idx}` is no index of Megatron's, or damaged", hint="prepare the data again")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != VERSION or code not in DTYPES:
            raise DataError(f"`{idx}` has version {version} and dtype code {code}, which are not known")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size not in (expected, expected + sequences):  # the latter includes modes, for multimodal data
            raise DataError(
                f"`{idx}` has {size:,} bytes, and should have {expected:,} for its {sequences:,} sequences",
                hint="the file was not copied or written completely: prepare the data again",
            )
        end = _end_of_last(file, sequences) if sequences else (0, 0)
    itemsize = np.dtype(DTYPES[code]).itemsize
    expected, size = end[0] + end[1] * itemsize, binary.stat().st_size
    if size != expected:
        raise DataError(
            f"`{idx}` does not fit `{binary}`: by the index it has {expected:,} bytes, and it has {size:,}",
            hint="one of them is of other data, or was not copied or written completely: prepare the data again",
        )
    return Pair(prefix, DTYPES[code], sequences, size // itemsize)


def _end_of_last(file: BinaryIO, sequences: int) -> tuple[int, int]:
    """Return the first byte of the last sequence, and its number of tokens."""
    file.seek(HEADER.size + 4 * (sequences - 1))
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
    (first,) = struct.unpack("<q", file.read(8))
    return first, length


def check_tokens(pair: Pair, vocab_size: int) -> None:
    """Check tokens all over a `.bin`, and prove that the model has a row for each.

    Raises:
        DataError: there is a token without a row.
    """
    if not pair.tokens:
        return
    tokens = np.memmap(f"{pair.prefix}.bin", pair.dtype, "r")
    places = np.unique(np.linspace(0, max(0, pair.tokens - LOOK), LOOKS, dtype=np.int64))
    for place in places.tolist():
        window = tokens[place : place + LOOK]
        low, high = int(window.min()), int(window.max())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"`{pair.prefix}.bin` has the token {low if low < 0 else high}, the model a vocabulary of {vocab_size}",
                hint="the data were made with another tokenizer: prepare them with the model's own",
            )


class PairWriter:
    """Writer of a pair under partial names, in constant memory; `publish` renames the files, `discard` removes them.

    A sidecar at `partial(".json")` is renamed with them. `identity` is that of the lock, which the caller holds: all
    other files with a partial name are left by killed processes, and are removed.
    """

    def __init__(self, prefix: str, dtype: str, identity: str) -> None:
        self.prefix, self.dtype, self.identity = prefix, dtype, identity
        self.sequences = self.tokens = 0
        self._bin = self._open(".bin")
        self._idx = self._open(".idx")
        self._idx.write(bytes(HEADER.size))  # the counts are known at the end

    def _open(self, suffix: str) -> BinaryIO:
        path = self.partial(suffix)
        try:
            for stale in unfinished_ones(Path(f"{self.prefix}{suffix}")):
                stale.unlink(missing_ok=True)
            return path.open("x+b")
        except OSError as error:
            raise UnwritableTarget(f"`{path}` cannot be written: {error.strerror}") from error

    def partial(self, suffix: str) -> Path:
        """Return the path of a file while it is being written."""
        return unfinished(Path(f"{self.prefix}{suffix}"), self.identity)

    def add(self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int32]) -> None:
        """Append documents: their ids in one array of the pair's dtype, and the number of ids of each.

        Raises:
            OSError: the file system reports an error.
        """
        self._bin.write(ids.data)
        self._idx.write(lengths.data)
        self.sequences += len(lengths)
        self.tokens += len(ids)

    def complete(self) -> None:
        """Write the rest of the index, and flush both files to the disk.

        Raises:
            OSError: the file system reports an error.
        """
        first = 0
        for lengths in self._blocks_of_lengths():
            ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(self.dtype).itemsize + first
            firsts = np.concatenate([[first], ends[:-1]])
            self._idx.write(firsts.data)
            first = int(ends[-1])
        for start in range(0, self.sequences + 1, BLOCK):
            self._idx.write(np.arange(start, min(start + BLOCK, self.sequences + 1), dtype=np.int64).data)
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.sequences + 1))
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def _blocks_of_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the lengths, read back from the index; after each block the file is positioned at its end."""
        for start in range(0, self.sequences, BLOCK):
            count = min(BLOCK, self.sequences - start)
            self._idx.seek(HEADER.size + 4 * start)
            block = np.frombuffer(self._idx.read(4 * count), np.int32)
            self._idx.seek(0, os.SEEK_END)
            yield block

    def publish(self) -> None:
        """Rename the files, the index last: without it there is no pair, and never a pair with one new half.

        Raises:
            OSError: the file system reports an error.
        """
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in SUFFIXES:
            if self.partial(suffix).exists():
                self.partial(suffix).replace(f"{self.prefix}{suffix}")

    def discard(self) -> None:
        """Remove the partial files, unless they are renamed already."""
        for file in (self._bin, self._idx):
            file.close()
        for suffix in SUFFIXES:
            self.partial(suffix).unlink(missing_ok=True)
