"""Chunks of a source, each with many documents, as sent to the processes that tokenize: cut, not yet parsed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_convert.errors import DataError, ranged

T = TypeVar("T")

Document = Sequence[str | None]  # the text of each key; None if it has none
SHOWN = 60  # characters of a bad line


@dataclass(frozen=True)
class JsonLines:
    """Whole lines of JSON. `line`: number of the first, from 1; `read`: bytes of the source up to their end."""

    file: str
    line: int
    read: int
    data: bytes

    def documents(self, keys: Sequence[str]) -> Iterator[Document]:
        """Return a document for each line that is not blank.

        Raises:
            DataError: lines are invalid; names all of them.
        """
        hint = "`--json-keys` names the fields that hold text; correct or remove these lines"
        return self.records(lambda record: texts_of(record, keys), hint)

    def records(self, read: Callable[[Any], T], hint: str) -> Iterator[T]:
        """Yield the result of `read` for each line that is not blank; its ValueError states the line's problem.

        Raises:
            DataError: lines are invalid; names all of them, those with the same problem together.
        """
        lines: dict[str, list[int]] = {}  # by their problem
        shown: dict[str, str] = {}
        # not `splitlines`: JSON strings may contain other line separators than this one
        for number, line in enumerate(self.data.split(b"\n"), start=self.line):
            if not line.strip():
                continue
            try:
                yield read(json.loads(_decoded(line)))
            except (ValueError, RecursionError) as error:
                lines.setdefault(_reason(error), []).append(number)
                shown.setdefault(_reason(error), _shown(line))
        problems = []
        for reason, (first, *others) in lines.items():
            more = f" (and {'line' if len(others) == 1 else 'lines'} {ranged(others)})" if others else ""
            problems.append(f"{self.file}:{first}: {reason}: {shown[reason]}{more}")
        if problems:
            raise DataError("lines of the input are not what they should be", items=problems, hint=hint)


def texts_of(record: Any, keys: Sequence[str]) -> Document:
    """Return the texts of a record.

    Raises:
        ValueError: it is not an object, lacks a key, or has a value that is not text.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"no `{missing[0]}` among its keys ({', '.join(map(str, record)) or 'none'})")
    for key in keys:
        if record[key] is not None and not isinstance(record[key], str):
            raise ValueError(f"`{key}` is a {type(record[key]).__name__}, not text")
        if record[key] is not None:
            record[key].encode()  # half of a surrogate pair is not text
    return [record[key] for key in keys]


@dataclass(frozen=True)
class Plain:
    """Text, cut behind a separator; a single document without one. `line` and `read` as above."""

    file: str
    line: int
    read: int
    data: bytes
    separator: bytes

    def documents(self, keys: Sequence[str]) -> Iterator[Document]:
        """Yield the texts between separators, without the line ends around them.

        Raises:
            DataError: it is not UTF-8.
        """
        try:
            text = _decoded(self.data)
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise DataError(f"{self.file}:{line}: {_reason(error)}", hint="convert the file to UTF-8") from error
        parts = text.split(self.separator.decode()) if self.separator else [text]
        if self.separator and not parts[-1].strip():  # a document after the last separator must not be blank
            parts.pop()
        for part in parts:
            yield [part.strip("\r\n")]


@dataclass(frozen=True)
class Rows:
    """Rows of a table, by columns. `read`: bytes of the source up to their end, approximately."""

    read: int
    columns: Mapping[str, Sequence[str | None]]

    def documents(self, keys: Sequence[str]) -> Iterator[Document]:
        """Yield a document for each row."""
        yield from zip(*(self.columns[key] for key in keys), strict=True)


Chunk = JsonLines | Plain | Rows


def _decoded(data: bytes) -> str:
    return data.decode("utf-8")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} is no UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair, which is no text"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
