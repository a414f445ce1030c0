"""Sources of data: JSON lines, plain text, Parquet, and data sets of the `datasets` package, read in chunks."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mcore_convert.errors import DataError
from mcore_convert.storage.paths import near_miss
from mcore_convert.text.names import meant
from train_entry.data.chunks import Chunk, JsonLines, Plain, Rows

Kind = Literal["jsonl", "text", "parquet", "datasets"]

CHUNK = 1 << 20  # bytes that are read and tokenized at once: a third of a second, so that processes can end quickly
LONGEST = 1 << 30  # bytes of a line or document: a longer one has no separator
MOST_ROWS = 1 << 14  # of a table, in a chunk

HUB = "datasets:"
SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst")
SAVED = ("dataset_info.json", "state.json")  # files that `Dataset.save_to_disk` writes
BOM = b"\xef\xbb\xbf"
TEXT_TYPES = ("string", "large_string", "string_view")  # of Arrow


@dataclass(frozen=True)
class Reading:
    """Settings for reading sources.

    `keys`: fields or columns with text. `separator` and `document` are for plain text: the separator of documents, or
    else whether each line or each file is a document.
    """

    keys: tuple[str, ...] = ("text",)
    kind: Kind | None = None
    separator: str = ""
    document: Literal["line", "file"] = "line"


@dataclass(frozen=True)
class Source:
    """Existing source: its name, and its size in bytes, as far as known."""

    name: str
    kind: Kind
    nbytes: int


def source_of(name: str, reading: Reading) -> Source:
    """Return the source of a name.

    Raises:
        DataError: there is none of that name.
    """
    if name.startswith(HUB):
        return Source(name, "datasets", 0)
    path = Path(name)
    if path.is_dir():
        if any((path / file).is_file() for file in SAVED):
            size = sum(file.stat().st_size for file in path.glob("*.arrow"))
            return Source(name, "datasets", size)
        raise DataError(
            f"`{name}` is a directory, and not one that `Dataset.save_to_disk` has left",
            hint="name its files, as *.jsonl",
        )
    if not path.is_file():
        raise DataError(
            f"`{name}` does not exist{meant(near_miss(path))}", hint=f"a data set of the Hub is written as {HUB}NAME"
        )
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    return Source(name, reading.kind or SUFFIXES.get(suffix, "text"), path.stat().st_size)


def chunks(source: Source, reading: Reading) -> Iterator[Chunk]:
    """Yield a source in pieces of about a megabyte, in order.

    Raises:
        DataError: it is damaged, or has no such column.
    """
    if source.kind == "parquet":
        yield from _parquet(source, reading.keys)
    elif source.kind == "datasets":
        yield from _dataset(source, reading.keys)
    elif source.kind == "jsonl":
        for line, read, data in _blocks(source.name, b"\n"):
            yield JsonLines(source.name, line, read, data)
    else:
        by_line = b"\n" if reading.document == "line" else b""
        separator = reading.separator.encode() or by_line
        for line, read, data in _blocks(source.name, separator):
            yield Plain(source.name, line, read, data, separator)


def _blocks(name: str, separator: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield a file in blocks that end after a separator: number of the first line, bytes read, and the block.

    Without a separator the whole file is one block.
    """
    line, data = 1, bytearray()
    with _opened(name) as (stream, position):
        while block := _read(stream, name):
            before = len(data)
            data += block if before or line > 1 else block.removeprefix(BOM)
            # the earlier data contain no separator, but perhaps the beginning of one at their end
            last = data.rfind(separator, max(0, before - len(separator))) if separator else -1
            if last >= 0:
                cut = last + len(separator)
                yield line, position(), bytes(data[:cut])
                line += data.count(b"\n", 0, cut)
                del data[:cut]
            elif len(data) > LONGEST:
                raise DataError(
                    f"`{name}` has more than {LONGEST >> 30} GiB without an end of a document, from line {line} on",
                    hint="`--separator` says what stands between documents",
                )
        if data:
            yield line, position(), bytes(data)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Scope of a file, decompressed on reading, and of its position in the compressed file."""
    try:
        raw = open(name, "rb")  # noqa: PTH123, SIM115 -- unlike that of `Path`, its type is known
    except OSError as error:
        raise DataError(f"`{name}` cannot be read: {error.strerror}") from error
    with raw:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, raw.tell  # type: ignore[misc]
        elif name.endswith(".zst"):
            with _arrow().CompressedInputStream(raw, "zstd") as unpacked:
                yield unpacked, raw.tell
        else:
            yield raw, raw.tell


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(CHUNK)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"`{name}` cannot be read: {error}", hint="the file may not have been copied completely"
        ) from error


def _parquet(source: Source, keys: Sequence[str]) -> Iterator[Chunk]:
    arrow = _arrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.name) as file:
            _check_columns(source.name, file.schema_arrow, keys)
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            rows = _rows_of_a_chunk(sum(group.total_byte_size for group in groups), file.metadata.num_rows)
            batches = file.iter_batches(batch_size=rows, columns=list(keys))
            yield from _rows(batches, keys, source.nbytes, file.metadata.num_rows)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"`{source.name}` cannot be read: {str(error).splitlines()[0]}") from error


def _dataset(source: Source, keys: Sequence[str]) -> Iterator[Chunk]:
    rows_of_split = _load_dataset(source.name)
    _check_columns(source.name, rows_of_split.features.arrow_schema, keys)
    rows = _rows_of_a_chunk(rows_of_split.data.nbytes, len(rows_of_split))
    batches = rows_of_split.select_columns(list(keys)).with_format("arrow").iter(batch_size=rows)
    yield from _rows(batches, keys, source.nbytes, len(rows_of_split))


def _rows_of_a_chunk(nbytes: int, rows: int) -> int:
    return max(1, min(MOST_ROWS, CHUNK * rows // max(1, nbytes)))


def _rows(batches: Iterable[Any], keys: Sequence[str], nbytes: int, total: int) -> Iterator[Chunk]:
    done = 0
    for batch in batches:
        done += batch.num_rows
        yield Rows(nbytes * done // total, {key: batch.column(key).to_pylist() for key in keys})


def _load_dataset(name: str) -> Any:
    """Return `datasets:NAME[:SPLIT]`, with `owner/name` or `owner/name@configuration` as NAME; or a saved data set."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"`{name}` needs the package `datasets`", hint="pip install 'mcore-convert[datasets]'"
        ) from error
    datasets.disable_progress_bars()
    try:
        if not name.startswith(HUB):
            return datasets.load_from_disk(name)
        name_and_configuration, _, split = name.removeprefix(HUB).partition(":")
        repository, _, configuration = name_and_configuration.partition("@")
        return datasets.load_dataset(repository, configuration or None, split=split or "train")
    except Exception as error:  # `datasets` lets errors of its many readers through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"`{name}` cannot be loaded: {reason}", hint=f"a split is written behind a colon: {HUB}NAME:SPLIT"
        ) from error


def _check_columns(name: str, schema: Any, keys: Sequence[str]) -> None:
    """Prove that a table has the columns, with text in them."""
    problems = []
    for key in keys:
        index = schema.get_field_index(key)
        if index < 0:
            problems.append(f"it has no column `{key}`, but {', '.join(f'`{other}`' for other in schema.names)}")
        elif str(schema.field(index).type) not in TEXT_TYPES:
            problems.append(f"`{key}` holds {schema.field(index).type}, not text")
    if problems:
        raise DataError(f"`{name}` has other columns", items=problems, hint="name those with text: --column NAME")


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            "Parquet and .zst need the package `pyarrow`", hint="pip install 'mcore-convert[train]'"
        ) from error
    return pyarrow
